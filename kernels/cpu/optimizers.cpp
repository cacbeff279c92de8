// Updates of the parameters on the CPU, and what comes before them where the loss is scaled.
#include <cstddef>
#include <utility>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/cpu/finite.hpp"

namespace gyre::cpu {
namespace {

// Updates elements [begin, end). The arguments are values of its own: constants behind a reference
// might be changed by the stores.
template <typename Rule, std::size_t... kState>
void update_range(const UpdateArgs a, const StepScalars s, std::int64_t begin, std::int64_t end,
                  float* p, const float* g, std::index_sequence<kState...>) {
    float* const states[] = {a.states[kState]..., nullptr};
    int all_finite = 1;
    for (std::int64_t i = begin; i < end; ++i) {
        all_finite &= finite(g[i]);
        float value = p[i], kept[] = {states[kState][i]..., 0.0f};
        Rule::update(a, s, value, g[i], kept[kState]...);
        p[i] = value;
        ((states[kState][i] = kept[kState]), ...);
    }
    if (all_finite == 0) {
        report_not_finite(a.finite, g, begin, end);
    }
}

}  // namespace

void CpuBackend::update(const UpdateArgs& args, std::int64_t elems, float* p, const float* g) {
    if (args.skip != nullptr && *args.skip != 0) {
        return;
    }
    with_formula(args.formula, [&]<typename Rule>(Rule) {
        const auto part = [&](std::int64_t first, std::int64_t last) {
            context_.for_ranges(last - first, [=, a = args](std::int64_t begin, std::int64_t end) {
                update_range<Rule>(a, scalars_of(a), first + begin, first + end, p, g,
                                   std::make_index_sequence<Rule::kStates>());
            });
        };
        part(0, args.gap.begin);
        part(args.gap.begin + args.gap.elems, elems);
    });
}

void CpuBackend::unscale(std::int64_t elems, const LossScale* state, const FiniteCheck& check,
                         float* g) {
    const float factor = 1.0f / state->scale;
    context_.for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        int all_finite = 1;
        for (std::int64_t i = begin; i < end; ++i) {
            all_finite &= finite(g[i]);
        }
        if (all_finite == 0) {
            report_not_finite(check, g, begin, end);
        }
        for (std::int64_t i = begin; i < end; ++i) {
            g[i] = finite(g[i]) ? g[i] * factor : 0.0f;
        }
    });
}

}  // namespace gyre::cpu
