// Distributes independent tasks over one rank's worker threads. With one thread it is a plain loop.
//
// Waiting threads spin for some tens of microseconds, about as long as the pauses within a step,
// and then sleep. A job does not need every worker: one that is late because its processor is busy
// finds the job closed and is not waited for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace gyre::cpu {

class ThreadPool {
 public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls task(i, worker) once for each i in [0, count); returns when all are done. Which worker
    // (0 <= worker < threads()) runs which task is not deterministic, so results must not depend on
    // it. Tasks must not throw.
    template <typename Task>
    void parallel_for(std::int64_t count, Task&& task) {
        if (workers_.empty() || count <= 1) {
            for (std::int64_t i = 0; i < count; ++i) {
                task(i, 0);
            }
            return;
        }
        run({[](const void* what, std::int64_t i, int worker) {
                 (*static_cast<const std::remove_reference_t<Task>*>(what))(i, worker);
             },
             &task, count});
    }

 private:
    // A type-erased reference to the task; std::function would allocate.
    struct Job {
        void (*call)(const void* task, std::int64_t i, int worker);
        const void* task;
        std::int64_t count;
    };
    void run(const Job& job);
    void work(int worker);
    void take_tasks(const Job& job, int worker);

    // Bits of the state: the number of workers at the job; whether more may join; the job's number.
    static constexpr std::uint64_t kOpen = 1 << 16, kStop = 1 << 17, kGeneration = 1 << 18;

    std::vector<std::thread> workers_;
    std::chrono::nanoseconds spin_;  // of the thread that called run
    Job job_{};                      // written while no worker is at a job
    alignas(64) std::atomic<std::uint64_t> state_{0};
    alignas(64) std::atomic<std::int64_t> next_{0};
    // For sleeping threads.
    alignas(64) std::atomic<int> sleeping_{0};  // workers
    std::atomic<bool> waiting_{false};          // the thread that called run sleeps
    std::mutex mutex_;
    std::condition_variable start_, done_;
};

}  // namespace gyre::cpu
