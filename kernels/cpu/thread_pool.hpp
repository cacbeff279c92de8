// Splits independent tasks over the worker threads of one rank. With one thread it is a plain loop.
#pragma once

#include <atomic>
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
    // (0 <= worker < threads()) gets which task is not fixed, so a task must not care. A task must
    // not throw.
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
    // What std::function would allocate memory for.
    struct Job {
        void (*call)(const void* task, std::int64_t i, int worker);
        const void* task;
        std::int64_t count;
    };
    void run(const Job& job);
    void work(int worker);
    void take_tasks(const Job& job, int worker);

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable start_, done_;
    Job job_{};  // guarded by mutex_, like the next two
    std::uint64_t generation_ = 0;
    int busy_ = 0;
    bool stopping_ = false;
    std::atomic<std::int64_t> next_{0};
};

}  // namespace gyre::cpu
