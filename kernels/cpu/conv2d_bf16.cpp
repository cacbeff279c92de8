// 2-D convolution of bfloat16 values on the CPU (formulas: conv2d.cpp), by products of tiles
// (bf16_tiles.hpp) that are summed in float32. A tile of sums has 16 channels and 16 images, or in
// the weights' gradient 16 channels of each side; the depths of a step are 32 channels at one
// position of the window, or the 16 images of two pixels.
//
// Operands are copied so that each tile of them is contiguous: a pixel's 16 images of 32 channels,
// channels in pairs; the weights of 16 x 32 channels. The data's gradient is, for each remainder
// that positions leave when they are divided by the stride, a correlation with the window's
// positions of that remainder.
#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cpu/bf16_tiles.hpp"
#include "kernels/cpu/conv2d_bf16_weights.hpp"
#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

static_assert(kTileExtent == kLanes);

// A tensor with its channels' values side by side, [row][column][steps of channels][pair of
// channels][image][2], and zeros around.
struct Packed {
    Shape shape;
    int rows = 0, columns = 0, before = 0;
    int steps() const { return (shape.channels + kDepth - 1) / kDepth; }
    std::ptrdiff_t pixel_elems() const { return steps() * kOperandElems; }
    std::ptrdiff_t row_elems() const { return columns * pixel_elems(); }
    std::int64_t elems() const { return rows * row_elems(); }
};

// Copies a block [channel][row][column][image].
void pack(ThreadPool& pool, const Bfloat16* from, const Packed& to, Bfloat16* packed) {
    const Shape& shape = to.shape;
    const std::int64_t plane = shape.plane_elems() * kLanes;
    pool.parallel_for(to.rows, [&](std::int64_t row, int) {
        Bfloat16* const line = packed + row * to.row_elems();
        const std::int64_t y = row - to.before;
        if (y < 0 || y >= shape.height) {
            std::fill_n(line, to.row_elems(), Bfloat16{0});
            return;
        }
        const std::ptrdiff_t left = to.before * to.pixel_elems();
        const std::ptrdiff_t right = left + shape.width * to.pixel_elems();
        std::fill_n(line, left, Bfloat16{0});
        std::fill_n(line + right, to.row_elems() - right, Bfloat16{0});
        for (int pair = 0; pair < to.steps() * kMostPairs; ++pair) {
            const Bfloat16* const even = from + 2 * pair * plane + y * shape.width * kLanes;
            const int present = std::clamp(shape.channels - 2 * pair, 0, 2);
            Bfloat16* out = line + left + pair * 2 * kLanes;
            for (int x = 0; x < shape.width; ++x, out += to.pixel_elems()) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    const std::int64_t at = x * kLanes + lane;
                    out[2 * lane] = present > 0 ? even[at] : Bfloat16{0};
                    out[2 * lane + 1] = present > 1 ? even[plane + at] : Bfloat16{0};
                }
            }
        }
    });
}

// Output positions whose sums have the same positions of the window.
struct Positions {
    int rows = 0, columns = 0;
    std::ptrdiff_t out = 0, out_row = 0, out_column = 0;  // in pixels of the output
    std::ptrdiff_t in_row = 0, in_column = 0;             // in values of the packed input
    std::vector<std::ptrdiff_t> weights = {}, in = {};    // of each position of the window
};

// One direction of the convolution's data: its packed input, and what its outputs sum up.
struct Correlation {
    Packed in;
    Shape out;
    int taps = 1;
    std::vector<Positions> positions = {};

    std::int64_t weight_elems() const {
        return std::int64_t{tiles_of(out.channels)} * taps * in.steps() * kOperandElems;
    }
    std::int64_t shared_floats() const { return floats_of(weight_elems()) + floats_of(in.elems()); }
    // Place of the weight from one channel of the input to one of the output.
    std::ptrdiff_t weight(int to, int tap, int from) const {
        const std::ptrdiff_t tile =
            (std::ptrdiff_t{to / kTileExtent} * taps + tap) * in.steps() + from / kDepth;
        return tile * kOperandElems + to % kTileExtent * kDepth + from % kDepth;
    }
};

Correlation forward_correlation(const Conv2dShape& shape) {
    const int kernel = shape.kernel;
    Correlation c{.in = {.shape = shape.in,
                         .rows = shape.in.height + 2 * shape.padding,
                         .columns = shape.in.width + 2 * shape.padding,
                         .before = shape.padding},
                  .out = shape.out(),
                  .taps = kernel * kernel};
    Positions all{.rows = c.out.height,
                  .columns = c.out.width,
                  .out_row = c.out.width,
                  .out_column = 1,
                  .in_row = shape.stride * c.in.row_elems(),
                  .in_column = shape.stride * c.in.pixel_elems()};
    for (int tap = 0; tap < c.taps; ++tap) {
        all.weights.push_back(c.weight(0, tap, 0));
        all.in.push_back(tap / kernel * c.in.row_elems() + tap % kernel * c.in.pixel_elems());
    }
    c.positions.push_back(std::move(all));
    return c;
}

Correlation backward_correlation(const Conv2dShape& shape) {
    const Shape dy = shape.out();
    const int kernel = shape.kernel, stride = shape.stride, padding = shape.padding;
    const int before = std::max(0, (kernel - 1 - padding) / stride);
    const auto extent = [&](int in, int out) {
        return before + std::max(out, (in - 1 + padding) / stride + 1);
    };
    Correlation c{.in = {.shape = dy,
                         .rows = extent(shape.in.height, dy.height),
                         .columns = extent(shape.in.width, dy.width),
                         .before = before},
                  .out = shape.in,
                  .taps = kernel * kernel};
    // The first input whose distance from the padded edge leaves the remainder.
    const auto first = [&](int remainder) {
        return ((remainder - padding) % stride + stride) % stride;
    };
    const auto count = [&](int from, int extent_of) {
        return from < extent_of ? (extent_of - 1 - from) / stride + 1 : 0;
    };
    for (int i = 0; i < stride; ++i) {
        for (int j = 0; j < stride; ++j) {
            const int row = first(i), column = first(j);
            Positions some{.rows = count(row, c.out.height),
                           .columns = count(column, c.out.width),
                           .out = std::ptrdiff_t{row} * c.out.width + column,
                           .out_row = std::ptrdiff_t{stride} * c.out.width,
                           .out_column = stride,
                           .in_row = c.in.row_elems(),
                           .in_column = c.in.pixel_elems()};
            for (int kh = i; kh < kernel; kh += stride) {
                for (int kw = j; kw < kernel; kw += stride) {
                    some.weights.push_back(c.weight(0, kh * kernel + kw, 0));
                    some.in.push_back(((row + padding - kh) / stride + before) * c.in.row_elems() +
                                      ((column + padding - kw) / stride + before) *
                                          c.in.pixel_elems());
                }
            }
            c.positions.push_back(std::move(some));
        }
    }
    return c;
}

// y [channels][cols pixels][image] = bias + sums, where channels and pixels are so many values
// apart.
void write_sums(const float (&sums)[2][2][kTileSums], int channels, int cols, const float* bias,
                bool relu, Bfloat16* y, std::ptrdiff_t plane, std::ptrdiff_t pixel) {
    for (int i = 0; i < channels; ++i) {
        const Vec start = broadcast(bias != nullptr ? bias[i] : 0.0f);
        for (int n = 0; n < cols; ++n) {
            const float* const from = sums[i / kTileExtent][n] + i % kTileExtent * kTileExtent;
            for (int lane = 0; lane < kLanes; lane += kVec) {
                const Vec v = load(from + lane) + start;
                store(y + i * plane + n * pixel + lane, relu ? clip_below_zero(v) : v);
            }
        }
    }
}

// y [channel][row][column][image] = bias + the sums of one block.
void correlate(const Context& context, const Correlation& c, const Bfloat16* packed,
               const Bfloat16* weights, const float* bias, bool relu, Bfloat16* y) {
    const int tiles = tiles_of(c.out.channels);
    const std::ptrdiff_t tile_elems = c.weight(kTileExtent, 0, 0);
    const std::ptrdiff_t plane = c.out.plane_elems() * kLanes;
    for (const Positions& some : c.positions) {
        const Bf16Loops loops{.outer = static_cast<int>(some.in.size()),
                              .inner = c.in.steps(),
                              .a_outer = some.weights.data(),
                              .b_outer = some.in.data(),
                              .a_inner = kOperandElems,
                              .b_inner = kOperandElems};
        context.pool.parallel_for(some.rows, [&](std::int64_t row, int) {
            const Bf16Tiles products(kMostPairs);
            alignas(64) float sums[2][2][kTileSums];
            Bf16Operands op;
            for (int i = 0; i < 4; ++i) {
                op.sums[i / 2][i % 2] = sums[i / 2][i % 2];
            }
            for (int tile = 0; tile < tiles; tile += 2) {
                op.rows = std::min(2, tiles - tile);
                op.a[0] = weights + tile * tile_elems;
                op.a[1] = op.a[0] + tile_elems;
                for (int column = 0; column < some.columns; column += 2) {
                    op.cols = std::min(2, some.columns - column);
                    op.b[0] = packed + row * some.in_row + column * some.in_column;
                    op.b[1] = op.b[0] + some.in_column;
                    products.add(loops, op);
                    const int channel = tile * kTileExtent;
                    const std::ptrdiff_t pixel =
                        some.out + row * some.out_row + column * some.out_column;
                    write_sums(sums, std::min(op.rows * kTileExtent, c.out.channels - channel),
                               op.cols, bias != nullptr ? bias + channel : nullptr, relu,
                               y + channel * plane + pixel * kLanes, plane,
                               some.out_column * kLanes);
                }
            }
        });
    }
}

class Bf16Conv2dOp final : public Op {
 public:
    Bf16Conv2dOp(const Context& context, const Conv2dSpec& spec)
        : context_(context),
          shape_(spec.shape),
          relu_(spec.relu),
          forward_(forward_correlation(spec.shape)),
          backward_(backward_correlation(spec.shape)),
          weight_gradient_(spec.shape) {
        context.workspace.reserve(std::max({forward_.shared_floats(), backward_.shared_floats(),
                                            weight_gradient_.shared_floats()}),
                                  0);
    }

    OpNeeds needs() const override { return {.backward_reads_y = relu_}; }

    void forward(const Batch& batch, const OpIo& io) override {
        arrange(forward_, io.params[0].f32(), [](int o, int c) { return std::pair(o, c); });
        run(forward_, batch, values<Bfloat16>(io.x), io.params[1].f32(), relu_,
            values<Bfloat16>(io.y));
    }

    void backward_begin(const Batch& batch, const OpIo& io) override {
        if (!relu_) {
            return;
        }
        auto *const dy = values<Bfloat16>(io.dy), *const y = values<Bfloat16>(io.y);
        context_.for_ranges(block_count(batch.n) * shape_.out().elems() * kLanes,
                            [=](std::int64_t begin, std::int64_t end) {
                                for (std::int64_t i = begin; i < end; i += kVec) {
                                    store(dy + i, pass_above_zero(load(y + i), load(dy + i)));
                                }
                            });
    }

    void backward_params(const Batch& batch, const OpIo& io) override {
        weight_gradient_.run(context_, block_count(batch.n), io);
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        arrange(backward_, io.params[0].f32(), [](int o, int c) { return std::pair(c, o); });
        run(backward_, batch, values<Bfloat16>(io.dy), nullptr, false, values<Bfloat16>(io.dx));
    }

 private:
    Bfloat16* arranged() const { return reinterpret_cast<Bfloat16*>(context_.workspace.shared()); }
    // Rounds the weights. ends(o, c): the channels of the direction's output and input.
    template <typename Ends>
    void arrange(const Correlation& c, const float* w, Ends&& ends) const {
        Bfloat16* const weights = arranged();
        if (c.out.channels % kTileExtent != 0 || c.in.shape.channels % kDepth != 0) {
            std::fill_n(weights, c.weight_elems(), Bfloat16{0});
        }
        const int channels = shape_.in.channels;
        context_.pool.parallel_for(shape_.out_channels, [&](std::int64_t o, int) {
            const float* from = w + o * channels * c.taps;
            for (int channel = 0; channel < channels; ++channel) {
                const auto [to_end, from_end] = ends(static_cast<int>(o), channel);
                Bfloat16* const to = weights + c.weight(to_end, 0, from_end);
                const std::ptrdiff_t step = c.in.steps() * kOperandElems;
                for (int tap = 0; tap < c.taps; ++tap) {
                    to[tap * step].bits = narrow::to_bfloat16(*from++);
                }
            }
        });
    }
    // After arrange().
    void run(const Correlation& c, const Batch& batch, const Bfloat16* from, const float* bias,
             bool relu, Bfloat16* to) const {
        Bfloat16* const packed = arranged() + 2 * floats_of(c.weight_elems());
        for (int block = 0; block < block_count(batch.n); ++block) {
            pack(context_.pool, from + block * c.in.shape.elems() * kLanes, c.in, packed);
            correlate(context_, c, packed, arranged(), bias, relu,
                      to + block * c.out.elems() * kLanes);
        }
    }

    const Context context_;
    const Conv2dShape shape_;
    const bool relu_;
    const Correlation forward_, backward_;
    const Bf16WeightGradient weight_gradient_;
};

}  // namespace

std::unique_ptr<Op> make_bf16_op(const Context& context, const Conv2dSpec& spec, const OpSizes&) {
    const bool plain = spec.dropout == 0.0f && spec.pool_kernel == 0 && !spec.channels_last();
    return plain && spec.shape.out_channels >= kTileExtent
               ? std::make_unique<Bf16Conv2dOp>(context, spec)
               : nullptr;
}

}  // namespace gyre::cpu
