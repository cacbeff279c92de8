#include "kernels/cpu/thread_pool.hpp"

namespace gyre::cpu {

ThreadPool::ThreadPool(int threads) {
    for (int worker = 1; worker < threads; ++worker) {
        workers_.emplace_back([this, worker] { work(worker); });
    }
}

ThreadPool::~ThreadPool() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    start_.notify_all();
    for (std::thread& worker : workers_) {
        worker.join();
    }
}

void ThreadPool::run(const Job& job) {
    {
        const std::lock_guard lock(mutex_);
        job_ = job;
        next_.store(0);
        busy_ = static_cast<int>(workers_.size());
        ++generation_;
    }
    start_.notify_all();
    take_tasks(job, 0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadPool::work(int worker) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) {
            return;
        }
        seen = generation_;
        const Job job = job_;
        lock.unlock();
        take_tasks(job, worker);
        lock.lock();
        if (--busy_ == 0) {
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
