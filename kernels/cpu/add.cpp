// y += x on the CPU, also used in place for the sum of a residual connection, y = x + x2. The
// gradient of both summands is dy itself, which the net passes on.
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

class AddOp final : public Op {
 public:
    AddOp(const Context& context, const AddSpec& spec)
        : context_(context), block_elems_(spec.in.elems() * kLanes) {}

    OpNeeds needs() const override { return {.in_place = true, .backward_reads_x = false}; }

    void forward(const Batch& batch, const OpIo& io) override {
        add(context_, block_count(batch.n) * block_elems_, io.x2.f32(), io.y.f32());
    }

    void backward_input(const Batch&, const OpIo&) override {}

 private:
    const Context context_;
    const std::int64_t block_elems_;
};

}  // namespace

void add(const Context& context, std::int64_t elems, const float* x, float* y) {
    context.for_ranges(elems, [=](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            y[i] += x[i];
        }
    });
}

std::unique_ptr<Op> make_op(const Context& context, const AddSpec& spec, const OpSizes&) {
    return std::make_unique<AddOp>(context, spec);
}

}  // namespace gyre::cpu
