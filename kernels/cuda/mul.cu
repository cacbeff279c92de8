// Products of channels with their gates (formula: MulSpec) over planes p of n * channels:
//   y[p][i] = x[p] * x2[p][i];  dx2[p][i] = x[p] * dy[p][i];  dx[p] = sum over i of dy[p][i] *
//   x2[p][i]
//
// Memory-bound: 8 bytes per element for y and for dx2, 8 for dx. One thread per element, and one
// warp per plane for dx, whose lanes take every 32nd element; 256 threads per block.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/planes.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

__global__ void mul_kernel(std::int64_t elems, std::int64_t plane_elems, const float* gate,
                           const float* from, float* to) {
    const std::int64_t index = thread_index();
    if (index < elems) {
        to[index] = gate[index / plane_elems] * from[index];
    }
}

__global__ void mul_backward_gate_kernel(std::int64_t planes, std::int64_t plane_elems,
                                         const float* dy, const float* x2, float* dx) {
    const std::int64_t plane = thread_index() / 32;
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (plane >= planes) {
        return;
    }
    float sum = 0.0f;
    for (std::int64_t i = plane * plane_elems + lane; i < (plane + 1) * plane_elems; i += 32) {
        sum += dy[i] * x2[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        dx[plane] = sum;
    }
}

class MulOp final : public Op {
 public:
    MulOp(const Context& context, const MulSpec& spec)
        : context_(context), channels_(spec.in.channels), plane_elems_(spec.in2.plane_elems()) {}
    OpNeeds needs() const override { return {.backward_reads_x2 = true, .writes_dx2 = true}; }
    void forward(const Batch& batch, const OpIo& io) override {
        start("mul_forward", mul_kernel, planes(batch) * plane_elems_, 1, io.x.f32(), io.x2.f32(),
              io.y.f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        if (io.dx) {
            start("mul_backward_gate", mul_backward_gate_kernel, planes(batch), 32, io.dy.f32(),
                  io.x2.f32(), io.dx.f32());
        }
        if (io.dx2) {
            start("mul_backward", mul_kernel, planes(batch) * plane_elems_, 1, io.x.f32(),
                  io.dy.f32(), io.dx2.f32());
        }
    }

 private:
    std::int64_t planes(const Batch& batch) const { return std::int64_t{batch.n} * channels_; }
    // count: elements, or planes; threads: for each of them.
    void start(const char* name,
               void (*kernel)(std::int64_t, std::int64_t, const float*, const float*, float*),
               std::int64_t count, int threads, const float* a, const float* b, float* to) const {
        const std::int64_t blocks = (count * threads + kElementwiseBlock - 1) / kElementwiseBlock;
        if (blocks > 0) {
            launch(name, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kElementwiseBlock),
                   context_.stream, count, plane_elems_, a, b, to);
        }
    }

    const Context context_;
    const std::int64_t channels_, plane_elems_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const MulSpec& spec, const OpSizes&) {
    return std::make_unique<MulOp>(context, spec);
}

}  // namespace gyre::SIMT_NAMESPACE
