// A job whose ranks are threads of one process, so that what ranks do together can be tested in
// milliseconds, inspected and disturbed.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre::test {

using comm::Communicator;
using comm::Request;

class ThreadRanks {
 public:
    explicit ThreadRanks(int size) : size_(size), slots_(static_cast<std::size_t>(size)) {}

    // A rank's sum of gradients on arrival, before the rank sees it; a test may corrupt it.
    struct Sum {
        int rank;
        std::int64_t number;  // of the reduction, counted from 0
        void* data;
        std::int64_t elems;
        DataType type;
    };
    std::function<void(const Sum&)> arrived;
    bool direct = true;  // false: the ranks' gradients travel through the host's memory
    std::int64_t reductions = 0, gatherings = 0;  // on rank 0

    // Calls work(comm) on each rank; rethrows the first exception.
    void run(const std::function<void(Communicator&)>& work) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size_; ++rank) {
            threads.emplace_back([this, &work, rank] {
                Rank comm(*this, rank);
                std::exception_ptr failure;
                try {
                    work(comm);
                } catch (...) {
                    failure = std::current_exception();
                }
                leave(failure);
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        if (failure_ != nullptr) {
            std::rethrow_exception(failure_);
        }
    }

 private:
    struct Done final : Request {
        void wait() override {}
    };

    class Rank final : public Communicator {
     public:
        Rank(ThreadRanks& job, int rank) : job_(job), rank_(rank) {}
        std::string description() const override { return "threads"; }
        int rank() const override { return rank_; }
        int size() const override { return job_.size_; }
        int local_rank() const override { return rank_; }
        int local_size() const override { return job_.size_; }
        bool use_device(Device& device) override { return job_.direct && device.host_memory(); }
        std::unique_ptr<Request> start(const comm::Collective& c) override {
            switch (c.kind) {
                case comm::Collective::Kind::all_reduce:
                    all_reduce(c);
                    break;
                case comm::Collective::Kind::all_gather:
                    all_gather(c);
                    break;
                case comm::Collective::Kind::reduce_scatter:
                    reduce_scatter(c);
                    break;
            }
            return std::make_unique<Done>();
        }
        void allreduce_sum(std::span<double> data) override {
            sum(data.data(), data.size(), [](double a, double b) { return a + b; });
        }
        void broadcast(void* data, std::size_t bytes, int root) override {
            offer(data, bytes);
            if (rank_ != root && bytes > 0) {
                std::memcpy(data, slot(root).data, bytes);
            }
            job_.meet();
        }
        void barrier() override { job_.meet(); }
        [[noreturn]] void abort(int) noexcept override { std::abort(); }

     private:
        void all_reduce(const comm::Collective& c) {
            const auto n = static_cast<std::size_t>(c.count);
            if (c.type == DataType::float32) {
                sum(static_cast<float*>(c.data), n, [](float a, float b) { return a + b; });
            } else if (c.type == DataType::bfloat16) {
                sum(static_cast<std::uint16_t*>(c.data), n, add<DataType::bfloat16>);
            } else {
                sum(static_cast<std::uint16_t*>(c.data), n, add<DataType::float16>);
            }
            if (job_.arrived) {
                job_.arrived({rank_, reductions_, c.data, c.count, c.type});
            }
            ++reductions_;
            if (rank_ == 0) {
                ++job_.reductions;
            }
        }
        void reduce_scatter(const comm::Collective& c) {
            const auto bytes = static_cast<std::size_t>(bytes_of(c));
            const auto rank = static_cast<std::size_t>(rank_);
            const auto ranks = static_cast<std::size_t>(size());
            auto* data = static_cast<unsigned char*>(c.data);
            std::vector<unsigned char> sums(data, data + ranks * bytes);
            comm::Collective whole = c;
            whole.count *= size();
            whole.data = sums.data();
            all_reduce(whole);
            if (bytes > 0) {
                std::memcpy(data + rank * bytes, sums.data() + rank * bytes, bytes);
            }
        }
        void all_gather(const comm::Collective& c) {
            const auto bytes = static_cast<std::size_t>(bytes_of(c));
            offer(c.data, bytes);
            for (int from = 0; from < size(); ++from) {
                const std::size_t at = static_cast<std::size_t>(from) * bytes;
                if (from != rank_ && bytes > 0) {
                    std::memcpy(static_cast<char*>(c.data) + at,
                                static_cast<const char*>(slot(from).data) + at, bytes);
                }
            }
            if (rank_ == 0) {
                ++job_.gatherings;
            }
            job_.meet();
        }
        template <DataType type>
        static std::uint16_t add(std::uint16_t a, std::uint16_t b) {
            return narrow::to<type>(narrow::from<type>(a) + narrow::from<type>(b));
        }
        struct Slot {
            void* data;
            std::size_t size;
        };
        friend class ThreadRanks;

        Slot& slot(int rank) { return job_.slots_[static_cast<std::size_t>(rank)]; }
        void offer(void* data, std::size_t size) {
            slot(rank_) = {data, size};
            job_.meet();
            for (const Slot& other : job_.slots_) {
                if (other.size != size) {
                    throw Error(ExitCode::internal, "collectives of the ranks do not match");
                }
            }
        }
        // Sums in the order of the ranks, so that all get the same result.
        template <typename T, typename Add>
        void sum(T* data, std::size_t elems, Add plus) {
            offer(data, elems * sizeof(T));
            std::vector<T> sums(static_cast<const T*>(slot(0).data),
                                static_cast<const T*>(slot(0).data) + elems);
            for (int from = 1; from < size(); ++from) {
                const T* terms = static_cast<const T*>(slot(from).data);
                for (std::size_t i = 0; i < elems; ++i) {
                    sums[i] = plus(sums[i], terms[i]);
                }
            }
            job_.meet();
            std::copy(sums.begin(), sums.end(), data);
        }

        ThreadRanks& job_;
        const int rank_;
        std::int64_t reductions_ = 0;
    };

    // Returns once all ranks have called it.
    void meet() {
        std::unique_lock lock(mutex_);
        const std::int64_t meeting = meeting_;
        if (++here_ == size_) {
            here_ = 0;
            ++meeting_;
            wake_.notify_all();
            return;
        }
        wake_.wait(lock, [&] { return meeting_ != meeting || left_; });
        if (meeting_ == meeting) {
            throw Error(ExitCode::internal, "a rank has left while another waits for it");
        }
    }
    void leave(std::exception_ptr failure) {
        const std::lock_guard lock(mutex_);
        left_ = true;
        if (failure_ == nullptr) {
            failure_ = failure;
        }
        wake_.notify_all();
    }

    const int size_;
    std::vector<Rank::Slot> slots_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable wake_;
    int here_ = 0;
    std::int64_t meeting_ = 0;
    bool left_ = false;
    std::exception_ptr failure_;
};

}  // namespace gyre::test
