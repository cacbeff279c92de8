// Dropout in place, the same forward and backward: x *= mask / (1 - probability). The mask of an
// element or, by channel, of a plane is 1 if its random word >= probability * 2^32. Words come from
// Philox 4x32-10, four at a time, keyed by the image's index in the training set, so the mask does
// not depend on the image's position in the batch or on its rank.
//
// Memory-bound: 8 bytes per element; about 60 integer instructions per four words. 256 threads per
// block. Per element: one thread per group of 4 words and their 4 elements (16-byte accesses if the
// size of an image is a multiple of 4). By channel: one warp per group of 4 words and their 4
// consecutive planes.

#include "kernels/cuda/dropout.cuh"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

// An image has fewer than 2^31 elements and uses `words` random words.
struct Dropout {
    BatchDropout batch;
    std::uint32_t words, groups, plane_elems;
};

// groups: of all images.
template <typename Math, bool kQuads>
__global__ void dropout_kernel(std::int64_t groups, Dropout d, typename Math::Elem* x) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= groups) {
        return;
    }
    const auto image = static_cast<std::int64_t>(static_cast<std::uint64_t>(i) / d.groups);
    const auto group = static_cast<std::uint32_t>(i - image * d.groups);
    const float4 factor = d.batch.factors(image, group);
    if constexpr (kQuads) {
        const float4 v = load4(x + i * 4);
        store4(x + i * 4,
               make_float4(v.x * factor.x, v.y * factor.y, v.z * factor.z, v.w * factor.w));
    } else {
        auto* at = x + image * d.words + group * 4;
        const std::uint32_t rest = min(4u, d.words - group * 4);
        for (std::uint32_t e = 0; e < rest; ++e) {
            at[e] = Math::value(Math::load(at[e]) * select(factor, e));
        }
    }
}

template <bool kQuads>
__global__ void dropout_channels_kernel(std::int64_t groups, Dropout d, float* x) {
    const std::int64_t i = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
    if (i >= groups) {
        return;
    }
    const auto image = static_cast<std::int64_t>(static_cast<std::uint64_t>(i) / d.groups);
    const auto group = static_cast<std::uint32_t>(i - image * d.groups);
    const float4 factor = d.batch.factors(image, group);
    float* planes = x + (image * d.words + group * 4) * d.plane_elems;
    const std::uint32_t group_elems = min(4u, d.words - group * 4) * d.plane_elems;
    constexpr std::uint32_t kStep = kQuads ? 4 : 1;
    for (std::uint32_t e = threadIdx.x % 32 * kStep; e < group_elems; e += 32 * kStep) {
        const float f = select(factor, e / d.plane_elems);
        if constexpr (kQuads) {
            const float4 v = load4(planes + e);
            store4(planes + e, make_float4(v.x * f, v.y * f, v.z * f, v.w * f));
        } else {
            planes[e] *= f;
        }
    }
}

Dropout dropout_of(const DropoutSpec& spec, const Batch& batch) {
    Dropout d{};
    d.batch = batch_dropout(batch, spec.stream, spec.probability);
    d.words = static_cast<std::uint32_t>(spec.by_channel ? spec.in.channels : spec.in.elems());
    d.groups = (d.words + 3) / 4;
    d.plane_elems = static_cast<std::uint32_t>(spec.in.plane_elems());
    return d;
}

void apply(const Context& context, const DropoutSpec& spec, const Batch& batch, float* x) {
    if (batch.n == 0 || spec.probability <= 0.0f) {
        return;
    }
    const Dropout d = dropout_of(spec, batch);
    const bool aligned = reinterpret_cast<std::uintptr_t>(x) % sizeof(float4) == 0;
    const bool quads = (spec.by_channel ? d.plane_elems : d.words) % 4 == 0 && aligned;
    const auto kernel =
        spec.by_channel
            ? (quads ? dropout_channels_kernel<true> : dropout_channels_kernel<false>)
            : (quads ? dropout_kernel<Tf32Math, true> : dropout_kernel<Tf32Math, false>);
    const std::int64_t groups = std::int64_t{d.groups} * batch.n;
    const std::int64_t threads = spec.by_channel ? groups * 32 : groups;
    launch("dropout", kernel,
           dim3(static_cast<unsigned>((threads + kElementwiseBlock - 1) / kElementwiseBlock)),
           dim3(kElementwiseBlock), context.stream, groups, d, x);
}

// Stores no mask: the backward pass draws the same random numbers again.
class DropoutOp final : public Op {
 public:
    DropoutOp(const Context& context, const DropoutSpec& spec) : context_(context), spec_(spec) {}
    OpNeeds needs() const override { return {.in_place = true, .backward_reads_x = false}; }
    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.training) {
            apply(context_, spec_, batch, io.y.f32());
        }
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        apply(context_, spec_, batch, io.dx.f32());
    }

 private:
    const Context context_;
    const DropoutSpec spec_;
};

}  // namespace

void dropout(const Context& context, const DropoutSpec& spec, const Batch& batch, const Tensor& x) {
    if (x.type == DataType::float32) {
        return apply(context, spec, batch, x.f32());
    }
    const Dropout d = dropout_of(spec, batch);
    const std::int64_t groups = std::int64_t{d.groups} * batch.n;
    launch("dropout",
           x.type == DataType::bfloat16 ? dropout_kernel<Bf16Math, false>
                                        : dropout_kernel<F16Math, false>,
           dim3(static_cast<unsigned>((groups + kElementwiseBlock - 1) / kElementwiseBlock)),
           dim3(kElementwiseBlock), context.stream, groups, d, x.narrow());
}

std::unique_ptr<Op> make_op(const Context& context, const DropoutSpec& spec, const OpSizes&) {
    return std::make_unique<DropoutOp>(context, spec);
}

}  // namespace gyre::SIMT_NAMESPACE
