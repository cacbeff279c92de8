// y += x, also used in place for the sum of a residual connection, y = x + x2 (He et al., Deep
// residual learning, CVPR 2016). The gradient of both inputs is dy itself, passed on by the net.
//
// Memory-bound: 12 bytes per element (two reads, one write). One thread per 4 elements (16-byte
// accesses).
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

__global__ void add_kernel(std::int64_t elems, const float* x, float* y) {
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 a = load4(x + i), b = load4(y + i);
            store4(y + i, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
        },
        [=](std::int64_t i) { y[i] += x[i]; });
}

class AddOp final : public Op {
 public:
    AddOp(const Context& context, const Shape& shape)
        : context_(context), image_elems_(shape.elems()) {}
    OpNeeds needs() const override { return {.in_place = true, .backward_reads_x = false}; }
    void forward(const Batch& batch, const OpIo& io) override {
        add(context_, image_elems_ * batch.n, io.x2.f32(), io.y.f32());
    }
    void backward_input(const Batch&, const OpIo&) override {}

 private:
    const Context context_;
    const std::int64_t image_elems_;
};

}  // namespace

void add(const Context& context, std::int64_t elems, const float* x, float* y) {
    launch_elementwise("add", add_kernel, context, elems, x, y);
}

std::unique_ptr<Op> make_op(const Context& context, const AddSpec& spec, const OpSizes&) {
    return std::make_unique<AddOp>(context, spec.in);
}

}  // namespace gyre::SIMT_NAMESPACE
