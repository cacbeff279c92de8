// ReLU on the CPU, in place: y = max(x, 0), where NaN stays NaN; dx = dy where y > 0, else 0.
#include "kernels/cpu/bf16.hpp"
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

// Elem: of x, y, dy and dx.
template <typename Elem>
class ReluOp final : public Op {
 public:
    ReluOp(const Context& context, const ReluSpec& spec)
        : context_(context), block_elems_(spec.in.elems() * kLanes) {}

    OpNeeds needs() const override {
        return {.in_place = true, .backward_reads_x = false, .backward_reads_y = true};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        context_.for_ranges(block_count(batch.n) * block_elems_,
                            [y = values<Elem>(io.y)](std::int64_t begin, std::int64_t end) {
                                for (std::int64_t i = begin; i < end; i += kVec) {
                                    store(y + i, clip_below_zero(load(y + i)));
                                }
                            });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        context_.for_ranges(block_count(batch.n) * block_elems_,
                            [y = values<Elem>(io.y), dx = values<Elem>(io.dx)](std::int64_t begin,
                                                                               std::int64_t end) {
                                for (std::int64_t i = begin; i < end; i += kVec) {
                                    store(dx + i, pass_above_zero(load(y + i), load(dx + i)));
                                }
                            });
    }

 private:
    const Context context_;
    const std::int64_t block_elems_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const ReluSpec& spec, const OpSizes&) {
    return std::make_unique<ReluOp<float>>(context, spec);
}
std::unique_ptr<Op> make_bf16_op(const Context& context, const ReluSpec& spec, const OpSizes&) {
    return std::make_unique<ReluOp<Bfloat16>>(context, spec);
}

}  // namespace gyre::cpu
