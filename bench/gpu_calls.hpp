// Batches of calls in a stream, and how long they take.
// Part of bench/kernels_gpu.cpp, compiled for GPUs and for the emulator like it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/base/error.hpp"
#include "kernels/cuda/layer_kernels.hpp"

#if !defined(GYRE_EMULATED)
#include "kernels/cuda/check.hpp"
#include "kernels/cuda/native.hpp"
#include "kernels/cudnn/library_kernels.hpp"
#endif

namespace gyre::SIMT_NAMESPACE {

namespace own = gyre::SIMT_NAMESPACE;
using Body = std::function<void(int call)>;

constexpr std::size_t kMiB = std::size_t{1} << 20;
#if defined(GYRE_EMULATED)
constexpr bool kEmulated = true;
constexpr std::size_t kRotate = 1;  // bytes that the copies of operands exceed
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
constexpr double kReferenceFlop = 4e9;  // of the CPU's part of a verification
constexpr std::chrono::milliseconds kClockWarmUp{500};
#endif
constexpr int kMostSets = kMostCalls;
constexpr double kBatchUs = 1000.0;                 // what a batch of calls should take
constexpr std::size_t kReferenceBytes = 16 * kMiB;  // of a verification's operands
constexpr std::size_t kComparedElems = kMiB;        // of an output's begin, and of its end
constexpr std::size_t kOperandAlignment = 256;
// ||found - expected|| / ||expected||. Products in TF32 are off by about 3e-4.
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

class Stopwatch {
 public:
    explicit Stopwatch(Stream& stream) : stream_(stream) {}

    // Microseconds that `work` takes in the stream.
    double time(const std::function<void()>& work) {
        const auto begin = std::chrono::steady_clock::now();
        stream_.record(start_);
        work();
        stream_.record(end_);
        end_.synchronize();
        if (kEmulated) {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() *
                   1e6;
        }
        return 1e3 * static_cast<double>(Event::milliseconds(start_, end_));
    }

 private:
    Stream& stream_;
    Event start_, end_;
};

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// body(0), ..., body(calls - 1) in a row, as a CUDA graph where that is wanted and possible.
class Calls {
 public:
    Calls(Stream& stream, Body body, int calls, bool graph)
        : stream_(stream), body_(std::move(body)), calls_(calls) {
        if (graph && !kEmulated) {
            capture();
        }
    }
    Calls(const Calls&) = delete;
    Calls& operator=(const Calls&) = delete;

#if defined(GYRE_EMULATED)
    bool is_graph() const {
        return false;
    }
    void run() {
        run_plain();
    }
#else
    ~Calls() {
        drop();
    }
    bool is_graph() const {
        return instance_ != nullptr;
    }
    void run() {
        if (is_graph()) {
            GYRE_CUDA_CHECK(cudaGraphLaunch(instance_, native(stream_)));
        } else {
            run_plain();
        }
    }
#endif

 private:
    void run_plain() {
        for (int call = 0; call < calls_; ++call) {
            body_(call);
        }
    }
#if defined(GYRE_EMULATED)
    void capture() {}
#else
    void drop() noexcept {
        if (instance_ != nullptr) {
            cudaGraphExecDestroy(instance_);
            instance_ = nullptr;
        }
        if (graph_ != nullptr) {
            cudaGraphDestroy(graph_);
            graph_ = nullptr;
        }
    }
    // What cannot be captured (an allocation, say) is timed as plain calls.
    void capture() {
        GYRE_CUDA_CHECK(cudaStreamBeginCapture(native(stream_), cudaStreamCaptureModeRelaxed));
        std::string why;
        try {
            run_plain();
        } catch (const Error& error) {
            why = error.what();
        }
        const cudaError_t captured = cudaStreamEndCapture(native(stream_), &graph_);
        if (why.empty() && captured == cudaSuccess &&
            cudaGraphInstantiateWithFlags(&instance_, graph_, 0) == cudaSuccess) {
            return;
        }
        instance_ = nullptr;
        drop();
        cudaGetLastError();  // it is not the next call's
    }
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t instance_ = nullptr;
#endif

    Stream& stream_;
    Body body_;
    int calls_;
};

}  // namespace gyre::SIMT_NAMESPACE
