// Log-softmax, negative log-likelihood and its gradient on the CPU, in one pass over the logits.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/backend_cpu.hpp"

namespace gyre::cpu {

void CpuBackend::cross_entropy(const CrossEntropyArgs& args, int n) {
    const float spread = args.scale * args.label_smoothing / static_cast<float>(args.classes);
    const float own = args.scale * (1.0f - args.label_smoothing);
    double loss = 0.0;
    int correct = 0;
    for (int block = 0; block < block_count(n); ++block) {
        const std::ptrdiff_t base = std::ptrdiff_t{block} * args.classes * kLanes;
        const float* logits = args.logits + base;
        const int lanes = std::min(kLanes, n - block * kLanes);
        float largest[kLanes], sum[kLanes] = {}, weight[kLanes] = {};
        int best[kLanes] = {}, count[kLanes];
        LossTarget targets[kLanes][2];
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
            count[lane] = find_targets(args, n, block * kLanes + lane, targets[lane]);
            for (int t = 0; t < count[lane]; ++t) {
                const int label = targets[lane][t].label;
                const auto factor = static_cast<double>(targets[lane][t].weight);
                weight[lane] += targets[lane][t].weight;
                loss += factor * static_cast<double>(std::log(sum[lane]) + largest[lane] -
                                                     logits[label * kLanes + lane]);
                if (args.label_smoothing > 0.0f) {
                    double others = 0.0;  // sum over the classes of the label's logit - logit
                    for (int k = 0; k < args.classes; ++k) {
                        others += static_cast<double>(logits[label * kLanes + lane] -
                                                      logits[k * kLanes + lane]);
                    }
                    loss +=
                        factor * static_cast<double>(args.label_smoothing) * others / args.classes;
                }
            }
            correct += best[lane] == targets[lane][0].label;
        }
        if (args.gradient != nullptr) {
            float* gradient = args.gradient + base;
            for (int k = 0; k < args.classes; ++k) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    const float p = std::exp(logits[k * kLanes + lane] - largest[lane]) / sum[lane];
                    gradient[k * kLanes + lane] =
                        lane < lanes ? args.scale * weight[lane] * p - spread * weight[lane] : 0.0f;
                }
            }
            for (int lane = 0; lane < lanes; ++lane) {
                for (int t = 0; t < count[lane]; ++t) {
                    const LossTarget& target = targets[lane][t];
                    gradient[target.label * kLanes + lane] -= own * target.weight;
                }
            }
        }
    }
    args.sums[0] = static_cast<float>(loss * static_cast<double>(args.scale));
    args.sums[1] = static_cast<float>(correct);
}

}  // namespace gyre::cpu
