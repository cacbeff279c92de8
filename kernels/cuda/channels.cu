// Some channels of a value, in an order (formula: ChannelsSpec).
//   y[n][c][i] = x[n][source(c)][i];  dx[n][c][i] = dy[n][reader(c)][i], or 0 where there is none
//
// Memory-bound: 8 bytes per element. One thread per element of y, or of dx; 256 threads per block.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/planes.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

struct PlaceInImage {
    std::int64_t image, in_plane;
    int channel;
};
__device__ __forceinline__ PlaceInImage channel_place(std::int64_t index, int channels,
                                                      std::int64_t plane) {
    const std::int64_t of_all = index / plane, image = of_all / channels;
    return {image, index - of_all * plane, static_cast<int>(of_all - image * channels)};
}

__global__ void channels_forward_kernel(std::int64_t elems, ChannelsSpec spec, std::int64_t plane,
                                        const float* x, float* y) {
    const std::int64_t index = thread_index();
    if (index < elems) {
        const PlaceInImage at = channel_place(index, spec.count, plane);
        const std::int64_t from = at.image * spec.in.channels + spec.source(at.channel);
        y[index] = x[from * plane + at.in_plane];
    }
}

__global__ void channels_backward_kernel(std::int64_t elems, ChannelsSpec spec, std::int64_t plane,
                                         const float* dy, float* dx) {
    const std::int64_t index = thread_index();
    if (index < elems) {
        const PlaceInImage at = channel_place(index, spec.in.channels, plane);
        const int reader = spec.reader(at.channel);
        dx[index] = reader < 0 ? 0.0f : dy[(at.image * spec.count + reader) * plane + at.in_plane];
    }
}

class ChannelsOp final : public Op {
 public:
    ChannelsOp(const Context& context, const ChannelsSpec& spec) : context_(context), spec_(spec) {}
    OpNeeds needs() const override { return {.backward_reads_x = false}; }
    void forward(const Batch& batch, const OpIo& io) override {
        start("channels_forward", channels_forward_kernel, batch.n * spec_.out().elems(),
              io.x.f32(), io.y.f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        start("channels_backward", channels_backward_kernel, batch.n * spec_.in.elems(),
              io.dy.f32(), io.dx.f32());
    }

 private:
    template <typename Kernel>
    void start(const char* name, Kernel kernel, std::int64_t elems, const float* from,
               float* to) const {
        if (elems > 0) {
            const std::int64_t blocks = (elems + kElementwiseBlock - 1) / kElementwiseBlock;
            launch(name, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kElementwiseBlock),
                   context_.stream, elems, spec_, spec_.in.plane_elems(), from, to);
        }
    }

    const Context context_;
    const ChannelsSpec spec_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const ChannelsSpec& spec, const OpSizes&) {
    return std::make_unique<ChannelsOp>(context, spec);
}

}  // namespace gyre::SIMT_NAMESPACE
