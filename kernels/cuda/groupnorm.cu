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
    int groups, channels;
    std::int64_t plane, group_elems;
};

// block_sum() for all threads.
__device__ __forceinline__ double sum_for_all(double value) {
    SIMT_SHARED(double, shared, [1]);
    const double sum = block_sum(value);
    if (threadIdx.x == 0) {
        shared[0] = sum;
    }
    __syncthreads();
    return shared[0];
}

// The sum of term(index) over the block's group.
template <typename Term>
__device__ __forceinline__ double sum_of_group(const GroupExtents& e, Term term) {
    const std::int64_t begin = std::int64_t{blockIdx.x} * e.group_elems;
    double sum = 0.0;
    for (std::int64_t i = threadIdx.x; i < e.group_elems; i += kElementwiseBlock) {
        sum += static_cast<double>(term(begin + i));
    }
    return sum_for_all(sum);
}

// saved: mean and 1 / deviation of each group; null: they are not kept.
__global__ void groupnorm_forward_kernel(GroupExtents e, const float* x, const float* weight,
                                         const float* bias, float epsilon, float* y, float* saved) {
    const auto count = static_cast<double>(e.group_elems);
    const auto mean =
        static_cast<float>(sum_of_group(e, [=](std::int64_t i) { return x[i]; }) / count);
    const double squares = sum_of_group(e, [=](std::int64_t i) {
        const float d = x[i] - mean;
        return d * d;
    });
    const auto inverse =
        static_cast<float>(1.0 / sqrt(squares / count + static_cast<double>(epsilon)));
    if (saved != nullptr && threadIdx.x == 0) {
        saved[2 * blockIdx.x] = mean;
        saved[2 * blockIdx.x + 1] = inverse;
    }
    const std::int64_t begin = std::int64_t{blockIdx.x} * e.group_elems;
    for (std::int64_t i = begin + threadIdx.x; i < begin + e.group_elems; i += kElementwiseBlock) {
        const int c = static_cast<int>(i / e.plane % e.channels);
        y[i] = (x[i] - mean) * (inverse * weight[c]) + bias[c];
    }
}

__global__ void groupnorm_backward_kernel(GroupExtents e, const float* x, const float* dy,
                                          const float* weight, const float* saved, float* dx) {
    const float mean = saved[2 * blockIdx.x], inverse = saved[2 * blockIdx.x + 1];
    const auto of_dy = [=](std::int64_t i) {
        return dy[i] * weight[static_cast<int>(i / e.plane % e.channels)];
    };
    const auto normalised = [=](std::int64_t i) { return (x[i] - mean) * inverse; };
    const auto count = static_cast<double>(e.group_elems);
    const auto mean_dy = static_cast<float>(sum_of_group(e, of_dy) / count);
    const auto mean_product = static_cast<float>(
        sum_of_group(e, [=](std::int64_t i) { return of_dy(i) * normalised(i); }) / count);
    const std::int64_t begin = std::int64_t{blockIdx.x} * e.group_elems;
    for (std::int64_t i = begin + threadIdx.x; i < begin + e.group_elems; i += kElementwiseBlock) {
        dx[i] = inverse * (of_dy(i) - mean_dy - normalised(i) * mean_product);
    }
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
        return {spec_.groups, spec_.in.channels, spec_.in.plane_elems(), spec_.group_elems()};
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
