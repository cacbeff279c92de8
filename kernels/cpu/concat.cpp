// Channels of two values one after the other on the CPU (formula: ConcatSpec), copied plane by
// plane.
#include <algorithm>

#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

class ConcatOp final : public Op {
 public:
    ConcatOp(const Context& context, const ConcatSpec& spec)
        : context_(context),
          first_(spec.in2.channels),
          channels_(spec.out().channels),
          plane_floats_(spec.in.plane_elems() * kLanes) {}

    OpNeeds needs() const override { return {.backward_reads_x = false, .writes_dx2 = true}; }

    void forward(const Batch& batch, const OpIo& io) override {
        for_planes(
            batch, io.x2.f32(), io.x.f32(), io.y.f32(),
            [this](const float* part, float* whole) { std::copy_n(part, plane_floats_, whole); });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        for_planes(
            batch, io.dx2.f32(), io.dx.f32(), io.dy.f32(),
            [this](float* part, const float* whole) { std::copy_n(whole, plane_floats_, part); });
    }

 private:
    // Calls body(plane of a part, plane of the whole) for each, except those of a part that is
    // null.
    template <typename Part, typename Body>
    void for_planes(const Batch& batch, Part* first, Part* second, float* whole,
                    Body&& body) const {
        context_.pool.parallel_for(
            std::int64_t{block_count(batch.n)} * channels_, [&](std::int64_t plane, int) {
                const std::int64_t block = plane / channels_, channel = plane % channels_;
                Part* const part = channel < first_ ? first : second;
                const std::int64_t of_part = channel < first_
                                                 ? block * first_ + channel
                                                 : block * (channels_ - first_) + channel - first_;
                if (part != nullptr) {
                    body(part + of_part * plane_floats_, whole + plane * plane_floats_);
                }
            });
    }

    const Context context_;
    const std::int64_t first_, channels_, plane_floats_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const ConcatSpec& spec, const OpSizes&) {
    return std::make_unique<ConcatOp>(context, spec);
}

}  // namespace gyre::cpu
