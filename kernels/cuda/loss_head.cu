// A net's last linear layer, log-softmax with negative log-likelihood, and the gradients of both
// (the loss's formulas are in cross_entropy.cu; x [n][in], w [classes][in]):
//   logits = x w^T + b;  dy = the gradient of the logits;  dx = dy w, masked as LinearSpec says;
//   dw = dy^T x;  db = sum of dy over the images;  sums as in cross_entropy.cu
// x and dx are float32 or have 16 bits. With 16 bits, w is rounded as it is read, and so are the
// logits, and dy times the loss scale, as if each were stored between operations.
//
// Two kernels. head_kernel: one block of 256 threads per image. Its threads stride over the
// features, four each, for four classes at a time, and sum over warps and block; one warp computes
// the loss; a second pass over the features computes dx. Bytes 2 n in for x and dx, 4 n classes,
// and the weights twice per block from L2; FLOPs 4 n in classes. gradients_kernel: a block has 8
// rows of images by 32 features, the last of which stands for the bias; grid (features,
// classes / 16). A thread sums 16 classes over its row's images, and the rows are added in order;
// one more block adds the losses. Bytes 4 n in; FLOPs 2 n in classes.
#include <cmath>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kBlock = static_cast<int>(kElementwiseBlock);
constexpr int kWarps = kBlock / 32;
constexpr int kMostClasses = 64, kMostFeatures = 8192;
constexpr int kClassesAtOnce = 4;              // for the logits
constexpr int kGradientClasses = 16;           // per thread
constexpr int kFeatures = 32, kRows = kWarps;  // per block computing gradients

template <typename Math>
struct Head {
    using Elem = typename Math::Elem;
    int n, in, classes;
    float scale;              // of the loss
    const float* loss_scale;  // a further factor of dy; null: 1
    float dx_factor;          // 0: dx is not masked
    const Elem* x;
    const float *w, *b;
    const std::int32_t* labels;
    Elem *dy, *dx;
    float *dw, *db, *sums;
    float* losses;  // [2][n]: the loss, and 1 if the label has the largest logit
};

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
    return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// One image's logits over the block's threads: each warp's share of the sums.
template <typename Math>
__device__ __forceinline__ void partial_logits(const Head<Math>& h, const typename Math::Elem* x,
                                               float (&part)[kWarps][kMostClasses]) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int k = 0; k < h.classes; k += kClassesAtOnce) {
        float sum[kClassesAtOnce] = {};
        for (int f = thread * 4; f < h.in; f += kBlock * 4) {
            const float4 value = Math::load4(x + f);
            SIMT_UNROLL
            for (int c = 0; c < kClassesAtOnce; ++c) {
                if (k + c < h.classes) {
                    const float4 w = load4(h.w + (k + c) * h.in + f);
                    sum[c] = dot(value, Math::rounded4(w), sum[c]);
                }
            }
        }
        SIMT_UNROLL
        for (int c = 0; c < kClassesAtOnce; ++c) {
            const float total = warp_sum(sum[c]);
            if (thread % 32 == 0 && k + c < h.classes) {
                part[thread / 32][k + c] = total;
            }
        }
    }
}

// Called by one warp; each lane has two classes.
template <typename Math>
__device__ __forceinline__ void loss_of_image(const Head<Math>& h, int image,
                                              const float (&part)[kWarps][kMostClasses],
                                              float (&gradient)[kMostClasses]) {
    const int lane = static_cast<int>(threadIdx.x);
    // NaN is never the largest, but it makes sum, loss and gradient NaN.
    float largest = -INFINITY, logit[2] = {};
    int best = lane;
    SIMT_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int k = lane + 32 * i;
        if (k < h.classes) {
            logit[i] = h.b[k];
            SIMT_UNROLL
            for (int warp = 0; warp < kWarps; ++warp) {
                logit[i] += part[warp][k];
            }
            logit[i] = rounded<Math>(logit[i]);
            if (logit[i] > largest) {
                largest = logit[i];
                best = k;
            }
        }
    }
    warp_argmax(largest, best);
    float sum = 0.0f;
    SIMT_UNROLL
    for (int i = 0; i < 2; ++i) {
        sum += lane + 32 * i < h.classes ? expf(logit[i] - largest) : 0.0f;
    }
    sum = warp_sum(sum);
    const int label = h.labels[image];
    const float factor = h.scale / sum;
    const float times = h.loss_scale == nullptr ? 1.0f : *h.loss_scale;
    SIMT_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int k = lane + 32 * i;
        if (k < h.classes) {
            const float d = expf(logit[i] - largest) * factor - (k == label ? h.scale : 0.0f);
            const auto dy = Math::value(d * times);
            gradient[k] = Math::load(dy);
            h.dy[image * h.classes + k] = dy;
            if (k == label) {
                h.losses[image] = logf(sum) + largest - logit[i];
                h.losses[h.n + image] = best == label ? 1.0f : 0.0f;
            }
        }
    }
}

template <typename Math>
__global__ void __launch_bounds__(kBlock) head_kernel(SIMT_GRID_CONSTANT const Head<Math> h) {
    SIMT_SHARED(float, part, [kWarps][kMostClasses]);
    SIMT_SHARED(float, gradient, [kMostClasses]);
    const int image = static_cast<int>(blockIdx.x);
    const auto* const x = h.x + std::int64_t{image} * h.in;
    partial_logits(h, x, part);
    __syncthreads();
    if (threadIdx.x < 32) {
        loss_of_image(h, image, part, gradient);
    }
    __syncthreads();
    if (h.dx == nullptr) {
        return;
    }
    auto* const dx = h.dx + std::int64_t{image} * h.in;
    for (int f = static_cast<int>(threadIdx.x) * 4; f < h.in; f += kBlock * 4) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        SIMT_UNROLL_BY_4
        for (int k = 0; k < h.classes; ++k) {
            const float d = gradient[k];
            const float4 w = Math::rounded4(load4(h.w + k * h.in + f));
            sum = make_float4(sum.x + d * w.x, sum.y + d * w.y, sum.z + d * w.z, sum.w + d * w.w);
        }
        if (h.dx_factor > 0.0f) {
            const float4 of = Math::load4(x + f);
            const auto masked = [&](float value, float where) {
                return where <= 0.0f ? 0.0f : value * h.dx_factor;
            };
            sum = make_float4(masked(sum.x, of.x), masked(sum.y, of.y), masked(sum.z, of.z),
                              masked(sum.w, of.w));
        }
        Math::store4(dx + f, sum);
    }
}

// Called by one block.
template <typename Math>
__device__ __forceinline__ void add_losses(const Head<Math>& h) {
    double loss = 0.0, correct = 0.0;
    for (int image = static_cast<int>(threadIdx.x); image < h.n; image += kBlock) {
        loss += h.losses[image];
        correct += h.losses[h.n + image];
    }
    loss = block_sum(loss);
    correct = block_sum(correct);
    if (threadIdx.x == 0) {
        h.sums[0] = static_cast<float>(loss * static_cast<double>(h.scale));
        h.sums[1] = static_cast<float>(correct);
    }
}

template <typename Math>
__global__ void __launch_bounds__(kBlock) gradients_kernel(SIMT_GRID_CONSTANT const Head<Math> h) {
    SIMT_SHARED(float, of_row, [kRows][kGradientClasses][kFeatures]);
    if (blockIdx.x == gridDim.x - 1) {
        if (blockIdx.y == 0) {
            add_losses(h);
        }
        return;
    }
    const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32;
    const int feature = static_cast<int>(blockIdx.x) * kFeatures + lane;
    const int first = static_cast<int>(blockIdx.y) * kGradientClasses;
    float sum[kGradientClasses] = {};
    for (int image = row; image < h.n; image += kRows) {
        const float x =
            feature < h.in ? Math::load(h.x[std::int64_t{image} * h.in + feature]) : 1.0f;
        const auto* const dy = h.dy + image * h.classes + first;
        SIMT_UNROLL
        for (int c = 0; c < kGradientClasses; ++c) {
            if (first + c < h.classes) {
                sum[c] += Math::load(dy[c]) * x;
            }
        }
    }
    SIMT_UNROLL
    for (int c = 0; c < kGradientClasses; ++c) {
        of_row[row][c][lane] = sum[c];
    }
    __syncthreads();
    for (int c = row; c < kGradientClasses && first + c < h.classes; c += kRows) {
        float total = 0.0f;
        SIMT_UNROLL
        for (int other = 0; other < kRows; ++other) {
            total += of_row[other][c][lane];
        }
        if (feature < h.in) {
            h.dw[(first + c) * h.in + feature] = total;
        } else if (feature == h.in) {
            h.db[first + c] = total;
        }
    }
}

template <typename Math>
class OwnLossHead final : public LossHead {
    using Elem = typename Math::Elem;

 public:
    OwnLossHead(const Context& context, const LinearSpec& spec, int images)
        : context_(context), spec_(spec) {
        context.workspace.reserve(loss_bytes(images));
    }
    void run(const Batch& batch, const OpIo& io, const CrossEntropyArgs& loss,
             const float* loss_scale) override {
        const Head<Math> head{
            .n = batch.n,
            .in = spec_.shape.in_features,
            .classes = spec_.shape.out_features,
            .scale = loss.scale,
            .loss_scale = loss_scale,
            .dx_factor = spec_.dx_factor,
            .x = static_cast<const Elem*>(io.x.data),
            .w = io.params[0].f32(),
            .b = io.params[1].f32(),
            .labels = loss.labels,
            .dy = static_cast<Elem*>(io.dy.data),
            .dx = static_cast<Elem*>(io.dx.data),
            .dw = io.grads[0].f32(),
            .db = io.grads[1].f32(),
            .sums = loss.sums,
            .losses = static_cast<float*>(context_.workspace.bytes(loss_bytes(batch.n)))};
        if (batch.n > 0) {
            launch("loss_head", head_kernel<Math>, dim3(static_cast<unsigned>(batch.n)),
                   dim3(kBlock), context_.stream, head);
        }
        const auto blocks = [](int elems, int each) {
            return static_cast<unsigned>((elems + each - 1) / each);
        };
        launch("loss_head_gradients", gradients_kernel<Math>,
               dim3(blocks(head.in + 1, kFeatures) + 1, blocks(head.classes, kGradientClasses)),
               dim3(kBlock), context_.stream, head);
    }

 private:
    static std::size_t loss_bytes(int n) { return 2 * sizeof(float) * static_cast<std::size_t>(n); }

    const Context context_;
    const LinearSpec spec_;
};

}  // namespace

std::unique_ptr<LossHead> make_loss_head(const Context& context, const LinearSpec& spec, int images,
                                         DataType type) {
    const LinearShape& shape = spec.shape;
    const bool can = shape.out_features <= kMostClasses && shape.in_features <= kMostFeatures &&
                     shape.in_features % 4 == 0 && !spec.relu && !spec.dy_masked;
    return can ? make_for_math<OwnLossHead, LossHead>(type, context, spec, images) : nullptr;
}

}  // namespace gyre::SIMT_NAMESPACE
