// A step as a net with batch normalisation has it: sums within the pass, while buckets are under
// way.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "comm/reducer.hpp"

namespace gyre::test {

class StepWithSums {
 public:
    StepWithSums(comm::Communicator& comm, Device& device)
        : comm_(comm), device_(device), reducer(comm, device, kBuckets, gradients_.get()) {
        std::vector<float> own(kElems);
        for (std::size_t i = 0; i < own.size(); ++i) {
            own[i] = static_cast<float>(static_cast<int>(i % 7) + comm.rank());
        }
        device.upload(own_.get(), own.data(), own_.bytes());
    }

    // All that the device is asked for, in the same memory each time.
    void submit() {
        reducer.begin_step();
        device_.copy(gradients_.get(), own_.get(), own_.bytes());
        float* result = results_.get();
        for (std::size_t i = 0; i < kBuckets.size(); ++i) {
            const auto bytes = static_cast<std::size_t>(kSums[i]) * sizeof(float);
            device_.copy(statistics_.get(), own_.get(), bytes);
            reducer.sum({statistics_.get(), kSums[i]});
            device_.copy(result, statistics_.get(), bytes);
            result += kSums[i];
            device_.fill_zero(statistics_.get(), bytes);
            reducer.ready(kBuckets[i].begin);
        }
        std::int64_t arrived = 0;
        reducer.finish_step([&](const comm::Bucket& bucket) { arrived += bucket.elems(); });
        require(arrived == kElems, "not every bucket has arrived");
    }
    // Waits for the oldest step and throws where a sum is wrong; every term is a small integer.
    void check() {
        reducer.synchronize_step();
        std::size_t wrong = wrong_values(gradients_.get(), kElems);
        const float* result = results_.get();
        for (const std::int64_t elems : kSums) {
            wrong += wrong_values(result, elems);
            result += elems;
        }
        require(wrong == 0, "wrong sums");
        device_.fill_zero(results_.get(), results_.bytes());
    }
    static std::int64_t collectives() { return std::int64_t(kBuckets.size() + kSums.size()); }

 private:
    static constexpr std::int64_t kElems = 60'000;
    inline static const std::vector<std::int64_t> kSums = {1, 300, 40'000};
    inline static const std::vector<comm::Bucket> kBuckets = {
        {40'000, kElems}, {16, 40'000}, {0, 16}};

    // Ranks may be threads, of which Catch2 knows one.
    void require(bool holds, const char* otherwise) const {
        if (!holds) {
            throw std::runtime_error("rank " + std::to_string(comm_.rank()) + ": " + otherwise);
        }
    }
    std::size_t wrong_values(const float* on_device, std::int64_t elems) {
        std::vector<float> found(static_cast<std::size_t>(elems));
        device_.download(found.data(), on_device, found.size() * sizeof(float));
        const int n = comm_.size();
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < found.size(); ++i) {
            const int expected = n * static_cast<int>(i % 7) + n * (n - 1) / 2;
            wrong += found[i] != static_cast<float>(expected);
        }
        return wrong;
    }

    comm::Communicator& comm_;
    Device& device_;
    DeviceBuffer<float> own_{device_, kElems}, gradients_{device_, kElems};
    DeviceBuffer<float> statistics_{device_, 40'000}, results_{device_, 40'301};

 public:
    comm::Reducer reducer;
};

}  // namespace gyre::test
