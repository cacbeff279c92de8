// Log-softmax with negative log-likelihood over logits [n][classes]:
//   loss_i = log(sum over k of exp(logits[i][k] - max_i)) + max_i - logits[i][label_i]
//   gradient[i][k] = scale * (exp(logits[i][k] - max_i) / sum - (k == label_i))
// With label smoothing E:
//   loss_i += E * mean over k of (logits[i][label_i] - logits[i][k])
//   gradient[i][k] = scale * (softmax - (1 - E) (k == label_i) - E / classes)
// With class weights w: loss_i and gradient[i] times w[label_i].
// For mixed images, both are the sums over two labels, times their shares.
//   sums = scale * sum of loss_i, number of images whose label has the first largest logit
//
// 8 bytes per element, about 40 FLOPs (two exp); too small to fill a GPU for ten classes. One warp
// per image: its lanes stride over the classes and read the row three times, after the first time
// from the L1 cache. 8 warps per block, grid-stride over images. Losses are added in double
// precision in a fixed order: a warp's images, a block's warps, then one block adds all blocks.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/elementwise.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kWarps = kElementwiseBlock / 32;

// partial: [2][blocks], losses and numbers of correct images
// spread: the target of every class other than the label, label_smoothing / classes
__global__ void cross_entropy_kernel(CrossEntropyArgs args, int n, float spread, double* partial) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t warps = std::int64_t{gridDim.x} * kWarps;
    double loss = 0.0, correct = 0.0;  // the warp's sums, the same on every lane
    for (std::int64_t image = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; image < n;
         image += warps) {
        const float* logits = args.logits + image * args.classes;
        // NaN is never the largest, but it makes sum, loss and gradient NaN.
        float largest = -INFINITY;
        int best = lane;
        for (int k = lane; k < args.classes; k += 32) {
            const float v = logits[k];
            if (v > largest) {
                largest = v;
                best = k;
            }
        }
        warp_argmax(largest, best);
        float sum = 0.0f;
        for (int k = lane; k < args.classes; k += 32) {
            sum += expf(logits[k] - largest);
        }
        sum = warp_sum(sum);
        LossTarget targets[2];
        const int count = find_targets(args, n, image, targets);
        float weight = 0.0f;
        for (int t = 0; t < count; ++t) {
            const int label = targets[t].label;
            const auto factor_of_loss = static_cast<double>(targets[t].weight);
            weight += targets[t].weight;
            loss += factor_of_loss * static_cast<double>(logf(sum) + largest - logits[label]);
            if (args.label_smoothing > 0.0f) {
                float others = 0.0f;
                for (int k = lane; k < args.classes; k += 32) {
                    others += logits[label] - logits[k];
                }
                loss += factor_of_loss * static_cast<double>(spread * warp_sum(others));
            }
        }
        correct += best == targets[0].label ? 1.0 : 0.0;
        if (args.gradient != nullptr) {
            float* gradient = args.gradient + image * args.classes;
            const float factor = args.scale * weight / sum;
            const float own = 1.0f - args.label_smoothing + spread;
            for (int k = lane; k < args.classes; k += 32) {
                float target = 0.0f;
                for (int t = 0; t < count; ++t) {
                    target +=
                        args.scale * targets[t].weight * (k == targets[t].label ? own : spread);
                }
                gradient[k] = expf(logits[k] - largest) * factor - target;
            }
        }
    }
    loss = block_sum(lane == 0 ? loss : 0.0);
    correct = block_sum(lane == 0 ? correct : 0.0);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = loss;
        partial[gridDim.x + blockIdx.x] = correct;
    }
}

// Launched with one block.
__global__ void cross_entropy_sums_kernel(int blocks, float scale, const double* partial,
                                          float* sums) {
    double loss = 0.0, correct = 0.0;
    for (int b = static_cast<int>(threadIdx.x); b < blocks;
         b += static_cast<int>(kElementwiseBlock)) {
        loss += partial[b];
        correct += partial[blocks + b];
    }
    loss = block_sum(loss);
    correct = block_sum(correct);
    if (threadIdx.x == 0) {
        sums[0] = static_cast<float>(loss * static_cast<double>(scale));
        sums[1] = static_cast<float>(correct);
    }
}

}  // namespace

void cross_entropy(const Context& context, const CrossEntropyArgs& args, int n) {
    // Enough to fill the GPU once; at least one, which writes zeros for an empty batch.
    const int blocks = std::clamp((n - 1) / kWarps + 1, 1, kPlannedMultiprocessors * 8);
    auto* partial = static_cast<double*>(
        context.workspace.bytes(2 * sizeof(double) * static_cast<std::size_t>(blocks)));
    launch("cross_entropy", cross_entropy_kernel, dim3(static_cast<unsigned>(blocks)),
           dim3(kElementwiseBlock), context.stream, args, n,
           args.label_smoothing / static_cast<float>(args.classes), partial);
    launch("cross_entropy_sums", cross_entropy_sums_kernel, dim3(1), dim3(kElementwiseBlock),
           context.stream, blocks, args.scale, partial, args.sums);
}

}  // namespace gyre::SIMT_NAMESPACE
