// Reports non-finite gradients from the kernels that read them.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/ops/backend.hpp"

namespace gyre::cpu {

inline bool finite(float value) {
    return std::abs(value) <= std::numeric_limits<float>::max();
}

// Reports the last non-finite element of g[begin, end), if there is one.
inline void report_not_finite(const FiniteCheck& check, const float* g, std::int64_t begin,
                              std::int64_t end) {
    while (end > begin && finite(g[end - 1])) {
        --end;
    }
    if (end == begin || check.word == nullptr) {
        return;
    }
    const auto found =
        static_cast<std::int32_t>(1 + (check.first_elem + end - 1) / FiniteCheck::kGrain);
    std::atomic_ref<std::int32_t> word(*check.word);
    std::int32_t before = word;
    while (before < found && !word.compare_exchange_weak(before, found)) {
    }
}

}  // namespace gyre::cpu
