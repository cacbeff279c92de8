// Max-pooling on the CPU. A training pass saves, for each output, the position of the first maximum
// within its window (one byte); the backward pass routes the gradient there.
#include <algorithm>
#include <limits>

#include "kernels/cpu/ops.hpp"
#include "kernels/cpu/padding.hpp"
#include "kernels/cpu/pooling.hpp"

namespace gyre::cpu {
namespace {

class MaxPool2dOp final : public Op {
 public:
    MaxPool2dOp(const Context& context, const MaxPool2dShape& shape, int train_images)
        : context_(context),
          shape_(shape),
          out_(shape.out()),
          padded_{std::max(shape.in.height + 2 * shape.padding, shape.reach(out_.height)),
                  std::max(shape.in.width + 2 * shape.padding, shape.reach(out_.width)),
                  shape.padding},
          pads_(shape.clips()),
          windows_{shape.kernel, shape.stride, padded_.line_floats(), out_.height, out_.width},
          covers_(windows_cover(shape)),
          saved_bytes_(static_cast<std::size_t>(out_.elems() * block_count(train_images) * kLanes)),
          pool_(pool_function<false, false>(shape.kernel, false)),
          pool_and_save_(pool_function<false, true>(shape.kernel, false)),
          unpool_(unpool_function(shape.kernel)) {
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
            const float* x = io.x.f32() + plane * in_plane();
            if (pads_) {
                float* const padded = context_.workspace.worker(worker);
                std::fill_n(padded, padded_.plane_floats(),
                            -std::numeric_limits<float>::infinity());
                for (int row = 0; row < shape_.in.height; ++row) {
                    std::copy_n(x + row * line(), line(), padded + padded_row(row));
                }
                x = padded;
            }
            (save ? pool_and_save_ : pool_)(windows_, x, nullptr, io.y.f32() + out,
                                            save ? argmax + out : nullptr);
        });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        for_planes(batch, [&](std::int64_t plane, int worker) {
            float* const dx = io.dx.f32() + plane * in_plane();
            float* const target = pads_ ? context_.workspace.worker(worker) : dx;
            if (!covers_) {
                std::fill_n(target, pads_ ? padded_.plane_floats() : in_plane(), 0.0f);
            }
            const std::int64_t out = plane * out_plane();
            unpool_(windows_, io.dy.f32() + out, nullptr, saved(io) + out, target);
            for (int row = 0; pads_ && row < shape_.in.height; ++row) {
                std::copy_n(target + padded_row(row), line(), dx + row * line());
            }
        });
    }

 private:
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
    const PoolFunction pool_, pool_and_save_;
    const UnpoolFunction unpool_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const MaxPool2dSpec& spec,
                            const OpSizes& sizes) {
    return std::make_unique<MaxPool2dOp>(context, spec.shape, sizes.train_images);
}

}  // namespace gyre::cpu
