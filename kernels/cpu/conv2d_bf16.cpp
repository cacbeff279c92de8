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
#include <array>
#include <vector>

#include "kernels/cpu/bf16_tiles.hpp"
#include "kernels/cpu/ops.hpp"
#include "kernels/cpu/padding.hpp"

namespace gyre::cpu {
namespace {

constexpr int kDepth = 2 * kMostPairs;                            // of a step
constexpr std::ptrdiff_t kOperandElems = kTileExtent * kDepth;    // of a tile of a or b
constexpr std::ptrdiff_t kPixelElems = kMostPairs * kTileExtent;  // 16 channels of 16 images
static_assert(kTileExtent == kLanes);

int tiles_of(int channels) {
    return (channels + kTileExtent - 1) / kTileExtent;
}
int steps_of(int channels) {
    return (channels + kDepth - 1) / kDepth;
}
std::int64_t floats_of(std::int64_t values) {
    return whole_lines((values + 1) / 2);
}

// A tensor with its channels' values side by side, [row][column][steps of channels][pair of
// channels][image][2], and zeros around.
struct Packed {
    Shape shape;
    int rows = 0, columns = 0, before = 0;
    int steps() const { return steps_of(shape.channels); }
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
                    Bfloat16* const out =
                        y + (some.out + row * some.out_row + column * some.out_column) * kLanes;
                    const int channels =
                        std::min(op.rows * kTileExtent, c.out.channels - tile * kTileExtent);
                    for (int i = 0; i < channels; ++i) {
                        const int channel = tile * kTileExtent + i;
                        const Vec start = broadcast(bias != nullptr ? bias[channel] : 0.0f);
                        for (int n = 0; n < op.cols; ++n) {
                            const float* const from =
                                sums[i / kTileExtent][n] + i % kTileExtent * kTileExtent;
                            Bfloat16* const to =
                                out + channel * plane + n * some.out_column * kLanes;
                            for (int lane = 0; lane < kLanes; lane += kVec) {
                                const Vec v = load(from + lane) + start;
                                store(to + lane, relu ? clip_below_zero(v) : v);
                            }
                        }
                    }
                }
            }
        });
    }
}

// The gradients of weights and bias, for which dy and x are copied with the images as depths.
class WeightSums {
 public:
    explicit WeightSums(const Conv2dShape& shape)
        : shape_(shape),
          out_(shape.out()),
          pixels_(shape.stride == 1 ? 2 : 1),
          out_steps_((out_.width + pixels_ - 1) / pixels_),
          in_rows_(shape.in.height + 2 * shape.padding),
          in_columns_(std::max(shape.in.width + 2 * shape.padding,
                               out_steps_ * pixels_ - 1 + shape.kernel)),
          out_tiles_(tiles_of(shape.out_channels)),
          in_tiles_(tiles_of(shape.in.channels)) {
        const std::int64_t row = dy_row() + shape.kernel * x_row();  // of one tile of each
        strip_ = static_cast<int>(std::clamp<std::int64_t>(kStripElems / row, 1, out_.height));
        for (int y = 0; y < out_.height; ++y) {
            dy_rows_.push_back(y * dy_row());
            x_rows_.push_back(y * shape.stride * x_row());
        }
    }

    std::int64_t shared_floats() const {
        return floats_of(dy_elems()) + floats_of(x_elems()) + sum_floats();
    }
    // Overwrites both gradients.
    void run(const Context& context, int blocks, const OpIo& io) const {
        auto* const dy = reinterpret_cast<Bfloat16*>(context.workspace.shared());
        auto* const x = dy + 2 * floats_of(dy_elems());
        auto* const sums = reinterpret_cast<float*>(x + 2 * floats_of(x_elems()));
        std::fill_n(io.grads[0].f32(), shape_.weight_elems(), 0.0f);
        std::fill_n(io.grads[1].f32(), shape_.out_channels, 0.0f);
        if (blocks == 0) {
            return;
        }
        const auto* const all_dy = values<Bfloat16>(io.dy);
        const auto* const all_x = values<Bfloat16>(io.x);
        for (int block = 0; block < blocks; ++block) {
            copy_dy(context.pool, all_dy + block * out_.elems() * kLanes, dy);
            copy_x(context.pool, all_x + block * shape_.in.elems() * kLanes, x);
            const int across = (in_tiles_ + 1) / 2;
            context.pool.parallel_for((out_tiles_ + 1) / 2 * across, [&](std::int64_t task, int) {
                add(2 * static_cast<int>(task / across), 2 * static_cast<int>(task % across), dy, x,
                    block == 0, sums);
            });
        }
        context.pool.parallel_for(shape_.out_channels, [&](std::int64_t o, int) {
            write(static_cast<int>(o), sums, io.grads[0].f32());
            add_up_bias(static_cast<int>(o), blocks, all_dy, io.grads[1].f32());
        });
    }

 private:
    static constexpr std::int64_t kStripElems = 64 * 1024;  // that stay in the second-level cache

    int taps() const { return shape_.kernel * shape_.kernel; }
    int pairs() const { return pixels_ * kLanes / 2; }
    // dy [tile of channels][row][step][channel][pixel][image]
    std::ptrdiff_t step_elems() const { return std::ptrdiff_t{pixels_} * kPixelElems; }
    std::ptrdiff_t dy_row() const { return out_steps_ * step_elems(); }
    std::int64_t dy_elems() const { return out_tiles_ * out_.height * dy_row(); }
    // x [tile of channels][row][column][pair of images][channel][2]
    std::ptrdiff_t x_row() const { return in_columns_ * kPixelElems; }
    std::int64_t x_elems() const { return std::int64_t{in_tiles_} * in_rows_ * x_row(); }
    // [tile of out channels][tile of in channels][tap][out][in]
    std::int64_t sum_floats() const {
        return std::int64_t{out_tiles_} * in_tiles_ * taps() * kTileSums;
    }
    std::ptrdiff_t sum(int out_tile, int in_tile, int tap) const {
        return ((std::ptrdiff_t{out_tile} * in_tiles_ + in_tile) * taps() + tap) * kTileSums;
    }

    void copy_dy(ThreadPool& pool, const Bfloat16* from, Bfloat16* to) const {
        pool.parallel_for(out_tiles_ * out_.height, [&](std::int64_t task, int) {
            const std::int64_t tile = task / out_.height, row = task % out_.height;
            Bfloat16* const line = to + task * dy_row();
            for (int i = 0; i < kTileExtent; ++i) {
                const std::int64_t channel = tile * kTileExtent + i;
                const bool exists = channel < shape_.out_channels;
                const Bfloat16* pixel = from + (channel * out_.height + row) * out_.width * kLanes;
                for (int column = 0; column < out_steps_ * pixels_; ++column, pixel += kLanes) {
                    Bfloat16* const out = line + column / pixels_ * step_elems() +
                                          (std::ptrdiff_t{i} * pixels_ + column % pixels_) * kLanes;
                    if (exists && column < out_.width) {
                        std::copy_n(pixel, kLanes, out);
                    } else {
                        std::fill_n(out, kLanes, Bfloat16{0});
                    }
                }
            }
        });
    }

    // Two pixels' pairs of images at a time are transposed as floats, which keeps their bits.
    void copy_x(ThreadPool& pool, const Bfloat16* from, Bfloat16* to) const {
        const Shape& in = shape_.in;
        const std::ptrdiff_t plane = in.plane_elems() * kLanes;
        pool.parallel_for(in_tiles_ * in_rows_, [&](std::int64_t task, int) {
            const int tile = static_cast<int>(task / in_rows_);
            const std::int64_t row = task % in_rows_ - shape_.padding;
            Bfloat16* const line = to + task * x_row();
            if (row < 0 || row >= in.height) {
                std::fill_n(line, x_row(), Bfloat16{0});
                return;
            }
            const std::ptrdiff_t left = shape_.padding * kPixelElems;
            const std::ptrdiff_t right = left + in.width * kPixelElems;
            std::fill_n(line, left, Bfloat16{0});
            std::fill_n(line + right, x_row() - right, Bfloat16{0});
            const int channels = std::min(kTileExtent, in.channels - tile * kTileExtent);
            const Bfloat16* pixel = from + tile * kTileExtent * plane + row * in.width * kLanes;
            auto* out = reinterpret_cast<float*>(line + left);
            int column = 0;
            for (; column + 1 < in.width; column += 2, pixel += 2 * kLanes, out += kPixelElems) {
                transpose(reinterpret_cast<const float*>(pixel), plane / 2, channels, out,
                          kTileExtent);
            }
            for (int i = 0; column < in.width && i < kTileExtent; ++i) {
                for (int pair = 0; pair < kLanes / 2; ++pair) {
                    float& both = out[pair * kTileExtent + i];
                    both = 0.0f;
                    if (i < channels) {
                        std::memcpy(&both, pixel + i * plane + 2 * pair, sizeof both);
                    }
                }
            }
        });
    }

    // Adds the products of one block for 2 x 2 tiles of channels, strip by strip.
    void add(int out_tile, int in_tile, const Bfloat16* dy, const Bfloat16* x, bool first,
             float* sums) const {
        const Bf16Tiles products(pairs());
        Bf16Operands op;
        op.rows = std::min(2, out_tiles_ - out_tile);
        op.cols = std::min(2, in_tiles_ - in_tile);
        for (int row = 0; row < out_.height; row += strip_) {
            const Bf16Loops loops{.outer = std::min(strip_, out_.height - row),
                                  .inner = out_steps_,
                                  .a_outer = dy_rows_.data() + row,
                                  .b_outer = x_rows_.data() + row,
                                  .a_inner = step_elems(),
                                  .b_inner = shape_.stride * pixels_ * kPixelElems};
            op.first = first && row == 0;
            for (int tap = 0; tap < taps(); ++tap) {
                const std::ptrdiff_t shift =
                    tap / shape_.kernel * x_row() + tap % shape_.kernel * kPixelElems;
                for (int m = 0; m < 2; ++m) {
                    op.a[m] = dy + std::ptrdiff_t{out_tile + m} * out_.height * dy_row();
                    op.b[m] = x + std::ptrdiff_t{in_tile + m} * in_rows_ * x_row() + shift;
                    for (int n = 0; n < 2; ++n) {
                        op.sums[m][n] = sums + sum(out_tile + m, in_tile + n, tap);
                    }
                }
                products.add(loops, op);
            }
        }
    }

    void write(int o, const float* sums, float* dw) const {
        for (int c = 0; c < shape_.in.channels; ++c) {
            for (int tap = 0; tap < taps(); ++tap) {
                dw[(std::ptrdiff_t{o} * shape_.in.channels + c) * taps() + tap] =
                    sums[sum(o / kTileExtent, c / kTileExtent, tap) +
                         o % kTileExtent * kTileExtent + c % kTileExtent];
            }
        }
    }

    void add_up_bias(int o, int blocks, const Bfloat16* dy, float* db) const {
        const std::ptrdiff_t plane = out_.plane_elems() * kLanes;
        float of_lanes[kLanes];
        for (int lane = 0; lane < kLanes; lane += kVec) {
            Vec sum[4] = {};
            for (int block = 0; block < blocks; ++block) {
                const Bfloat16* const d =
                    dy + (std::int64_t{block} * shape_.out_channels + o) * plane + lane;
                int turn = 0;  // several independent sums hide the latency of the additions
                for (std::ptrdiff_t i = 0; i < plane; i += kLanes) {
                    sum[turn++ % 4] += load(d + i);
                }
            }
            store(of_lanes + lane, (sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
        db[o] = lane_sum(of_lanes);
    }

    const Conv2dShape shape_;
    const Shape out_;
    const int pixels_;     // of a step: two that are adjacent in x, too
    const int out_steps_;  // of a row of dy
    const int in_rows_, in_columns_;
    const int out_tiles_, in_tiles_;
    int strip_ = 1;  // rows of dy whose products are added before the next position of the window
    std::vector<std::ptrdiff_t> dy_rows_, x_rows_;  // where each row of dy begins, and its x
};

class Bf16Conv2dOp final : public Op {
 public:
    Bf16Conv2dOp(const Context& context, const Conv2dSpec& spec)
        : context_(context),
          shape_(spec.shape),
          relu_(spec.relu),
          forward_(forward_correlation(spec.shape)),
          backward_(backward_correlation(spec.shape)),
          weight_sums_(spec.shape) {
        context.workspace.reserve(std::max({forward_.shared_floats(), backward_.shared_floats(),
                                            weight_sums_.shared_floats()}),
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
        weight_sums_.run(context_, block_count(batch.n), io);
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
    const WeightSums weight_sums_;
};

}  // namespace

std::unique_ptr<Op> make_bf16_op(const Context& context, const Conv2dSpec& spec, const OpSizes&) {
    const bool plain = spec.dropout == 0.0f && spec.pool_kernel == 0 && !spec.channels_last();
    return plain && spec.shape.out_channels >= kTileExtent
               ? std::make_unique<Bf16Conv2dOp>(context, spec)
               : nullptr;
}

}  // namespace gyre::cpu
