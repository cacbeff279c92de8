// Group normalisation (formulas: GroupNormSpec). x, y, dy, dx [n][groups][group_elems], where a
// group has group_elems / plane channels.
//
// Memory-bound: forward reads x three times and writes y, backward reads x and dy twice and writes
// dx, and reads both once more for the parameters. One block of 256 threads per image and group,
// and for the parameters one per channel, which has the sums over all images; sums are in double.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

struct GroupExtents {
    int groups, channels;  // channels of all groups
    std::uint32_t plane, group_elems;
};

// A block's group. It calls body(index in x, channel) for this thread's elements.
struct MyGroup {
    std::uint32_t plane, elems;
    std::int64_t begin;
    int first_channel;

    __device__ __forceinline__ explicit MyGroup(const GroupExtents& e)
        : plane(e.plane),
          elems(e.group_elems),
          begin(std::int64_t{blockIdx.x} * e.group_elems),
          first_channel(static_cast<int>(blockIdx.x) % e.groups * (e.channels / e.groups)) {}

    template <typename Body>
    __device__ __forceinline__ void for_elems(Body body) const {
        for (std::uint32_t i = threadIdx.x; i < elems; i += kElementwiseBlock) {
            body(begin + i, first_channel + static_cast<int>(i / plane));
        }
    }
    // The mean of term(index, channel), for all threads.
    template <typename Term>
    __device__ __forceinline__ double mean(Term term) const {
        SIMT_SHARED(double, shared, [1]);
        double sum = 0.0;
        for_elems([&](std::int64_t i, int c) { sum += static_cast<double>(term(i, c)); });
        sum = block_sum(sum);
        if (threadIdx.x == 0) {
            shared[0] = sum;
        }
        __syncthreads();
        return shared[0] / static_cast<double>(elems);
    }
};

// saved: mean and 1 / deviation of each group; null: they are not kept.
__global__ void groupnorm_forward_kernel(GroupExtents e, const float* x, const float* weight,
                                         const float* bias, float epsilon, float* y, float* saved) {
    const MyGroup group(e);
    const auto mean = static_cast<float>(group.mean([=](std::int64_t i, int) { return x[i]; }));
    const double variance = group.mean([=](std::int64_t i, int) {
        const float d = x[i] - mean;
        return d * d;
    });
    const auto inverse = static_cast<float>(1.0 / sqrt(variance + static_cast<double>(epsilon)));
    if (saved != nullptr && threadIdx.x == 0) {
        saved[2 * blockIdx.x] = mean;
        saved[2 * blockIdx.x + 1] = inverse;
    }
    group.for_elems(
        [=](std::int64_t i, int c) { y[i] = (x[i] - mean) * (inverse * weight[c]) + bias[c]; });
}

__global__ void groupnorm_backward_kernel(GroupExtents e, const float* x, const float* dy,
                                          const float* weight, const float* saved, float* dx) {
    const MyGroup group(e);
    const float mean = saved[2 * blockIdx.x], inverse = saved[2 * blockIdx.x + 1];
    const auto mean_dy =
        static_cast<float>(group.mean([=](std::int64_t i, int c) { return dy[i] * weight[c]; }));
    const auto mean_product = static_cast<float>(group.mean(
        [=](std::int64_t i, int c) { return dy[i] * weight[c] * ((x[i] - mean) * inverse); }));
    group.for_elems([=](std::int64_t i, int c) {
        const float normalised = (x[i] - mean) * inverse;
        dx[i] = inverse * (dy[i] * weight[c] - mean_dy - normalised * mean_product);
    });
}

__global__ void groupnorm_params_kernel(GroupExtents e, int n, const float* x, const float* dy,
                                        const float* saved, float* dweight, float* dbias) {
    const int c = static_cast<int>(blockIdx.x);
    const int group = c / (e.channels / e.groups);
    double of_dy = 0.0, of_products = 0.0;
    for (int image = 0; image < n; ++image) {
        const float* const statistics = saved + 2 * (std::int64_t{image} * e.groups + group);
        const std::int64_t begin = (std::int64_t{image} * e.channels + c) * e.plane;
        for (std::int64_t i = begin + threadIdx.x; i < begin + e.plane; i += kElementwiseBlock) {
            of_dy += static_cast<double>(dy[i]);
            of_products += static_cast<double>(dy[i] * (x[i] - statistics[0]) * statistics[1]);
        }
    }
    of_dy = block_sum(of_dy);
    of_products = block_sum(of_products);
    if (threadIdx.x == 0) {
        dweight[c] = static_cast<float>(of_products);
        dbias[c] = static_cast<float>(of_dy);
    }
}

class GroupNormOp final : public Op {
 public:
    GroupNormOp(const Context& context, const GroupNormSpec& spec, int train_images)
        : context_(context),
          spec_(spec),
          saved_bytes_(2 * sizeof(float) * static_cast<std::size_t>(train_images) *
                       static_cast<std::size_t>(spec.groups)) {}
    OpNeeds needs() const override { return {.saved_bytes = saved_bytes_}; }

    void forward(const Batch& batch, const OpIo& io) override {
        start("groupnorm_forward", groupnorm_forward_kernel, batch.n * spec_.groups, extents(),
              io.x.f32(), io.params[0].f32(), io.params[1].f32(), spec_.epsilon, io.y.f32(),
              batch.training ? static_cast<float*>(io.saved) : nullptr);
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        start("groupnorm_params", groupnorm_params_kernel, spec_.in.channels, extents(), batch.n,
              io.x.f32(), io.dy.f32(), static_cast<const float*>(io.saved), io.grads[0].f32(),
              io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        start("groupnorm_backward", groupnorm_backward_kernel, batch.n * spec_.groups, extents(),
              io.x.f32(), io.dy.f32(), io.params[0].f32(), static_cast<const float*>(io.saved),
              io.dx.f32());
    }

 private:
    GroupExtents extents() const {
        return {spec_.groups, spec_.in.channels, static_cast<std::uint32_t>(spec_.in.plane_elems()),
                static_cast<std::uint32_t>(spec_.group_elems())};
    }
    template <typename Kernel, typename... A>
    void start(const char* name, Kernel kernel, int blocks, A... arguments) const {
        if (blocks > 0) {
            launch(name, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kElementwiseBlock),
                   context_.stream, arguments...);
        }
    }

    const Context context_;
    const GroupNormSpec spec_;
    const std::size_t saved_bytes_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const GroupNormSpec& spec,
                            const OpSizes& sizes) {
    return std::make_unique<GroupNormOp>(context, spec, sizes.train_images);
}

}  // namespace gyre::SIMT_NAMESPACE
