// Group normalisation on the CPU (formulas: GroupNormSpec): one block of images and one group at a
// time, all passes over which run while it is in the cache; each lane has its own statistics.
//
// Memory-bound: forward reads x three times (sum, squares, result), backward reads x and dy twice
// for dx and once for the parameters. Sums are accumulated per lane in float over one plane, and in
// double from there on, as in batchnorm.cpp.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/ops.hpp"
#include "kernels/cpu/simd.hpp"

namespace gyre::cpu {
namespace {

constexpr int kVecs = kLanes / kVec;  // registers per pixel

class GroupNormOp final : public Op {
 public:
    GroupNormOp(const Context& context, const GroupNormSpec& spec, int train_images)
        : context_(context),
          spec_(spec),
          saved_bytes_(static_cast<std::size_t>(block_count(train_images) * spec.groups) *
                       sizeof(Statistics)),
          plane_floats_(spec.in.plane_elems() * kLanes),
          count_(static_cast<double>(spec.group_elems())) {}

    OpNeeds needs() const override { return {.saved_bytes = saved_bytes_}; }

    void forward(const Batch& batch, const OpIo& io) override {
        auto* const saved = static_cast<Statistics*>(io.saved);
        for_groups(batch, [&](int block, int group) {
            const float* x = io.x.f32();
            Statistics s;
            sum(block, group, s.mean, [=](std::int64_t at, int) { return load(x + at); });
            divide(s.mean, count_);
            sum(block, group, s.inverse, [=, &s](std::int64_t at, int v) {
                const Vec d = load(x + at) - load(s.mean + v);
                return d * d;
            });
            for (float& inverse : s.inverse) {
                inverse = static_cast<float>(
                    1.0 / std::sqrt(double{inverse} / count_ + double{spec_.epsilon}));
            }
            for_channels(group, [&](int c) {
                const float weight = io.params[0].f32()[c], bias = io.params[1].f32()[c];
                for_plane(block, c, [&](std::int64_t at, int v) {
                    const Vec centred = load(x + at) - load(s.mean + v);
                    store(io.y.f32() + at, centred * (load(s.inverse + v) * weight) + bias);
                });
            });
            clear_absent(batch, block, group, io.y.f32());
            if (batch.training) {
                saved[block * spec_.groups + group] = s;
            }
        });
    }

    void backward_params(const Batch& batch, const OpIo& io) override {
        context_.pool.parallel_for(spec_.in.channels, [&](std::int64_t index, int) {
            const int c = static_cast<int>(index);
            double of_dy = 0.0, of_products = 0.0;
            for (int block = 0; block < block_count(batch.n); ++block) {
                const Statistics& s = statistics(io, block, c / spec_.group_channels());
                Vec dy_sums[kVecs] = {}, product_sums[kVecs] = {};
                for_plane(block, c, [&](std::int64_t at, int v) {
                    const Vec dy = load(io.dy.f32() + at);
                    dy_sums[v / kVec] += dy;
                    product_sums[v / kVec] += dy * normalised(io, s, at, v);
                });
                for (int lane = 0; lane < lanes(batch, block); ++lane) {
                    of_dy += double{dy_sums[lane / kVec][lane % kVec]};
                    of_products += double{product_sums[lane / kVec][lane % kVec]};
                }
            }
            io.grads[0].f32()[c] = static_cast<float>(of_products);
            io.grads[1].f32()[c] = static_cast<float>(of_dy);
        });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        for_groups(batch, [&](int block, int group) {
            const Statistics& s = statistics(io, block, group);
            // The means of dy * weight, and of their products with normalised x.
            float of_dy[kLanes], of_products[kLanes];
            const float *dy = io.dy.f32(), *weight = io.params[0].f32();
            const auto channel = [&](std::int64_t at) {
                return at / plane_floats_ % spec_.in.channels;
            };
            sum(block, group, of_dy,
                [&](std::int64_t at, int) { return load(dy + at) * weight[channel(at)]; });
            sum(block, group, of_products, [&](std::int64_t at, int v) {
                return load(dy + at) * weight[channel(at)] * normalised(io, s, at, v);
            });
            divide(of_dy, count_);
            divide(of_products, count_);
            for_channels(group, [&](int c) {
                for_plane(block, c, [&](std::int64_t at, int v) {
                    const Vec d = load(dy + at) * weight[c] - load(of_dy + v) -
                                  normalised(io, s, at, v) * load(of_products + v);
                    store(io.dx.f32() + at, d * load(s.inverse + v));
                });
            });
            clear_absent(batch, block, group, io.dx.f32());
        });
    }

 private:
    struct Statistics {
        float mean[kLanes], inverse[kLanes];
    };
    const Statistics& statistics(const OpIo& io, int block, int group) const {
        return static_cast<const Statistics*>(io.saved)[block * spec_.groups + group];
    }
    static Vec normalised(const OpIo& io, const Statistics& s, std::int64_t at, int v) {
        return (load(io.x.f32() + at) - load(s.mean + v)) * load(s.inverse + v);
    }
    static int lanes(const Batch& batch, int block) {
        return std::min(kLanes, batch.n - block * kLanes);
    }
    static void divide(float (&values)[kLanes], double by) {
        for (float& value : values) {
            value = static_cast<float>(double{value} / by);
        }
    }
    template <typename Body>
    void for_groups(const Batch& batch, Body&& body) const {
        context_.pool.parallel_for(std::int64_t{block_count(batch.n)} * spec_.groups,
                                   [&](std::int64_t index, int) {
                                       body(static_cast<int>(index / spec_.groups),
                                            static_cast<int>(index % spec_.groups));
                                   });
    }
    template <typename Body>
    void for_channels(int group, Body&& body) const {
        const int each = spec_.group_channels();
        for (int c = group * each; c < (group + 1) * each; ++c) {
            body(c);
        }
    }
    // Calls body(offset of a register of a pixel's lanes, its first lane).
    template <typename Body>
    void for_plane(int block, int c, Body&& body) const {
        const std::int64_t begin = (std::int64_t{block} * spec_.in.channels + c) * plane_floats_;
        for (std::int64_t at = begin; at < begin + plane_floats_; at += kLanes) {
            for (int v = 0; v < kLanes; v += kVec) {
                body(at + v, v);
            }
        }
    }
    // The sum of term(offset, lane) over the group's pixels, for each lane.
    template <typename Term>
    void sum(int block, int group, float (&result)[kLanes], Term&& term) const {
        double total[kLanes] = {};
        for_channels(group, [&](int c) {
            Vec of_plane[kVecs] = {};
            for_plane(block, c, [&](std::int64_t at, int v) { of_plane[v / kVec] += term(at, v); });
            for (int lane = 0; lane < kLanes; ++lane) {
                total[lane] += double{of_plane[lane / kVec][lane % kVec]};
            }
        });
        std::transform(total, total + kLanes, result,
                       [](double value) { return static_cast<float>(value); });
    }
    // Lanes without an image hold zeros, whatever was computed for them.
    void clear_absent(const Batch& batch, int block, int group, float* values) const {
        const int present = lanes(batch, block);
        if (present < kLanes) {
            for_channels(group, [&](int c) {
                float* const plane =
                    values + (std::int64_t{block} * spec_.in.channels + c) * plane_floats_;
                for (std::int64_t at = 0; at < plane_floats_; at += kLanes) {
                    std::fill(plane + at + present, plane + at + kLanes, 0.0f);
                }
            });
        }
    }

    const Context context_;
    const GroupNormSpec spec_;
    const std::size_t saved_bytes_;
    const std::int64_t plane_floats_;
    const double count_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const GroupNormSpec& spec,
                            const OpSizes& sizes) {
    return std::make_unique<GroupNormOp>(context, spec, sizes.train_images);
}

}  // namespace gyre::cpu
