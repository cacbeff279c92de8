// Some channels of a value, in an order (formula: ChannelsSpec), on the CPU: copied plane by plane.
#include <algorithm>

#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

class ChannelsOp final : public Op {
 public:
    ChannelsOp(const Context& context, const ChannelsSpec& spec)
        : context_(context), spec_(spec), plane_floats_(spec.in.plane_elems() * kLanes) {}

    OpNeeds needs() const override { return {.backward_reads_x = false}; }

    void forward(const Batch& batch, const OpIo& io) override {
        for_planes(batch, spec_.count, [&](std::int64_t block, int channel) {
            std::copy_n(plane(io.x.f32(), block, spec_.in.channels, spec_.source(channel)),
                        plane_floats_, plane(io.y.f32(), block, spec_.count, channel));
        });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        for_planes(batch, spec_.in.channels, [&](std::int64_t block, int channel) {
            float* const dx = plane(io.dx.f32(), block, spec_.in.channels, channel);
            const int reader = spec_.reader(channel);
            if (reader < 0) {
                std::fill_n(dx, plane_floats_, 0.0f);
            } else {
                std::copy_n(plane(io.dy.f32(), block, spec_.count, reader), plane_floats_, dx);
            }
        });
    }

 private:
    template <typename T>
    T* plane(T* values, std::int64_t block, int channels, int channel) const {
        return values + (block * channels + channel) * plane_floats_;
    }
    // Calls body(block of images, channel) for each.
    template <typename Body>
    void for_planes(const Batch& batch, int channels, Body&& body) const {
        context_.pool.parallel_for(std::int64_t{block_count(batch.n)} * channels,
                                   [&](std::int64_t index, int) {
                                       body(index / channels, static_cast<int>(index % channels));
                                   });
    }

    const Context context_;
    const ChannelsSpec spec_;
    const std::int64_t plane_floats_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const ChannelsSpec& spec, const OpSizes&) {
    return std::make_unique<ChannelsOp>(context, spec);
}

}  // namespace gyre::cpu
