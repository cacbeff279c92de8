// Functions on whole vectors on the CPU: clipping to a norm, sums and 16-bit conversions.
#include <cmath>
#include <type_traits>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/cpu/finite.hpp"
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {

void CpuBackend::sum_of_squares(std::int64_t elems, const float* x, const FiniteCheck& check,
                                bool add, double* sum_of_squares) {
    // One sum per range, added in order, so the result is the same for any number of threads.
    sums_.assign(static_cast<std::size_t>((elems + Context::kRange - 1) / Context::kRange), 0.0);
    context_.for_ranges(elems, [&](std::int64_t begin, std::int64_t end) {
        double sum = 0.0;
        for (std::int64_t i = begin; i < end; ++i) {
            sum += double{x[i]} * double{x[i]};
        }
        sums_[static_cast<std::size_t>(begin / Context::kRange)] = sum;
        if (!std::isfinite(sum)) {
            report_not_finite(check, x, begin, end);
        }
    });
    double total = 0.0;
    for (const double sum : sums_) {
        total += sum;
    }
    *sum_of_squares = add ? *sum_of_squares + total : total;
}

void CpuBackend::scale_to_norm(const ClipArgs& args, std::int64_t elems, float* x) {
    const double norm = gradient_norm(args);
    const float factor = clip_factor(args, norm);
    if (args.norm != nullptr) {
        *args.norm = static_cast<float>(norm);
    }
    if (factor != 1.0f) {
        context_.for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                x[i] *= factor;
            }
        });
    }
}

void CpuBackend::add(std::int64_t elems, const float* x, float* y) {
    cpu::add(context_, elems, x, y);
}

namespace {

// Calls body(begin, end, type as a compile-time constant) over all ranges.
template <typename Body>
void for_ranges_of(const Context& context, DataType type, std::int64_t elems, const Body& body) {
    using Bfloat16 = std::integral_constant<DataType, DataType::bfloat16>;
    using Float16 = std::integral_constant<DataType, DataType::float16>;
    context.for_ranges(elems, [&](std::int64_t begin, std::int64_t end) {
        if (type == DataType::bfloat16) {
            body(begin, end, Bfloat16());
        } else {
            body(begin, end, Float16());
        }
    });
}

}  // namespace

void CpuBackend::narrow(DataType type, std::int64_t elems, const float* x, std::uint16_t* y,
                        const float* factor) {
    const float times = factor == nullptr ? 1.0f : *factor;
    for_ranges_of(context_, type, elems, [=](std::int64_t begin, std::int64_t end, auto to) {
        for (std::int64_t i = begin; i < end; ++i) {
            y[i] = narrow::to<to()>(x[i] * times);
        }
    });
}

void CpuBackend::widen(DataType type, std::int64_t elems, const std::uint16_t* x, float* y) {
    for_ranges_of(context_, type, elems, [=](std::int64_t begin, std::int64_t end, auto from) {
        for (std::int64_t i = begin; i < end; ++i) {
            y[i] = narrow::from<from()>(x[i]);
        }
    });
}

void CpuBackend::round_to(DataType type, std::int64_t elems, const float* x, float* y) {
    for_ranges_of(context_, type, elems, [=](std::int64_t begin, std::int64_t end, auto to) {
        for (std::int64_t i = begin; i < end; ++i) {
            y[i] = narrow::from<to()>(narrow::to<to()>(x[i]));
        }
    });
}

}  // namespace gyre::cpu
