// The kernels as compiled for one instruction set, as a table.
#include "kernels/cpu/cpu_kernels.hpp"

#include <algorithm>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/cpu/bf16_tiles.hpp"

namespace gyre::cpu {
namespace {

Backend* make_backend(int threads) {
    return new CpuBackend(threads);
}

double measure_peak() {
    constexpr int kChains = 12;  // latency x throughput of current cores; fits 16 registers
    constexpr int kRounds = 2'000'000;
    double best = 0.0;
    for (int run = 0; run < 10; ++run) {
        Vec sums[kChains];
        for (int i = 0; i < kChains; ++i) {
            sums[i] = broadcast(1.0f + static_cast<float>(i));
        }
        volatile float values[] = {0.999f, 0.001f};
        const Vec a = broadcast(values[0]), b = broadcast(values[1]);
        const auto start = Clock::now();
        for (int round = 0; round < kRounds; ++round) {
            for (int i = 0; i < kChains; ++i) {
                sums[i] = multiply_add(sums[i], a, b);
            }
        }
        const double seconds = seconds_since(start);
        for (int i = 1; i < kChains; ++i) {
            sums[0] += sums[i];
        }
        values[0] = sums[0][0];  // keeps the sums from being optimised away
        best = std::max(best, 2.0 * kRounds * kChains * kVec / seconds / 1e9);
    }
    return best;
}

}  // namespace
}  // namespace gyre::cpu

// The only symbol of this compilation that others refer to.
extern "C" const gyre::CpuKernels GYRE_CPU_KERNELS;
const gyre::CpuKernels GYRE_CPU_KERNELS = {GYRE_CPU_NAME,
                                           GYRE_CPU_TITLE,
                                           gyre::cpu::kVec,
                                           &gyre::cpu::make_backend,
                                           &gyre::cpu::measure_peak,
                                           &gyre::cpu::has_tile_products};
