// The CPU kernels' thread pool: each task runs once, whether workers spin, sleep or come late.
#include "kernels/cpu/thread_pool.hpp"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/support/catch.hpp"

using gyre::cpu::ThreadPool;

TEST_CASE("every task of every job runs once, on some worker") {
    for (const int threads : {1, 2, 3, 8}) {
        ThreadPool pool(threads);
        REQUIRE(pool.threads() == threads);
        bool right = true;
        for (int job = 0; job < 3000; ++job) {
            const int count = job % 13;
            std::vector<int> runs(13), workers(13, 0);
            pool.parallel_for(count, [&](std::int64_t i, int worker) {
                ++runs[static_cast<std::size_t>(i)];
                workers[static_cast<std::size_t>(i)] = worker;
            });
            for (int i = 0; i < 13; ++i) {
                const auto at = static_cast<std::size_t>(i);
                right = right && runs[at] == (i < count ? 1 : 0) && workers[at] >= 0 &&
                        workers[at] < threads;
            }
            if (job % 300 == 0) {  // longer than they spin
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        }
        CHECK(right);
    }
}

TEST_CASE("tasks that wait for one another run on several threads") {
    ThreadPool pool(2);
    for (const int before_ms : {0, 2}) {  // its worker spins, or sleeps
        std::this_thread::sleep_for(std::chrono::milliseconds(before_ms));
        std::atomic<int> here{0};
        pool.parallel_for(2, [&](std::int64_t, int) {
            here.fetch_add(1);
            const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
            while (here.load() < 2 && std::chrono::steady_clock::now() < end) {
                std::this_thread::yield();
            }
        });
        CHECK(here.load() == 2);
    }
}

TEST_CASE("a job waits for the longest task") {
    ThreadPool pool(3);
    std::atomic<int> done{0};
    pool.parallel_for(3, [&](std::int64_t i, int) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10 * i));
        done.fetch_add(1);
    });
    CHECK(done.load() == 3);
}
