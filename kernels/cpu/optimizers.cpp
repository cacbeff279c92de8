// SGD and Adam on the CPU.
#include <cmath>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/cpu/finite.hpp"

namespace gyre::cpu {

void CpuBackend::sgd_step(const SgdArgs& args, std::int64_t elems, float* p, const float* g,
                          float* velocity) {
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

}  // namespace gyre::cpu
