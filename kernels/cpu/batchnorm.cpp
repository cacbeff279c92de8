// Batch normalisation on the CPU (formulas: BatchNorm2dSpec).
//
// Memory-bound: forward reads x three times (sum, squares, result), backward x and dy twice.
// Sums are accumulated per lane in float over one plane of a block and in double from there on, so
// they depend neither on threads nor, beyond rounding, on ranks. With a single rank, all passes
// over one channel run consecutively while it is in the cache.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/bf16.hpp"
#include "kernels/cpu/ops.hpp"
#include "kernels/cpu/pooling.hpp"

namespace gyre::cpu {
namespace {

constexpr int kVecs = kLanes / kVec;  // registers per pixel

// Elem: of x, y, dy and dx.
template <typename Elem>
class BatchNorm2dOp final : public Op {
 public:
    BatchNorm2dOp(const Context& context, const BatchNorm2dSpec& spec, const OpSizes& sizes)
        : context_(context),
          spec_(spec),
          channels_(spec.in.channels),
          plane_floats_(spec.in.plane_elems() * kLanes),
          leaf_floats_(whole_lines(2 * channels_)),
          leaves_(spec.local ? 1 : sizes.leaves) {
        context.workspace.reserve(2 * leaves_ * leaf_floats_, 0);
    }

    OpNeeds needs() const override {
        return {.saved_bytes = 2 * static_cast<std::size_t>(channels_) * sizeof(float),
                .phases = spec_.phases()};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        if (!batch.training) {
            normalise(batch, io, [&](int c) {
                return Statistics{io.state[0].f32()[c], inverse_deviation(io.state[1].f32()[c])};
            });
            return;
        }
        for (int phase = 0; phase < BatchNorm2dSpec::kPhases; ++phase) {
            forward_phase(batch, io, phase);
        }
    }

    void forward_phase(const Batch& batch, const OpIo& io, int phase) override {
        if (spec_.count(batch) == 0) {
            return;
        }
        // saved: mean [channels], 1 / deviation [channels].
        float* const mean = static_cast<float*>(io.saved);
        float* const inverse = mean + channels_;
        float* const sums = leaf_sums(0);  // of x, then of squares, of all leaves
        float* const squares = leaf_sums(leaves_);
        const std::int64_t own = spec_.leaf(batch) * leaf_floats_;
        const auto count = static_cast<double>(spec_.count(batch));
        if (phase == 0) {
            for_channels([&](int c) {
                sums[own + c] = totals<1>(batch, c, [x = values<Elem>(io.x)](std::int64_t at) {
                    return std::array{load(x + at)};
                })[0];
            });
        } else if (phase == 1) {
            spec_.add_up(batch, sums, channels_, leaf_floats_);
            for_channels([&](int c) {
                mean[c] = static_cast<float>(double{sums[c]} / count);
                squares[own + c] =
                    totals<1>(batch, c, [x = values<Elem>(io.x), m = mean[c]](std::int64_t at) {
                        const Vec d = load(x + at) - m;
                        return std::array{d * d};
                    })[0];
            });
        } else {
            spec_.add_up(batch, squares, channels_, leaf_floats_);
            for (int c = 0; c < channels_; ++c) {
                inverse[c] = inverse_deviation(static_cast<float>(double{squares[c]} / count));
                spec_.move(io.state[0].f32()[c], mean[c]);
                spec_.move(io.state[1].f32()[c],
                           static_cast<float>(double{squares[c]} / std::max(count - 1.0, 1.0)));
            }
            normalise(batch, io, [&](int c) { return Statistics{mean[c], inverse[c]}; });
        }
    }

    // Sums over this leaf's images, which are the gradients of weight and bias.
    void backward_begin(const Batch& batch, const OpIo& io) override {
        float* const sums = leaf_sums(spec_.leaf(batch));  // of dy, then of dy * normalised x
        for_channels([&](int c) {
            const Statistics s = saved(io, c);
            const Elem *x = values<Elem>(io.x), *dy = values<Elem>(io.dy);
            const auto [of_dy, of_products] = totals<2>(batch, c, [=](std::int64_t at) {
                const Vec d = load(dy + at);
                return std::array{d, d * (load(x + at) - s.mean) * s.inverse};
            });
            sums[c] = of_dy;
            sums[channels_ + c] = of_products;
        });
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        const float* const sums = leaf_sums(spec_.leaf(batch));
        std::copy_n(sums + channels_, channels_, io.grads[0].f32());
        std::copy_n(sums, channels_, io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        float* const sums = leaf_sums(0);
        spec_.add_up(batch, sums, 2 * channels_, leaf_floats_);
        const auto count = static_cast<float>(spec_.count(batch));
        const Elem *x = values<Elem>(io.x), *dy = values<Elem>(io.dy);
        Elem* dx = values<Elem>(io.dx);
        for_channels([&](int c) {
            const Statistics s = saved(io, c);
            const float scale = io.params[0].f32()[c] * s.inverse;
            const float of_dy = sums[c] / count;
            const float of_products = sums[channels_ + c] / count * s.inverse;
            for_pixels(batch, c, [=](std::int64_t at, const IntVec& present) {
                const Vec d =
                    scale * (load(dy + at) - of_dy - (load(x + at) - s.mean) * of_products);
                store(dx + at, present != 0 ? d : Vec{});
            });
        });
    }

 private:
    struct Statistics {
        float mean, inverse;
    };
    Statistics saved(const OpIo& io, int c) const {
        const float* const mean = static_cast<const float*>(io.saved);
        return {mean[c], mean[channels_ + c]};
    }
    float inverse_deviation(float variance) const {
        return static_cast<float>(1.0 / std::sqrt(double{variance} + double{spec_.epsilon}));
    }
    // The sums of a leaf [2][channels]; of forward passes those of x begin at leaf 0, and those of
    // squares at leaf `leaves_`.
    float* leaf_sums(int leaf) const { return context_.workspace.shared() + leaf * leaf_floats_; }
    template <typename Body>
    void for_channels(Body&& body) const {
        context_.pool.parallel_for(channels_,
                                   [&](std::int64_t c, int) { body(static_cast<int>(c)); });
    }
    // Calls body(offset of a register of a pixel's lanes, mask of the lanes that are images).
    template <typename Body>
    void for_pixels(const Batch& batch, int c, Body&& body) const {
        for (int block = 0; block < block_count(batch.n); ++block) {
            std::int32_t present[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) {
                present[lane] = block * kLanes + lane < batch.n;
            }
            const std::int64_t begin = (std::int64_t{block} * channels_ + c) * plane_floats_;
            for (std::int64_t at = begin; at < begin + plane_floats_; at += kLanes) {
                for (int lane = 0; lane < kLanes; lane += kVec) {
                    body(at + lane, load_lanes<IntVec>(present + lane));
                }
            }
        }
    }
    // The sums of each of terms(offset) over the images and pixels of channel c. Those of several
    // blocks are added up at a time, to hide the latency of the additions.
    template <std::size_t kTerms, typename Terms>
    std::array<float, kTerms> totals(const Batch& batch, int c, const Terms& terms) const {
        constexpr int kBlocks = 4 / static_cast<int>(kTerms);
        std::array<double, kTerms> added{};
        const int blocks = block_count(batch.n);
        int block = 0;
        for (; block + kBlocks <= blocks; block += kBlocks) {
            add_blocks<kBlocks>(batch, c, block, terms, added);
        }
        for (; block < blocks; ++block) {
            add_blocks<1>(batch, c, block, terms, added);
        }
        std::array<float, kTerms> result;
        std::transform(added.begin(), added.end(), result.begin(),
                       [](double total) { return static_cast<float>(total); });
        return result;
    }
    template <int kBlocks, std::size_t kTerms, typename Terms>
    void add_blocks(const Batch& batch, int c, int first, const Terms& terms,
                    std::array<double, kTerms>& totals) const {
        const std::int64_t step = std::int64_t{channels_} * plane_floats_;
        const std::int64_t begin = first * step + c * plane_floats_;
        Vec of_blocks[kBlocks][kTerms][kVecs] = {};
        for (std::int64_t at = begin; at < begin + plane_floats_; at += kLanes) {
            for (int block = 0; block < kBlocks; ++block) {
                for (int v = 0; v < kVecs; ++v) {
                    const std::array<Vec, kTerms> added = terms(at + block * step + v * kVec);
                    for (std::size_t term = 0; term < kTerms; ++term) {
                        of_blocks[block][term][v] += added[term];
                    }
                }
            }
        }
        for (int block = 0; block < kBlocks; ++block) {
            const int images = std::min(kLanes, batch.n - (first + block) * kLanes);
            for (std::size_t term = 0; term < kTerms; ++term) {
                for (int lane = 0; lane < images; ++lane) {
                    totals[term] += double{of_blocks[block][term][lane / kVec][lane % kVec]};
                }
            }
        }
    }
    // Also computes lanes without an image; they hold finite values.
    template <typename StatisticsOf>
    void normalise(const Batch& batch, const OpIo& io, StatisticsOf&& statistics_of) const {
        const Elem* x = values<Elem>(io.x);
        Elem* y = values<Elem>(io.y);
        for_channels([&](int c) {
            const Statistics s = statistics_of(c);
            const float scale = s.inverse * io.params[0].f32()[c], shift = io.params[1].f32()[c];
            for_pixels(batch, c, [=](std::int64_t at, const IntVec& present) {
                const Vec v = (load(x + at) - s.mean) * scale + shift;
                store(y + at, present != 0 ? v : Vec{});
            });
        });
    }

    const Context context_;
    const BatchNorm2dSpec spec_;
    const int channels_;
    const std::int64_t plane_floats_;
    const std::int64_t leaf_floats_;  // of a leaf's sums
    const int leaves_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const BatchNorm2dSpec& spec,
                            const OpSizes& sizes) {
    return std::make_unique<BatchNorm2dOp<float>>(context, spec, sizes);
}
std::unique_ptr<Op> make_bf16_op(const Context& context, const BatchNorm2dSpec& spec,
                                 const OpSizes& sizes) {
    return std::make_unique<BatchNorm2dOp<Bfloat16>>(context, spec, sizes);
}

}  // namespace gyre::cpu
