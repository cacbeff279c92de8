// Measures the ceilings in the same run, and computes the floor that they give an operation.
// Part of bench/kernels_gpu.cpp, compiled for GPUs and for the emulator like it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "bench/ceilings.hpp"
#include "bench/gpu_operations.hpp"
#include "bench/report.hpp"

namespace gyre::SIMT_NAMESPACE {

struct Ceilings {
    double copy_gbs = 0, fma_tflops = 0, gemm_tflops = 0, gemm_tf32_tflops = 0;
    double call_us = 0;  // time of a kernel that does almost nothing
    bool graphs_work = false;
};

class CeilingMeter {
 public:
    // make_library(tf32) returns the library's kernels; null if there are none.
    using MakeLibrary = std::function<std::unique_ptr<KernelFactory>(bool tf32)>;
    CeilingMeter(const Context& context, ValuePool& pool, const MakeLibrary& make_library)
        : context_(context), pool_(pool), make_library_(make_library) {}

    // graph: whether the smallest kernel is launched in a CUDA graph.
    Ceilings measure(bool graph) {
        Ceilings ceilings;
        measure_arithmetic(graph, ceilings);
        ceilings.copy_gbs = copy_gbs();
        ceilings.gemm_tflops = gemm_tflops(false);
        ceilings.gemm_tf32_tflops = gemm_tflops(true);
        return ceilings;
    }

 private:
    // Returns the microseconds of a call: the median over kSamples.
    double time_calls(const Calls::Body& body, int calls) {
        Calls batch(context_.stream, body, calls, false);
        batch.run();
        std::vector<double> samples;
        for (int i = 0; i < kSamples; ++i) {
            samples.push_back(watch_.microseconds(batch));
        }
        return median(samples);
    }
    void measure_arithmetic(bool graph, Ceilings& ceilings) {
        const auto blocks = static_cast<unsigned>(8 * context_.multiprocessors);
        OperandSets operands(pool_, {vector(Role::out, std::int64_t{blocks} * kFmaBlock)}, 1, 1);
        float* const out = operands.sets()[0].f(0);
        // An idle GPU needs a while to reach its full clock, and the first start of a kernel, which
        // loads it, must not be captured.
        const auto begin = std::chrono::steady_clock::now();
        do {
            fma_chains(context_, kFmaRounds, blocks, out);
            own::fill(context_, 4, 1.0f, out);
            context_.stream.synchronize();
        } while (std::chrono::steady_clock::now() - begin < kClockWarmUp);
        const double us =
            time_calls([&](int) { fma_chains(context_, kFmaRounds, blocks, out); }, 2);
        ceilings.fma_tflops = fma_flop(kFmaRounds, blocks) / us / 1e6;
        Calls calls(
            context_.stream, [&](int) { own::fill(context_, 4, 1.0f, out); }, kMostCalls, graph);
        calls.run();
        ceilings.call_us = watch_.microseconds(calls);
        ceilings.graphs_work = calls.is_graph();
    }
    double copy_gbs() {
        const Operand large = vector(Role::in, kCopyBytes / sizeof(float));
        OperandSets operands(pool_, {large, large}, 1, 1);
        const Args& a = operands.sets()[0];
        const double us =
            time_calls([&](int) { context_.stream.copy(a.at[1], a.at[0], kCopyBytes); }, 4);
        return 2.0 * kCopyBytes / us / 1e3;
    }
    double gemm_tflops(bool tf32) {
        const auto kernels = make_library_(tf32);
        if (!kernels) {
            return 0.0;
        }
        const LinearSpec spec{.in = {kGemm, 1, 1}, .shape = {kGemm, kGemm}};
        const Operand square = vector(Role::in, spec.shape.weight_elems());
        OperandSets operands(pool_, {square, square, vector(Role::in, kGemm), square}, 1, 1);
        const auto op = kernels->make("ceiling", spec, {.train_images = kGemm});
        const Args& a = operands.sets()[0];
        const double us = time_calls(
            [&](int) {
                op->forward({.n = kGemm}, {.x = a.f(0), .y = a.f(3), .params = {a.f(1), a.f(2)}});
            },
            2);
        context_.stream.synchronize();
        return static_cast<double>(spec.shape.flop_per_image()) * kGemm / us / 1e6;
    }

    const Context& context_;
    ValuePool& pool_;
    const MakeLibrary& make_library_;
    Stopwatch watch_{context_.stream};
};

// Sets a row's bytes and FLOPs, and the floor that follows from them.
inline void set_floor(const Operation& op, const Ceilings& ceilings, bool tf32, bench::Row& row) {
    const int n = std::max(row.n, 1);
    row.bytes = op.image_bytes * n + op.fixed_bytes;
    row.flop = op.image_flop * n;
    const bool tensor_cores = tf32 && ceilings.gemm_tf32_tflops > 0;
    const double fp32 = std::max(ceilings.fma_tflops, ceilings.gemm_tflops);
    const double tflops = tensor_cores ? ceilings.gemm_tf32_tflops : fp32;
    const double memory_us = row.bytes / ceilings.copy_gbs / 1e3;
    const double arithmetic_us = row.flop / tflops / 1e6;
    row.floor_us = std::max(memory_us, arithmetic_us);
    row.bound = memory_us >= arithmetic_us   ? "copy"
                : tensor_cores               ? "TF32 product"
                : fp32 > ceilings.fma_tflops ? "fp32 product"
                                             : "FMA";
}

}  // namespace gyre::SIMT_NAMESPACE
