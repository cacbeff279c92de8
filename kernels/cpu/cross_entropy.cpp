// Log-softmax, negative log-likelihood and its gradient on the CPU, in one pass over the logits.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/backend_cpu.hpp"

namespace gyre::cpu {

void CpuBackend::cross_entropy(const CrossEntropyArgs& args, int n) {
    double loss = 0.0;
    int correct = 0;
    for (int block = 0; block < block_count(n); ++block) {
        const std::ptrdiff_t base = std::ptrdiff_t{block} * args.classes * kLanes;
        const float* logits = args.logits + base;
        const int lanes = std::min(kLanes, n - block * kLanes);
        float largest[kLanes], sum[kLanes] = {};
        int best[kLanes] = {};
        std::copy_n(logits, kLanes, largest);
        for (int k = 1; k < args.classes; ++k) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const float v = logits[k * kLanes + lane];
                best[lane] = v > largest[lane] ? k : best[lane];
                largest[lane] = v > largest[lane] ? v : largest[lane];
            }
        }
        for (int k = 0; k < args.classes; ++k) {
            for (int lane = 0; lane < kLanes; ++lane) {
                sum[lane] += std::exp(logits[k * kLanes + lane] - largest[lane]);
            }
        }
        for (int lane = 0; lane < lanes; ++lane) {
            const int label = args.labels[block * kLanes + lane];
            loss += static_cast<double>(std::log(sum[lane]) + largest[lane] -
                                        logits[label * kLanes + lane]);
            correct += best[lane] == label;
        }
        if (args.gradient != nullptr) {
            float* gradient = args.gradient + base;
            for (int k = 0; k < args.classes; ++k) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    const float p = std::exp(logits[k * kLanes + lane] - largest[lane]) / sum[lane];
                    gradient[k * kLanes + lane] = lane < lanes ? args.scale * p : 0.0f;
                }
            }
            for (int lane = 0; lane < lanes; ++lane) {
                gradient[args.labels[block * kLanes + lane] * kLanes + lane] -= args.scale;
            }
        }
    }
    args.sums[0] = static_cast<float>(loss * static_cast<double>(args.scale));
    args.sums[1] = static_cast<float>(correct);
}

}  // namespace gyre::cpu
