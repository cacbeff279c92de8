// Max-pooling on the CPU. A training pass saves, for each output, the position of the first maximum
// within its window (one byte); the backward pass routes the gradient there.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cpu/bf16.hpp"
#include "kernels/cpu/ops.hpp"
#include "kernels/cpu/padding.hpp"
#include "kernels/cpu/pooling.hpp"

namespace gyre::cpu {
namespace {

// Elem: of x, y, dy and dx. Only float's windows may overlap or reach beyond the input.
template <typename Elem>
class MaxPool2dOp final : public Op {
 public:
    MaxPool2dOp(const Context& context, const MaxPool2dShape& shape, int train_images)
        : context_(context),
          shape_(shape),
          out_(shape.out()),
          padded_{std::max(shape.in.height + 2 * shape.padding, shape.reach(out_.height)),
                  std::max(shape.in.width + 2 * shape.padding, shape.reach(out_.width)),
                  shape.padding},
          pads_(kMayPad && shape.clips()),
          windows_{shape.kernel, shape.stride, padded_.line_floats(), out_.height, out_.width},
          covers_(windows_cover(shape)),
          saved_bytes_(static_cast<std::size_t>(out_.elems() * block_count(train_images) * kLanes)),
          pool_(pool_function<false, false, Elem>(shape.kernel, false)),
          pool_and_save_(pool_function<false, true, Elem>(shape.kernel, false)),
          unpool_(unpool_function<Elem>(shape.kernel)) {
        if (pads_) {
            context.workspace.reserve(0, padded_.plane_floats());
        }
    }

    OpNeeds needs() const override {
        return {.saved_bytes = saved_bytes_, .backward_reads_x = false};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        for_planes(batch, [&, argmax = batch.training ? saved(io) : nullptr](std::int64_t plane,
                                                                             int worker) {
            const std::int64_t out = plane * out_plane();
            const bool save = argmax != nullptr;
            const Elem* x = values<Elem>(io.x) + plane * in_plane();
            if constexpr (kMayPad) {
                if (pads_) {
                    x = padded_plane(x, context_.workspace.worker(worker));
                }
            }
            (save ? pool_and_save_ : pool_)(windows_, x, nullptr, values<Elem>(io.y) + out,
                                            save ? argmax + out : nullptr);
        });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        for_planes(batch, [&](std::int64_t plane, int worker) {
            Elem* const dx = values<Elem>(io.dx) + plane * in_plane();
            Elem* target = dx;
            if constexpr (kMayPad) {
                target = pads_ ? context_.workspace.worker(worker) : dx;
            }
            if (!covers_) {
                std::fill_n(target, pads_ ? padded_.plane_floats() : in_plane(), Elem{});
            }
            const std::int64_t out = plane * out_plane();
            unpool_(windows_, values<Elem>(io.dy) + out, nullptr, saved(io) + out, target);
            for (int row = 0; pads_ && row < shape_.in.height; ++row) {
                std::copy_n(target + padded_row(row), line(), dx + row * line());
            }
        });
    }

 private:
    static constexpr bool kMayPad = std::is_same_v<Elem, float>;

    const float* padded_plane(const float* x, float* padded) const {
        std::fill_n(padded, padded_.plane_floats(), -std::numeric_limits<float>::infinity());
        for (int row = 0; row < shape_.in.height; ++row) {
            std::copy_n(x + row * line(), line(), padded + padded_row(row));
        }
        return padded;
    }
    static std::uint8_t* saved(const OpIo& io) { return static_cast<std::uint8_t*>(io.saved); }
    std::int64_t in_plane() const { return shape_.in.plane_elems() * kLanes; }
    std::int64_t out_plane() const { return out_.plane_elems() * kLanes; }
    std::int64_t line() const { return std::int64_t{shape_.in.width} * kLanes; }
    // Where a row begins in a padded plane.
    std::int64_t padded_row(int row) const {
        return (row + padded_.before) * padded_.line_floats() +
               std::int64_t{padded_.before} * kLanes;
    }
    // Calls body(plane, worker) for each plane of all blocks.
    template <typename Body>
    void for_planes(const Batch& batch, Body&& body) {
        context_.pool.parallel_for(std::int64_t{block_count(batch.n)} * out_.channels, body);
    }

    const Context context_;
    const MaxPool2dShape shape_;
    const Shape out_;
    const PaddedPlane padded_;
    const bool pads_;
    const Windows windows_;
    const bool covers_;
    const std::size_t saved_bytes_;
    const PoolFunction<Elem> pool_, pool_and_save_;
    const UnpoolFunction<Elem> unpool_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const MaxPool2dSpec& spec,
                            const OpSizes& sizes) {
    return std::make_unique<MaxPool2dOp<float>>(context, spec.shape, sizes.train_images);
}
std::unique_ptr<Op> make_bf16_op(const Context& context, const MaxPool2dSpec& spec,
                                 const OpSizes& sizes) {
    if (spec.shape.clips() || spec.shape.stride < spec.shape.kernel) {
        return nullptr;
    }
    return std::make_unique<MaxPool2dOp<Bfloat16>>(context, spec.shape, sizes.train_images);
}

}  // namespace gyre::cpu
