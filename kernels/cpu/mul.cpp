// Products of channels with their gates on the CPU (formula: MulSpec), plane by plane:
//   dx[c] = sum over the plane of dy * x2;  dx2 = dy * x[c]
// Memory-bound.
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

class MulOp final : public Op {
 public:
    MulOp(const Context& context, const MulSpec& spec) : context_(context), shape_(spec.in2) {}

    OpNeeds needs() const override { return {.backward_reads_x2 = true, .writes_dx2 = true}; }

    void forward(const Batch& batch, const OpIo& io) override {
        for_planes(batch, [&](std::ptrdiff_t gate, std::ptrdiff_t plane) {
            scale(io.x.f32() + gate, io.x2.f32() + plane, io.y.f32() + plane);
        });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        for_planes(batch, [&](std::ptrdiff_t gate, std::ptrdiff_t plane) {
            if (io.dx) {
                add_up(io.dy.f32() + plane, io.x2.f32() + plane, io.dx.f32() + gate);
            }
            if (io.dx2) {
                scale(io.x.f32() + gate, io.dy.f32() + plane, io.dx2.f32() + plane);
            }
        });
    }

 private:
    // Calls body(offset of the gate, offset of the plane) for each channel of all blocks.
    template <typename Body>
    void for_planes(const Batch& batch, Body&& body) const {
        context_.pool.parallel_for(std::int64_t{block_count(batch.n)} * shape_.channels,
                                   [&](std::int64_t plane, int) {
                                       body(plane * kLanes, plane * shape_.plane_elems() * kLanes);
                                   });
    }
    void scale(const float* gate, const float* from, float* to) const {
        for (int lane = 0; lane < kLanes; lane += kVec) {
            const Vec factor = load(gate + lane);
            for (std::int64_t i = lane; i < shape_.plane_elems() * kLanes; i += kLanes) {
                store(to + i, factor * load(from + i));
            }
        }
    }
    // A row's products are added up first, so that errors grow with rows instead of pixels.
    void add_up(const float* dy, const float* x, float* to) const {
        for (int lane = 0; lane < kLanes; lane += kVec) {
            Vec sum = {};
            std::ptrdiff_t at = lane;
            for (int row = 0; row < shape_.height; ++row) {
                Vec of_row = {};
                for (int col = 0; col < shape_.width; ++col, at += kLanes) {
                    of_row += load(dy + at) * load(x + at);
                }
                sum += of_row;
            }
            store(to + lane, sum);
        }
    }

    const Context context_;
    const Shape shape_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const MulSpec& spec, const OpSizes&) {
    return std::make_unique<MulOp>(context, spec);
}

}  // namespace gyre::cpu
