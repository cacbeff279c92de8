// Batch normalisation (formulas: BatchNorm2dSpec). x, y, dy, dx [n][channels][plane].
//
// Memory-bound: forward reads x three times and writes y, backward reads x and dy twice and writes
// dx. Sums: kSplits blocks of 256 threads per channel, each over every kSplits-th image, in double;
// then one thread per channel adds the partial sums in order. No atomics.
#include "base/round_up.hpp"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kSplits = 8;

struct Extents {
    int n, channels;
    std::int64_t plane;
};

// The sum of term(index) over the block's images and the pixels of its channel, on thread 0.
template <typename Term>
__device__ __forceinline__ double sum_of_block(const Extents& e, Term term) {
    const int channel = static_cast<int>(blockIdx.x);
    double sum = 0.0;
    for (int image = static_cast<int>(blockIdx.y); image < e.n; image += kSplits) {
        const std::int64_t begin = (std::int64_t{image} * e.channels + channel) * e.plane;
        for (std::int64_t i = threadIdx.x; i < e.plane; i += kElementwiseBlock) {
            sum += static_cast<double>(term(begin + i));
        }
    }
    return block_sum(sum);
}

// Sums of x; or, given `sums`, of squares of x - mean, where mean = sums / count.
__global__ void batchnorm_sums_kernel(Extents e, const float* x, const float* sums, float count,
                                      float* partial) {
    const float mean = sums == nullptr ? 0.0f : sums[blockIdx.x] / count;
    const double sum = sum_of_block(e, [=](std::int64_t i) {
        const float d = x[i] - mean;
        return sums == nullptr ? d : d * d;
    });
    if (threadIdx.x == 0) {
        partial[blockIdx.y * static_cast<unsigned>(e.channels) + blockIdx.x] =
            static_cast<float>(sum);
    }
}

// Sums of dy; or, given `statistics`, of dy * normalised x.
__global__ void batchnorm_gradient_sums_kernel(Extents e, const float* x, const float* dy,
                                               const float* statistics, float* partial) {
    float mean = 0.0f, inverse = 0.0f;
    if (statistics != nullptr) {
        mean = statistics[blockIdx.x];
        inverse = statistics[static_cast<unsigned>(e.channels) + blockIdx.x];
    }
    const double sum = sum_of_block(e, [=](std::int64_t i) {
        return statistics == nullptr ? dy[i] : dy[i] * (x[i] - mean) * inverse;
    });
    if (threadIdx.x == 0) {
        partial[blockIdx.y * static_cast<unsigned>(e.channels) + blockIdx.x] =
            static_cast<float>(sum);
    }
}

__device__ __forceinline__ int my_channel() {
    return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

__global__ void batchnorm_finish_kernel(int channels, const float* partial, float* sums) {
    const int c = my_channel();
    if (c >= channels) {
        return;
    }
    double sum = 0.0;
    for (int split = 0; split < kSplits; ++split) {
        sum += static_cast<double>(partial[split * channels + c]);
    }
    sums[c] = static_cast<float>(sum);
}

// From the sums of x and of squares, computes statistics [2][channels] = mean, 1 / deviation, and
// updates the running statistics.
__global__ void batchnorm_statistics_kernel(int channels, const float* sums, const float* squares,
                                            float count, float momentum, float epsilon,
                                            float* statistics, float* running_mean,
                                            float* running_variance) {
    const int c = my_channel();
    if (c >= channels) {
        return;
    }
    const float mean = sums[c] / count;
    const double variance = static_cast<double>(squares[c]) / static_cast<double>(count);
    const float unbiased = squares[c] / fmaxf(count - 1.0f, 1.0f);
    statistics[c] = mean;
    statistics[channels + c] =
        static_cast<float>(1.0 / sqrt(variance + static_cast<double>(epsilon)));
    running_mean[c] += momentum * (mean - running_mean[c]);
    running_variance[c] += momentum * (unbiased - running_variance[c]);
}

__global__ void batchnorm_running_kernel(int channels, const float* running_mean,
                                         const float* running_variance, float epsilon,
                                         float* statistics) {
    const int c = my_channel();
    if (c < channels) {
        statistics[c] = running_mean[c];
        statistics[channels + c] = static_cast<float>(
            1.0 / sqrt(static_cast<double>(running_variance[c]) + static_cast<double>(epsilon)));
    }
}

__global__ void batchnorm_forward_kernel(std::int64_t elems, int channels, std::int64_t plane,
                                         const float* x, const float* statistics,
                                         const float* weight, const float* bias, float* y) {
    const auto at = [=](std::int64_t i) {
        const int c = static_cast<int>(i / plane % channels);
        return (x[i] - statistics[c]) * (statistics[channels + c] * weight[c]) + bias[c];
    };
    for_my_quad(
        elems,
        [=](std::int64_t i) { store4(y + i, make_float4(at(i), at(i + 1), at(i + 2), at(i + 3))); },
        [=](std::int64_t i) { y[i] = at(i); });
}

__global__ void batchnorm_backward_kernel(std::int64_t elems, int channels, std::int64_t plane,
                                          const float* x, const float* dy, const float* statistics,
                                          const float* weight, const float* sums, float count,
                                          float* dx) {
    const auto at = [=](std::int64_t i) {
        const int c = static_cast<int>(i / plane % channels);
        const float inverse = statistics[channels + c];
        return weight[c] * inverse *
               (dy[i] - sums[c] / count -
                (x[i] - statistics[c]) * (sums[channels + c] / count * inverse));
    };
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            store4(dx + i, make_float4(at(i), at(i + 1), at(i + 2), at(i + 3)));
        },
        [=](std::int64_t i) { dx[i] = at(i); });
}

class BatchNorm2dOp final : public Op {
 public:
    BatchNorm2dOp(const Context& context, const BatchNorm2dSpec& spec, const OpSizes& sizes)
        : context_(context),
          spec_(spec),
          channels_(spec.in.channels),
          leaf_floats_(round_up(2 * channels_, kAlignElems)),
          leaves_(spec.local ? 1 : sizes.leaves) {
        context.workspace.reserve(static_cast<std::size_t>(workspace_floats()) * sizeof(float));
    }
    OpNeeds needs() const override {
        return {.saved_bytes = 2 * static_cast<std::size_t>(channels_) * sizeof(float),
                .phases = spec_.phases()};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.training) {
            for (int phase = 0; phase < BatchNorm2dSpec::kPhases; ++phase) {
                forward_phase(batch, io, phase);
            }
        } else if (batch.n > 0) {
            float* const statistics = workspace() + workspace_floats() - 2 * channels_;
            for_channels("batchnorm_running", batchnorm_running_kernel, io.state[0].f32(),
                         io.state[1].f32(), spec_.epsilon, statistics);
            normalise(batch, io, statistics);
        }
    }
    void forward_phase(const Batch& batch, const OpIo& io, int phase) override {
        if (spec_.count(batch) == 0) {
            return;
        }
        float* const statistics = static_cast<float*>(io.saved);
        if (phase > 0) {
            spec_.add_up(batch, totals(phase - 1), channels_, leaf_floats_);
        }
        if (phase == 2) {
            for_channels("batchnorm_statistics", batchnorm_statistics_kernel,
                         static_cast<const float*>(totals(0)), static_cast<const float*>(totals(1)),
                         count(batch), spec_.momentum, spec_.epsilon, statistics, io.state[0].f32(),
                         io.state[1].f32());
            return normalise(batch, io, statistics);
        }
        launch("batchnorm_sums", batchnorm_sums_kernel, grid(), dim3(kElementwiseBlock),
               context_.stream, extents(batch), io.x.f32(),
               static_cast<const float*>(phase == 1 ? totals(0) : nullptr), count(batch),
               partial());
        finish(totals(phase) + spec_.leaf(batch) * leaf_floats_);
    }
    // Sums over this leaf's images, which are the gradients of weight and bias.
    void backward_begin(const Batch& batch, const OpIo& io) override {
        const auto* statistics = static_cast<const float*>(io.saved);
        for (const bool products : {false, true}) {
            launch("batchnorm_gradient_sums", batchnorm_gradient_sums_kernel, grid(),
                   dim3(kElementwiseBlock), context_.stream, extents(batch), io.x.f32(),
                   io.dy.f32(), products ? statistics : nullptr, partial());
            finish(sums(batch) + (products ? channels_ : 0));
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        const std::size_t bytes = static_cast<std::size_t>(channels_) * sizeof(float);
        context_.stream.copy(io.grads[0].data, sums(batch) + channels_, bytes);
        context_.stream.copy(io.grads[1].data, sums(batch), bytes);
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        spec_.add_up(batch, totals(0), 2 * channels_, leaf_floats_);
        launch_elementwise("batchnorm_backward", batchnorm_backward_kernel, context_,
                           spec_.in.elems() * batch.n, channels_, spec_.in.plane_elems(),
                           io.x.f32(), io.dy.f32(), static_cast<const float*>(io.saved),
                           io.params[0].f32(), static_cast<const float*>(totals(0)), count(batch),
                           io.dx.f32());
    }

 private:
    static constexpr int kAlignElems = 16;

    // Workspace: sums [2][leaves][leaf_floats], partial sums [kSplits][channels], and statistics
    // [2][channels] for evaluation passes.
    std::int64_t sums_floats() const { return std::int64_t{2} * leaves_ * leaf_floats_; }
    std::int64_t workspace_floats() const {
        return sums_floats() + std::int64_t{kSplits + 2} * channels_;
    }
    float* workspace() const { return context_.workspace.floats(workspace_floats()); }
    float* partial() const { return workspace() + sums_floats(); }
    // The sums of a forward pass: those of x (0) and of squares (1), each [leaves][leaf_floats].
    // The sums of a backward pass, of dy and of products, are in the place of the first.
    float* totals(int which) const { return workspace() + which * leaves_ * leaf_floats_; }
    float* sums(const Batch& batch) const {  // of a backward pass: [2][channels]
        return workspace() + spec_.leaf(batch) * leaf_floats_;
    }
    Extents extents(const Batch& batch) const {
        return {batch.n, channels_, spec_.in.plane_elems()};
    }
    dim3 grid() const { return dim3(static_cast<unsigned>(channels_), kSplits); }
    float count(const Batch& batch) const { return static_cast<float>(spec_.count(batch)); }

    template <typename... P, typename... A>
    void for_channels(const char* name, void (*kernel)(int, P...), A... arguments) const {
        const unsigned blocks =
            (static_cast<unsigned>(channels_) + kElementwiseBlock - 1) / kElementwiseBlock;
        launch(name, kernel, dim3(blocks), dim3(kElementwiseBlock), context_.stream, channels_,
               arguments...);
    }
    void finish(float* sums) const {
        for_channels("batchnorm_finish", batchnorm_finish_kernel,
                     static_cast<const float*>(partial()), sums);
    }
    void normalise(const Batch& batch, const OpIo& io, const float* statistics) const {
        launch_elementwise("batchnorm_forward", batchnorm_forward_kernel, context_,
                           spec_.in.elems() * batch.n, channels_, spec_.in.plane_elems(),
                           io.x.f32(), statistics, io.params[0].f32(), io.params[1].f32(),
                           io.y.f32());
    }

    const Context context_;
    const BatchNorm2dSpec spec_;
    const int channels_;
    const int leaf_floats_;  // of a leaf's sums
    const int leaves_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const BatchNorm2dSpec& spec,
                            const OpSizes& sizes) {
    return std::make_unique<BatchNorm2dOp>(context, spec, sizes);
}

}  // namespace gyre::SIMT_NAMESPACE
