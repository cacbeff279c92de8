// Average pooling on the CPU (formula: AvgPool2dSpec). Each plane of a block is processed
// separately; memory-bound.
#include <algorithm>

#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

class AvgPool2dOp final : public Op {
 public:
    AvgPool2dOp(const Context& context, const AvgPool2dSpec& spec)
        : context_(context), spec_(spec), out_(spec.out()) {}

    OpNeeds needs() const override { return {.backward_reads_x = false}; }

    void forward(const Batch& batch, const OpIo& io) override {
        for_planes(batch, [&](std::int64_t plane) {
            const float* x = io.x.f32() + plane * spec_.in.plane_elems() * kLanes;
            float* y = io.y.f32() + plane * out_.plane_elems() * kLanes;
            for_windows([&](std::ptrdiff_t corner, std::ptrdiff_t to) {
                Vec sum = {};
                for_window(corner, [&](std::ptrdiff_t at) { sum += load(x + at); });
                store(y + to, sum * spec_.scale());
            });
        });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        for_planes(batch, [&](std::int64_t plane) {
            const float* dy = io.dy.f32() + plane * out_.plane_elems() * kLanes;
            float* dx = io.dx.f32() + plane * spec_.in.plane_elems() * kLanes;
            std::fill_n(dx, spec_.in.plane_elems() * kLanes, 0.0f);
            for_windows([&](std::ptrdiff_t corner, std::ptrdiff_t from) {
                const Vec share = load(dy + from) * spec_.scale();
                for_window(corner,
                           [&](std::ptrdiff_t at) { store(dx + at, load(dx + at) + share); });
            });
        });
    }

 private:
    // Calls body for each plane of all blocks.
    template <typename Body>
    void for_planes(const Batch& batch, Body&& body) const {
        context_.pool.parallel_for(std::int64_t{block_count(batch.n)} * out_.channels,
                                   [&](std::int64_t plane, int) { body(plane); });
    }
    // body(offset of the window's corner, offset of its output), for each register of lanes
    template <typename Body>
    void for_windows(Body&& body) const {
        const std::ptrdiff_t line = std::ptrdiff_t{spec_.in.width} * kLanes;
        for (int row = 0; row < out_.height; ++row) {
            for (int col = 0; col < out_.width; ++col) {
                for (int lane = 0; lane < kLanes; lane += kVec) {
                    body(row * spec_.stride * line + std::ptrdiff_t{col} * spec_.stride * kLanes +
                             lane,
                         (std::ptrdiff_t{row} * out_.width + col) * kLanes + lane);
                }
            }
        }
    }
    template <typename Body>
    void for_window(std::ptrdiff_t corner, Body&& body) const {
        for (int row = 0; row < spec_.kernel_height; ++row) {
            for (int col = 0; col < spec_.kernel_width; ++col) {
                body(corner + (std::ptrdiff_t{row} * spec_.in.width + col) * kLanes);
            }
        }
    }

    const Context context_;
    const AvgPool2dSpec spec_;
    const Shape out_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const AvgPool2dSpec& spec, const OpSizes&) {
    return std::make_unique<AvgPool2dOp>(context, spec);
}

}  // namespace gyre::cpu
