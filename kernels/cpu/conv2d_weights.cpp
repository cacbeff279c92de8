#include "kernels/cpu/conv2d_weights.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/cpu/conv2d_direction.hpp"

namespace gyre::cpu {
namespace {

constexpr std::int64_t kPaddedGroupFloats = 1 << 20;  // padded copies held at a time: 4 MiB

// The register tile: R output channels, T window positions, 2*R*T flops for every R + T loads.
struct TileImages {
    int blocks = 0;
    const float* x = nullptr;
    std::ptrdiff_t x_block = 0;
    const std::ptrdiff_t* tap = nullptr;  // [T]
    const float* dy = nullptr;
    std::ptrdiff_t dy_block = 0, dy_row = 0;
    const std::vector<std::ptrdiff_t>* pixels = nullptr;
    float* dw = nullptr;  // dw[r * dw_row + t] += sum
    std::ptrdiff_t dw_row = 0;
};

float lane_sum(Vec v) {
    float part[kVec];
    std::memcpy(part, &v, sizeof v);
    for (int half = kVec / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; ++l) {
            part[l] += part[l + half];
        }
    }
    return part[0];
}

template <int R, int T>
void gradient_tile(const TileImages& op) {
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec acc[R][T] = {};
        for (int block = 0; block < op.blocks; ++block) {
            const float* x[T];
            for (int t = 0; t < T; ++t) {
                x[t] = op.x + block * op.x_block + op.tap[t] + lane;
            }
            const float* dy = op.dy + block * op.dy_block + lane;
            for (const std::ptrdiff_t at : *op.pixels) {
                Vec d[R];
                for (int r = 0; r < R; ++r) {
                    d[r] = load(dy + r * op.dy_row);
                }
                for (int t = 0; t < T; ++t) {
                    const Vec v = load(x[t] + at);
                    for (int r = 0; r < R; ++r) {
                        acc[r][t] += d[r] * v;
                    }
                }
                dy += kLanes;
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int t = 0; t < T; ++t) {
                op.dw[r * op.dw_row + t] += lane_sum(acc[r][t]);
            }
        }
    }
}

constexpr int kTile = WeightGradient::kTile;
using TileFunction = void (*)(const TileImages&);

template <int... Index>
constexpr std::array<TileFunction, sizeof...(Index)> make_table(
    std::integer_sequence<int, Index...>) {
    return {&gradient_tile<Index / kTile + 1, Index % kTile + 1>...};
}
constexpr auto kTable = make_table(std::make_integer_sequence<int, kTile * kTile>());

}  // namespace

WeightGradient::WeightGradient(const Conv2dShape& shape, int most_blocks)
    : shape_(shape),
      out_(shape.out()),
      plane_(forward_plane(shape)),
      rows_(shape.out_channels, kTile),
      taps_(shape.in.channels * shape.kernel * shape.kernel, kTile) {
    const std::int64_t blocks = std::max(1, most_blocks);
    group_ = static_cast<int>(
        shape.padding == 0
            ? blocks
            : std::clamp<std::int64_t>(kPaddedGroupFloats / padded_block_floats(), 1, blocks));
    for (int c = 0; c < shape.in.channels; ++c) {
        for (int kh = 0; kh < shape.kernel; ++kh) {
            for (int kw = 0; kw < shape.kernel; ++kw) {
                tap_.push_back(c * plane_.plane_floats() + kh * plane_.line_floats() +
                               std::ptrdiff_t{kw} * kLanes);
            }
        }
    }
    for (int oh = 0; oh < out_.height; ++oh) {
        for (int ow = 0; ow < out_.width; ++ow) {
            pixel_.push_back((oh * plane_.line_floats() + std::ptrdiff_t{ow} * kLanes) *
                             shape.stride);
        }
    }
}

void WeightGradient::run(const Context& context, int blocks, const float* x, const float* dy,
                         float* dw, float* db) const {
    std::fill_n(dw, shape_.weight_elems(), 0.0f);
    std::fill_n(db, shape_.out_channels, 0.0f);
    const std::ptrdiff_t x_block = shape_.in.elems() * kLanes;
    for (int first = 0; first < blocks; first += group_) {
        Images images{std::min(group_, blocks - first), x + first * x_block, x_block,
                      dy + first * out_.elems() * kLanes};
        if (shape_.padding > 0) {
            float* padded = context.workspace.shared();
            for (int block = 0; block < images.blocks; ++block) {
                pad_block(context.pool, shape_.in, plane_, images.x + block * x_block,
                          padded + block * padded_block_floats());
            }
            images.x = padded;
            images.x_block = padded_block_floats();
        }
        // Each task owns whole rows of dw, so the order of the sums never depends on the threads.
        context.pool.parallel_for(rows_.parts, [&](std::int64_t task, int) {
            add_rows(rows_.begin(static_cast<int>(task)), rows_.size(static_cast<int>(task)),
                     images, dw, db);
        });
    }
}

void WeightGradient::add_rows(int row, int rows, const Images& images, float* dw, float* db) const {
    TileImages op;
    op.blocks = images.blocks;
    op.x = images.x;
    op.x_block = images.x_block;
    op.dy_block = out_.elems() * kLanes;
    op.dy_row = out_.plane_elems() * kLanes;
    op.dy = images.dy + row * op.dy_row;
    op.pixels = &pixel_;
    op.dw_row = taps_.total;
    for (int part = 0; part < taps_.parts; ++part) {
        op.tap = tap_.data() + taps_.begin(part);
        op.dw = dw + std::ptrdiff_t{row} * taps_.total + taps_.begin(part);
        kTable[static_cast<std::size_t>((rows - 1) * kTile + taps_.size(part) - 1)](op);
    }
    for (int r = 0; r < rows; ++r) {
        Vec sum[4] = {};
        for (int block = 0; block < op.blocks; ++block) {
            const float* d = op.dy + block * op.dy_block + r * op.dy_row;
            int turn = 0;  // several sums hide the latency of the additions
            for (std::ptrdiff_t i = 0; i < op.dy_row; i += kVec) {
                sum[turn++ % 4] += load(d + i);
            }
        }
        db[row + r] += lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

}  // namespace gyre::cpu
