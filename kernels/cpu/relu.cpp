// ReLU on the CPU, in place: y = max(x, 0), where NaN stays NaN; dx = dy where y > 0, else 0.
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

class ReluOp final : public Op {
 public:
    ReluOp(const Context& context, const ReluSpec& spec)
        : context_(context), block_elems_(spec.in.elems() * kLanes) {}

    OpNeeds needs() const override {
        return {.in_place = true, .backward_reads_x = false, .backward_reads_y = true};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        context_.for_ranges(block_count(batch.n) * block_elems_,
                            [y = io.y.f32()](std::int64_t begin, std::int64_t end) {
                                for (std::int64_t i = begin; i < end; ++i) {
                                    y[i] = y[i] <= 0.0f ? 0.0f : y[i];
                                }
                            });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        context_.for_ranges(
            block_count(batch.n) * block_elems_,
            [y = io.y.f32(), dx = io.dx.f32()](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                    dx[i] = y[i] <= 0.0f ? 0.0f : dx[i];
                }
            });
    }

 private:
    const Context context_;
    const std::int64_t block_elems_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const ReluSpec& spec, const OpSizes&) {
    return std::make_unique<ReluOp>(context, spec);
}

}  // namespace gyre::cpu
