// SGD and Adam on the CPU, and what comes before them where the loss is scaled.
#include <cmath>
#include <utility>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/cpu/finite.hpp"

namespace gyre::cpu {
namespace {

// Calls part(begin, end, the arguments for it) for what lies before the gap and behind it.
template <typename Args, typename Part>
void around_gap(Args args, std::int64_t elems, Part part) {
    const UpdateGap gap = std::exchange(args.gap, {});
    part(0, gap.begin, args);
    args.finite.first_elem += gap.begin + gap.elems;
    part(gap.begin + gap.elems, elems, args);
}

}  // namespace

void CpuBackend::sgd_step(const SgdArgs& args, std::int64_t elems, float* p, const float* g,
                          float* velocity) {
    if (args.skip != nullptr && *args.skip != 0) {
        return;
    }
    if (args.gap.elems > 0) {
        return around_gap(args, elems, [&](std::int64_t begin, std::int64_t end, const SgdArgs& a) {
            sgd_step(a, end - begin, p + begin, g + begin,
                     velocity == nullptr ? nullptr : velocity + begin);
        });
    }
    const SgdArgs a = args;
    const float rate = args.scalars->learning_rate;
    context_.for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        int all_finite = 1;
        if (velocity == nullptr) {
            for (std::int64_t i = begin; i < end; ++i) {
                all_finite &= finite(g[i]);
                p[i] -= rate * (g[i] + a.weight_decay * p[i]);
            }
        } else {
            for (std::int64_t i = begin; i < end; ++i) {
                all_finite &= finite(g[i]);
                const float d = g[i] + a.weight_decay * p[i];
                velocity[i] = a.momentum * velocity[i] + d;
                p[i] -= rate * (a.nesterov ? d + a.momentum * velocity[i] : velocity[i]);
            }
        }
        if (all_finite == 0) {
            report_not_finite(a.finite, g, begin, end);
        }
    });
}

void CpuBackend::adam_step(const AdamArgs& args, std::int64_t elems, float* p, const float* g,
                           float* m, float* v) {
    if (args.skip != nullptr && *args.skip != 0) {
        return;
    }
    if (args.gap.elems > 0) {
        return around_gap(args, elems,
                          [&](std::int64_t begin, std::int64_t end, const AdamArgs& a) {
                              adam_step(a, end - begin, p + begin, g + begin, m + begin, v + begin);
                          });
    }
    const AdamArgs a = args;
    const StepScalars s = *args.scalars;
    // Captured by value: constants behind a reference might be changed by the stores.
    context_.for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        int all_finite = 1;
        for (std::int64_t i = begin; i < end; ++i) {
            all_finite &= finite(g[i]);
            const float d = g[i] + a.weight_decay * p[i];
            const float m_new = a.beta1 * m[i] + (1.0f - a.beta1) * d;
            const float v_new = a.beta2 * v[i] + (1.0f - a.beta2) * d * d;
            p[i] = p[i] * s.adam_shrink -
                   s.adam_step_size * m_new / (std::sqrt(v_new) * s.adam_correction + a.epsilon);
            m[i] = m_new;
            v[i] = v_new;
        }
        if (all_finite == 0) {
            report_not_finite(a.finite, g, begin, end);
        }
    });
}

void CpuBackend::unscale(std::int64_t elems, LossScale* state, float* g) {
    const float factor = 1.0f / state->scale;
    context_.for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        int all_finite = 1;
        for (std::int64_t i = begin; i < end; ++i) {
            all_finite &= finite(g[i]);
        }
        if (all_finite == 0) {
            report_not_finite({.word = &state->found_inf}, g, begin, end);
        }
        for (std::int64_t i = begin; i < end; ++i) {
            g[i] = finite(g[i]) ? g[i] * factor : 0.0f;
        }
    });
}

}  // namespace gyre::cpu
