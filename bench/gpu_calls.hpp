// The benchmark's parameters, on a GPU and on the emulator.
// Part of bench/kernels_gpu.cpp, compiled for GPUs and for the emulator like it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/timing.hpp"

#if !defined(GYRE_EMULATED)
#include "kernels/cuda/check.hpp"
#include "kernels/cudnn/factory.hpp"
#endif

namespace gyre::SIMT_NAMESPACE {

namespace own = gyre::SIMT_NAMESPACE;

constexpr std::size_t kMiB = std::size_t{1} << 20;
#if defined(GYRE_EMULATED)
constexpr bool kEmulated = true;
constexpr std::size_t kRotate = 1;  // least bytes of all copies of the operands together
constexpr std::size_t kCopyBytes = kMiB;
constexpr int kGemm = 64, kFmaRounds = 10;
constexpr int kMostCalls = 2, kWarmUps = 1, kSamples = 2;
constexpr int kDatasetImages = 256;
constexpr std::int64_t kPool = 65'521;
constexpr double kReferenceFlop = 1e8;
constexpr std::chrono::milliseconds kClockWarmUp{0};
#else
constexpr bool kEmulated = false;
constexpr std::size_t kRotate = 160 * kMiB;  // more than twice the L2 cache of an H100 or H200
constexpr std::size_t kCopyBytes = 1024 * kMiB;
constexpr int kGemm = 8192, kFmaRounds = 20'000;
constexpr int kMostCalls = 1000, kWarmUps = 3, kSamples = 9;
constexpr int kDatasetImages = 60'000;
constexpr std::int64_t kPool = 4'194'301;
constexpr double kReferenceFlop = 4e9;  // limit for the CPU's part of a verification
constexpr std::chrono::milliseconds kClockWarmUp{500};
#endif
constexpr int kMostSets = kMostCalls;
constexpr double kBatchUs = 1000.0;                 // target time of a batch of calls
constexpr std::size_t kReferenceBytes = 16 * kMiB;  // limit for a verification's operands
constexpr std::size_t kComparedElems = kMiB;        // at an output's begin, and at its end
constexpr std::size_t kOperandAlignment = 256;
// Limits for ||found - expected|| / ||expected||. Products in TF32 are off by about 3e-4.
constexpr double kTolerance = 2e-4, kToleranceTf32 = 3e-3;

inline std::size_t free_memory() {
#if defined(GYRE_EMULATED)
    return 2048 * kMiB;
#else
    std::size_t free = 0, total = 0;
    GYRE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
#endif
}

// Returns the median in microseconds; at least the clock's step, even if time is emulated.
inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return std::max(values[values.size() / 2], 1e-3);
}

}  // namespace gyre::SIMT_NAMESPACE
