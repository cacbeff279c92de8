// y += x on the CPU, also used in place for the sum of a residual connection, y = x + x2. The
// gradient of both summands is dy itself, which the net passes on.
#include "kernels/cpu/bf16.hpp"
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

// Elem: of x, x2 and y.
template <typename Elem>
class AddOp final : public Op {
 public:
    AddOp(const Context& context, const AddSpec& spec)
        : context_(context), block_elems_(spec.in.elems() * kLanes) {}

    OpNeeds needs() const override { return {.in_place = true, .backward_reads_x = false}; }

    void forward(const Batch& batch, const OpIo& io) override {
        context_.for_ranges(block_count(batch.n) * block_elems_,
                            [x2 = values<Elem>(io.x2), y = values<Elem>(io.y)](std::int64_t begin,
                                                                               std::int64_t end) {
                                for (std::int64_t i = begin; i < end; i += kVec) {
                                    store(y + i, load(y + i) + load(x2 + i));
                                }
                            });
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
    return std::make_unique<AddOp<float>>(context, spec);
}
std::unique_ptr<Op> make_bf16_op(const Context& context, const AddSpec& spec, const OpSizes&) {
    return std::make_unique<AddOp<Bfloat16>>(context, spec);
}

}  // namespace gyre::cpu
