// Dropout on the CPU, in place, the same forward and backward: x *= mask / (1 - probability). The
// mask is not stored; the backward pass draws the same random numbers again.
#include "kernels/cpu/ops.hpp"
#include "kernels/cpu/random_mask.hpp"

namespace gyre::cpu {
namespace {

class DropoutOp final : public Op {
 public:
    DropoutOp(const Context& context, const DropoutSpec& spec)
        : context_(context), spec_(spec), mask_(spec.probability, spec.stream) {}

    OpNeeds needs() const override { return {.in_place = true, .backward_reads_x = false}; }
    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.training) {
            apply(batch, io.y.f32());
        }
    }
    void backward_input(const Batch& batch, const OpIo& io) override { apply(batch, io.dx.f32()); }

 private:
    void apply(const Batch& batch, float* x) {
        if (spec_.probability <= 0.0f) {
            return;
        }
        const auto words =
            static_cast<std::uint32_t>(spec_.by_channel ? spec_.in.channels : spec_.in.elems());
        const std::int64_t word_elems = spec_.by_channel ? spec_.in.plane_elems() : 1;
        context_.pool.parallel_for(block_count(batch.n), [&](std::int64_t block, int) {
            float* to = x + block * spec_.in.elems() * kLanes;
            const RandomMask::Block mask(mask_, batch, static_cast<int>(block));
            for (std::uint32_t group = 0; group * 4 < words; ++group) {
                float factor[4][kLanes];
                mask.draw(group, factor);
                for (std::uint32_t i = 0; i < std::min(4u, words - group * 4); ++i) {
                    float* word = to + (group * 4 + i) * word_elems * kLanes;
                    for (std::int64_t e = 0; e < word_elems; ++e) {
                        for (int lane = 0; lane < kLanes; ++lane) {
                            word[e * kLanes + lane] *= factor[i][lane];
                        }
                    }
                }
            }
        });
    }

    const Context context_;
    const DropoutSpec spec_;
    const RandomMask mask_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const DropoutSpec& spec, const OpSizes&) {
    return std::make_unique<DropoutOp>(context, spec);
}

}  // namespace gyre::cpu
