// Functions on whole vectors on the CPU: clipping to a norm, sums and 16-bit conversions.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/cpu/finite.hpp"
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {

void CpuBackend::sum_of_squares(std::int64_t elems, const float* x, const FiniteCheck& check,
                                ExactSum* sum) {
    sums_.assign(static_cast<std::size_t>((elems + Context::kRange - 1) / Context::kRange), {});
    context_.for_ranges(elems, [&](std::int64_t begin, std::int64_t end) {
        ExactSum of_range;
        const std::int64_t whole = begin + (end - begin) / 16 * 16;
        for (std::int64_t i = begin; i < whole; i += 16) {
            of_range.add(sum_of_16_squares(x + i));
        }
        float rest[16] = {};
        std::copy(x + whole, x + end, rest);
        of_range.add(sum_of_16_squares(rest));
        sums_[static_cast<std::size_t>(begin / Context::kRange)] = of_range;
        if (!std::isfinite(of_range.value())) {
            report_not_finite(check, x, begin, end);
        }
    });
    for (const ExactSum& of_range : sums_) {
        sum->add(of_range);
    }
}

void CpuBackend::scale_to_norm(const ClipArgs& args, std::int64_t elems, float* x) {
    ExactSum squares;
    for (int i = 0; i < ExactSum::kLimbs; ++i) {
        squares.limbs[i] = limb_of_ranks(args, i);
    }
    const double norm = std::sqrt(squares.value());
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
