#include "kernels/cpu/thread_pool.hpp"

#include <algorithm>

#include "base/spin.hpp"

namespace gyre::cpu {
namespace {

// The maximum is about the cost of falling asleep and being woken. If spinning recently failed,
// other threads are using the processors and spinning only takes time from them.
constexpr std::chrono::nanoseconds kLeastSpin{3000}, kMostSpin{50000};

// Returns whether the condition came true within `spin`; lengthens `spin` if so, else shortens it.
template <typename Condition>
bool spin_until(Condition&& condition, std::chrono::nanoseconds& spin) {
    const auto end = std::chrono::steady_clock::now() + spin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (condition()) {
                spin = std::min(2 * spin, kMostSpin);
                return true;
            }
            spin_pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    spin = std::max(spin / 4, kLeastSpin);
    return false;
}

}  // namespace

ThreadPool::ThreadPool(int threads) : spin_(kMostSpin) {
    for (int worker = 1; worker < threads; ++worker) {
        workers_.emplace_back([this, worker] { work(worker); });
    }
}

ThreadPool::~ThreadPool() {
    {
        const std::lock_guard lock(mutex_);
        state_.fetch_or(kStop);
    }
    start_.notify_all();
    for (std::thread& worker : workers_) {
        worker.join();
    }
}

void ThreadPool::run(const Job& job) {
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    state_.store((state_.load() / kGeneration + 1) * kGeneration + kOpen);
    if (sleeping_.load() > 0) {
        const std::lock_guard lock(mutex_);
        start_.notify_all();
    }
    take_tasks(job, 0);
    state_.fetch_sub(kOpen);
    const auto nobody = [this] { return state_.load() % kOpen == 0; };
    if (!spin_until(nobody, spin_)) {
        std::unique_lock lock(mutex_);
        waiting_.store(true);
        done_.wait(lock, nobody);
        waiting_.store(false);
    }
}

void ThreadPool::work(int worker) {
    std::uint64_t seen = 0;
    std::chrono::nanoseconds spin = kMostSpin;
    const auto called = [&] {
        const std::uint64_t state = state_.load();
        return (state & kStop) != 0 || ((state & kOpen) != 0 && state / kGeneration != seen);
    };
    for (;;) {
        if (!spin_until(called, spin)) {
            std::unique_lock lock(mutex_);
            sleeping_.fetch_add(1);
            start_.wait(lock, called);
            sleeping_.fetch_sub(1);
        }
        std::uint64_t state = state_.load();
        if ((state & kStop) != 0) {
            return;
        }
        if ((state & kOpen) == 0 || !state_.compare_exchange_strong(state, state + 1)) {
            continue;  // the job was closed meanwhile, or another worker joined or left
        }
        seen = state / kGeneration;
        take_tasks(job_, worker);
        const bool last = state_.fetch_sub(1) % kOpen == 1;
        if (last && waiting_.load()) {
            const std::lock_guard lock(mutex_);
            done_.notify_one();
        }
    }
}

void ThreadPool::take_tasks(const Job& job, int worker) {
    for (std::int64_t i = next_.fetch_add(1); i < job.count; i = next_.fetch_add(1)) {
        job.call(job.task, i, worker);
    }
}

}  // namespace gyre::cpu
