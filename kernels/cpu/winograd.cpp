// 3 x 3 convolution by Winograd's minimal filtering, with 16 multiplications for four outputs where
// the formula has 36: Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR
// 2016, F(2 x 2, 3 x 3).
//
//   y tile [2][2] = A^T [ sum over c of (G w[o][c] G^T) * (B^T x[c] tile [4][4] B) ] A
//
// Its rounding error is a small multiple of the direct sum's (the transforms have entries 0, 1/2,
// 1); tests/products_test.cpp bounds it.
#include <algorithm>

#include "kernels/cpu/conv2d_direction.hpp"
#include "kernels/cpu/tile.hpp"

namespace gyre::cpu {
namespace {

constexpr int kPoints = 16;  // positions of a transformed tile

// to[i] = sum over j of G[i][j] from[j]: three weights become four.
void transform_weights_1d(const float* from, std::ptrdiff_t step, float* to,
                          std::ptrdiff_t to_step) {
    const float a = from[0], b = from[step], c = from[2 * step];
    to[0] = a;
    to[to_step] = 0.5f * (a + b + c);
    to[2 * to_step] = 0.5f * (a - b + c);
    to[3 * to_step] = c;
}

// v[0..3] = B^T v.
void transform_input_1d(Vec& a, Vec& b, Vec& c, Vec& d) {
    const Vec t0 = a - c, t1 = b + c, t2 = c - b, t3 = b - d;
    a = t0;
    b = t1;
    c = t2;
    d = t3;
}

// points [16], `step` floats apart, = B^T tile B.
void transform_input(const float* tile, std::ptrdiff_t line, float* points, std::ptrdiff_t step) {
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec v[4][4];
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
                v[i][j] = load(tile + i * line + j * kLanes + lane);
            }
        }
        for (int j = 0; j < 4; ++j) {
            transform_input_1d(v[0][j], v[1][j], v[2][j], v[3][j]);
        }
        for (int i = 0; i < 4; ++i) {
            transform_input_1d(v[i][0], v[i][1], v[i][2], v[i][3]);
            for (int j = 0; j < 4; ++j) {
                store(points + (4 * i + j) * step + lane, v[i][j]);
            }
        }
    }
}

// A tile of two lines of two outputs on its way to memory: + bias, * factor [kLanes] where there is
// one, and with `relu` no less than 0.
struct Outputs {
    float bias;
    const float* factor;
    bool relu;
};

// v[line][column] = A^T points A + bias, * factor.
void transform_output(const float* points, std::ptrdiff_t step, int lane, const Outputs& outputs,
                      Vec (&v)[2][2]) {
    Vec half[2][4];
    for (int j = 0; j < 4; ++j) {
        const auto m = [&](int i) { return load(points + (4 * i + j) * step + lane); };
        half[0][j] = m(0) + m(1) + m(2);
        half[1][j] = m(1) - m(2) - m(3);
    }
    for (int i = 0; i < 2; ++i) {
        v[i][0] = half[i][0] + half[i][1] + half[i][2] + broadcast(outputs.bias);
        v[i][1] = half[i][1] - half[i][2] - half[i][3] + broadcast(outputs.bias);
    }
    if (outputs.factor != nullptr) {
        for (int k = 0; k < 4; ++k) {
            v[k / 2][k % 2] *= load(outputs.factor + lane);
        }
    }
}

// The tile's first rows x cols (1 or 2) outputs.
void store_outputs(const float* points, std::ptrdiff_t step, const Outputs& outputs, float* y,
                   std::ptrdiff_t line, int rows, int cols) {
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec v[2][2];
        transform_output(points, step, lane, outputs, v);
        for (int k = 0; outputs.relu && k < 4; ++k) {
            v[k / 2][k % 2] = clip_below_zero(v[k / 2][k % 2]);
        }
        for (int k = 0; k < 4; ++k) {
            if (k / 2 < rows && k % 2 < cols) {
                store(y + k / 2 * line + k % 2 * kLanes + lane, v[k / 2][k % 2]);
            }
        }
    }
}

// The largest of the tile, of which max-pooling by 2 x 2 makes one output. argmax may be null.
void store_largest(const float* points, std::ptrdiff_t step, const Outputs& outputs, float* y,
                   std::uint8_t* argmax) {
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec v[2][2];
        transform_output(points, step, lane, outputs, v);
        Largest best{v[0][0]};
        for (int k = 1; k < 4; ++k) {
            best.take(v[k / 2][k % 2], k);
        }
        best.store_value(y + lane, outputs.relu);
        if (argmax != nullptr) {
            best.store_where(argmax + lane);
        }
    }
}

// The correlation of one block of images with 3 x 3 windows.
class Winograd final : public Direction {
 public:
    // w[o * out + c * in + position]; flipped: with the positions in reverse order.
    struct Weights {
        std::ptrdiff_t out, in;
        bool flipped;
    };
    // x [in][lane] -> y [out][lane]
    Winograd(const Shape& in, const Shape& out, int padding, const Weights& weights,
             const Conv2dTail* tail);

    std::int64_t weight_floats() const override { return kPoints * weights_plane_; }
    std::int64_t output_floats() const override {
        return tail_at_ == TailAt::block ? out_.elems() * kLanes : 0;
    }
    std::int64_t worker_floats() const override { return kPoints * (input_step() + kOutputStep); }
    const float* arrange(const float* w, float* transformed) const override;
    void run(const Context& context, const Input& in, const Conv2dTail::Output& to) const override;

 private:
    // Where the tail is applied: to a tile, which holds one window of a pooling by 2 x 2; or, where
    // windows lie otherwise, to all outputs of a block.
    enum class TailAt { tile, window, block };
    static TailAt place_of(const Conv2dTail* tail);
    static constexpr std::ptrdiff_t kGroupFloats = kTileCols * kLanes;
    static constexpr std::ptrdiff_t kOutputStep = kTileRows * kGroupFloats;
    std::ptrdiff_t input_step() const { return in_.channels * kGroupFloats; }
    void transform_inputs(int first, int count, const float* padded, float* input) const;
    void multiply(int row, int rows, int count, const float* transformed, const float* input,
                  float* output) const;
    void transform_outputs(int row, int rows, int first, int count, const float* points,
                           const float* bias, const Conv2dTail::Output& to) const;

    const Shape in_, out_;
    const Weights weights_;
    const Conv2dTail* const tail_;  // or null
    const TailAt tail_at_;
    const int tiles_across_;
    const std::ptrdiff_t weights_plane_;
    // A task is a group of neighbouring tiles. Its transformed input [16][channel][tile][lane]
    // stays in the level-2 cache while every row tile of output channels goes over it.
    const Split groups_, rows_;
};

Winograd::Winograd(const Shape& in, const Shape& out, int padding, const Weights& weights,
                   const Conv2dTail* tail)
    : Direction({(out.height + 1) / 2 * 2 + 2, (out.width + 1) / 2 * 2 + 2, padding}),
      in_(in),
      out_(out),
      weights_(weights),
      tail_(tail),
      tail_at_(place_of(tail)),
      tiles_across_((out.width + 1) / 2),
      weights_plane_(std::ptrdiff_t{out.channels} * in.channels),
      groups_(tiles_across_ * ((out.height + 1) / 2), kTileCols),
      rows_(out.channels, kTileRows) {}

// transformed [16][out.channels][in.channels] = G w G^T.
const float* Winograd::arrange(const float* w, float* transformed) const {
    for (int o = 0; o < out_.channels; ++o) {
        for (int c = 0; c < in_.channels; ++c) {
            float window[9], columns[12], points[kPoints];
            std::copy_n(w + o * weights_.out + c * weights_.in, 9, window);
            if (weights_.flipped) {
                std::reverse(window, window + 9);
            }
            for (int j = 0; j < 3; ++j) {
                transform_weights_1d(window + j, 3, columns + j, 3);
            }
            for (int i = 0; i < 4; ++i) {
                transform_weights_1d(columns + 3 * i, 1, points + 4 * i, 1);
            }
            for (int point = 0; point < kPoints; ++point) {
                transformed[point * weights_plane_ + std::ptrdiff_t{o} * in_.channels + c] =
                    points[point];
            }
        }
    }
    return transformed;
}

void Winograd::transform_inputs(int first, int count, const float* padded, float* input) const {
    const std::ptrdiff_t line = plane().line_floats();
    for (int c = 0; c < in_.channels; ++c) {
        for (int t = 0; t < count; ++t) {
            const int down = (first + t) / tiles_across_, across = (first + t) % tiles_across_;
            transform_input(padded + c * plane().plane_floats() + 2 * down * line +
                                std::ptrdiff_t{2} * across * kLanes,
                            line, input + c * kGroupFloats + t * kLanes, input_step());
        }
    }
}

// output [16][row][tile][lane] = transformed weights * input, for one row tile.
void Winograd::multiply(int row, int rows, int count, const float* transformed, const float* input,
                        float* output) const {
    TileLoops loops;
    loops.count = {1, 1, in_.channels};
    loops.x_step = {0, 0, kGroupFloats};
    loops.w_step = {0, 0, 1};
    TileOperands op;
    op.w_row = in_.channels;
    op.y_row = kGroupFloats;
    const TileFunction run_tile = tile_function(rows, count);
    for (int point = 0; point < kPoints; ++point) {
        op.w = transformed + point * weights_plane_ + std::ptrdiff_t{row} * in_.channels;
        for (int t = 0; t < count; ++t) {
            op.x[t] = input + point * input_step() + t * kLanes;
            op.y[t] = output + point * kOutputStep + t * kLanes;
        }
        run_tile(loops, op);
    }
}

Winograd::TailAt Winograd::place_of(const Conv2dTail* tail) {
    if (tail == nullptr || !tail->pools()) {
        return TailAt::tile;
    }
    const Windows windows = tail->windows(0);
    return windows.kernel == 2 && windows.stride == 2 ? TailAt::window : TailAt::block;
}

void Winograd::transform_outputs(int row, int rows, int first, int count, const float* points,
                                 const float* bias, const Conv2dTail::Output& to) const {
    const bool pools = tail_at_ == TailAt::window;
    const Shape& shape = pools ? tail_->out() : out_;
    const std::ptrdiff_t line = std::ptrdiff_t{shape.width} * kLanes;
    for (int r = 0; r < rows; ++r) {
        const int o = row + r;
        const Outputs outputs{
            .bias = bias ? bias[o] : 0.0f,
            .factor = to.factors ? to.factors + o * kLanes : nullptr,
            .relu = tail_ != nullptr && tail_->relu() && tail_at_ != TailAt::block};
        const std::ptrdiff_t channel = o * shape.plane_elems() * kLanes;
        for (int t = 0; t < count; ++t) {
            const int down = (first + t) / tiles_across_, across = (first + t) % tiles_across_;
            const float* at = points + r * kGroupFloats + t * kLanes;
            if (!pools) {
                store_outputs(
                    at, kOutputStep, outputs,
                    to.y + channel + 2 * down * line + std::ptrdiff_t{2} * across * kLanes, line,
                    std::min(2, out_.height - 2 * down), std::min(2, out_.width - 2 * across));
            } else if (down < shape.height && across < shape.width) {
                const std::ptrdiff_t y = channel + down * line + std::ptrdiff_t{across} * kLanes;
                store_largest(at, kOutputStep, outputs, to.y + y,
                              to.argmax != nullptr ? to.argmax + y : nullptr);
            }
        }
    }
}

void Winograd::run(const Context& context, const Input& in, const Conv2dTail::Output& to) const {
    const bool by_block = tail_at_ == TailAt::block;
    const Conv2dTail::Output outputs = by_block ? Conv2dTail::Output{.y = in.outputs} : to;
    context.pool.parallel_for(groups_.parts, [&](std::int64_t task, int worker) {
        const int first = groups_.begin(static_cast<int>(task));
        const int count = groups_.size(static_cast<int>(task));
        float* inputs = context.workspace.worker(worker);
        float* points = inputs + kPoints * input_step();
        transform_inputs(first, count, in.padded, inputs);
        for (int part = 0; part < rows_.parts; ++part) {
            const int row = rows_.begin(part), rows = rows_.size(part);
            multiply(row, rows, count, in.weights, inputs, points);
            transform_outputs(row, rows, first, count, points, in.bias, outputs);
        }
    });
    if (by_block) {
        const std::ptrdiff_t line = std::ptrdiff_t{out_.width} * kLanes;
        context.pool.parallel_for(out_.channels, [&](std::int64_t channel, int) {
            tail_->finish(to, static_cast<int>(channel), 0, tail_->windows(line),
                          in.outputs + channel * out_.height * line);
        });
    }
}

}  // namespace

std::unique_ptr<Direction> make_winograd_forward(const Conv2dShape& shape, const Conv2dTail& tail) {
    const Winograd::Weights weights{
        .out = std::ptrdiff_t{shape.in.channels} * 9, .in = 9, .flipped = false};
    return std::make_unique<Winograd>(shape.in, shape.out(), shape.padding, weights, &tail);
}
std::unique_ptr<Direction> make_winograd_backward(const Conv2dShape& shape) {
    const Winograd::Weights weights{
        .out = 9, .in = std::ptrdiff_t{shape.in.channels} * 9, .flipped = true};
    return std::make_unique<Winograd>(shape.out(), shape.in, 2 - shape.padding, weights, nullptr);
}

}  // namespace gyre::cpu
