#include "kernels/cpu/conv2d_weights.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/cpu/conv2d_direction.hpp"

namespace gyre::cpu {
namespace {

constexpr std::int64_t kPaddedGroupFloats = 1 << 20;  // padded copies held at a time: 4 MiB
constexpr std::int64_t kUnfusedFloats = 64 * 1024;    // gradients held by a worker: 256 KiB

// Register tile of R output channels by T window positions: 2*R*T flops per R + T loads.
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
    bool first = true, last = true;  // if false, sums are read from, or stored to, `sums`
    float* sums = nullptr;           // [R][T][kLanes]
};

// Each lane has a sum of its own, so that the order does not depend on what a register holds.
template <int R, int T>
void gradient_tile(const TileImages& op) {
    float own[R * T * kLanes];
    float* const sums = op.sums != nullptr ? op.sums : own;
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec acc[R][T] = {};
        for (int r = 0; !op.first && r < R; ++r) {
            for (int t = 0; t < T; ++t) {
                acc[r][t] = load(sums + (r * T + t) * kLanes + lane);
            }
        }
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
                    Vec v = load(x[t] + at);
                    load_once(v);
                    for (int r = 0; r < R; ++r) {
                        acc[r][t] = multiply_add(d[r], v, acc[r][t]);
                    }
                }
                dy += kLanes;
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int t = 0; t < T; ++t) {
                store(sums + (r * T + t) * kLanes + lane, acc[r][t]);
            }
        }
    }
    for (int r = 0; op.last && r < R; ++r) {
        for (int t = 0; t < T; ++t) {
            op.dw[r * op.dw_row + t] += lane_sum(sums + (r * T + t) * kLanes);
        }
    }
}

constexpr int kRows = WeightGradient::kRows, kTaps = WeightGradient::kTaps;
using TileFunction = void (*)(const TileImages&);

template <int... Index>
constexpr std::array<TileFunction, sizeof...(Index)> make_table(
    std::integer_sequence<int, Index...>) {
    return {&gradient_tile<Index / kTaps + 1, Index % kTaps + 1>...};
}
constexpr auto kTable = make_table(std::make_integer_sequence<int, kRows * kTaps>());

}  // namespace

WeightGradient::WeightGradient(const Conv2dShape& shape, const Conv2dTail& tail, int most_blocks)
    : shape_(shape),
      tail_(tail),
      out_(shape.out()),
      plane_(forward_plane(shape)),
      rows_(shape.out_channels, kRows),
      taps_(shape.in.channels * shape.kernel * shape.kernel, kTaps) {
    const std::int64_t blocks = std::max(1, most_blocks);
    group_ = static_cast<int>(
        shape.padding == 0
            ? blocks
            : std::clamp<std::int64_t>(kPaddedGroupFloats / padded_block_floats(), 1, blocks));
    unfused_ = static_cast<int>(
        std::clamp<std::int64_t>(kUnfusedFloats / (kRows * plane_floats()), 1, group_));
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

void WeightGradient::run(const Context& context, int blocks, const OpIo& io) const {
    std::fill_n(io.grads[0].f32(), shape_.weight_elems(), 0.0f);
    std::fill_n(io.grads[1].f32(), shape_.out_channels, 0.0f);
    const std::ptrdiff_t x_block = shape_.in.elems() * kLanes;
    for (int first = 0; first < blocks; first += group_) {
        Images images{first, std::min(group_, blocks - first), io.x.f32() + first * x_block,
                      x_block};
        if (shape_.padding > 0) {
            float* padded = context.workspace.shared();
            for (int block = 0; block < images.blocks; ++block) {
                pad_block(context.pool, shape_.in, plane_, images.x + block * x_block,
                          padded + block * padded_block_floats());
            }
            images.x = padded;
            images.x_block = padded_block_floats();
        }
        // Each task owns whole rows of dw, so the order of summation never depends on the threads.
        context.pool.parallel_for(rows_.parts, [&](std::int64_t task, int worker) {
            add_rows(rows_.begin(static_cast<int>(task)), rows_.size(static_cast<int>(task)),
                     images, io, context.workspace.worker(worker));
        });
    }
}

// scratch: [worker_floats()].
void WeightGradient::add_rows(int row, int rows, const Images& images, const OpIo& io,
                              float* scratch) const {
    if (!tail_.any()) {
        const std::ptrdiff_t dy_block = out_.elems() * kLanes;
        add_part(
            row, rows,
            {images.blocks, images.x, io.dy.f32() + images.first * dy_block + row * plane_floats(),
             images.x_block, dy_block, true, true, nullptr},
            io);
        return;
    }
    const std::ptrdiff_t dy_block = rows * plane_floats();
    for (int first = 0; first < images.blocks; first += unfused_) {
        const int blocks = std::min(unfused_, images.blocks - first);
        for (int block = 0; block < blocks; ++block) {
            for (int r = 0; r < rows; ++r) {
                tail_.gradient_plane(io, images.first + first + block, row + r,
                                     scratch + block * dy_block + r * plane_floats(),
                                     std::ptrdiff_t{out_.width} * kLanes);
            }
        }
        add_part(row, rows,
                 {blocks, images.x + first * images.x_block, scratch, images.x_block, dy_block,
                  first == 0, first + blocks == images.blocks,
                  scratch + unfused_ * kRows * plane_floats()},
                 io);
    }
}

void WeightGradient::add_part(int row, int rows, const Part& part, const OpIo& io) const {
    TileImages op;
    op.blocks = part.blocks;
    op.x = part.x;
    op.x_block = part.x_block;
    op.dy = part.dy;
    op.dy_block = part.dy_block;
    op.dy_row = plane_floats();
    op.pixels = &pixel_;
    op.dw_row = taps_.total;
    op.first = part.first;
    op.last = part.last;
    float* sums = part.sums;  // first those of the tiles, then the bias's
    for (int i = 0; i < taps_.parts; ++i) {
        op.tap = tap_.data() + taps_.begin(i);
        op.dw = io.grads[0].f32() + std::ptrdiff_t{row} * taps_.total + taps_.begin(i);
        op.sums = sums;
        kTable[static_cast<std::size_t>((rows - 1) * kTaps + taps_.size(i) - 1)](op);
        sums += sums != nullptr ? kRows * kTaps * kLanes : 0;
    }
    for (int r = 0; r < rows; ++r) {
        float of_lanes[kLanes];
        for (int lane = 0; lane < kLanes; lane += kVec) {
            Vec sum[4] = {};
            for (int i = 0; !part.first && i < 4; ++i) {
                sum[i] = load(sums + (r * 4 + i) * kLanes + lane);
            }
            for (int block = 0; block < part.blocks; ++block) {
                add_in_turns(part.dy + block * part.dy_block + r * op.dy_row + lane, op.dy_row,
                             sum);
            }
            store(of_lanes + lane, (sum[0] + sum[1]) + (sum[2] + sum[3]));
            for (int i = 0; !part.last && i < 4; ++i) {
                store(sums + (r * 4 + i) * kLanes + lane, sum[i]);
            }
        }
        if (part.last) {
            io.grads[1].f32()[row + r] += lane_sum(of_lanes);
        }
    }
}

}  // namespace gyre::cpu
