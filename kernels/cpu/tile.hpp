// The register tile: the inner loop of all forward and input-gradient kernels.
//
//   y[r][c][lane] = start[r] + sum over i, j, k of
//       w[r * w_row + i * w_step[0] + j * w_step[1] + k * w_step[2]] *
//       x[c][i * x_step[0] + j * x_step[1] + k * x_step[2] + lane]
//
// In a convolution, r counts output channels, c pixels and (i, j, k) input channel and window
// position; in a linear layer, c counts blocks of images and k input features; in a linear layer's
// weight gradient, c counts groups of 16 input features and (j, k) images. Weights are broadcast,
// so their strides are arbitrary. R x C x kTileVecs accumulators stay in registers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "kernels/cpu/simd.hpp"

namespace gyre::cpu {

struct TileLoops {
    std::array<int, 3> count{1, 1, 1};
    std::array<std::ptrdiff_t, 3> x_step{}, w_step{};
};

struct TileOperands {
    const float* w = nullptr;
    std::ptrdiff_t w_row = 0;
    const float* x[kTileCols] = {};
    float* y[kTileCols] = {};
    std::ptrdiff_t y_row = 0;
    const float* start = nullptr;  // [rows]: the bias; null: zeros, or y itself with `accumulate`
    bool accumulate = false;       // y += instead of y =
    bool relu = false;             // y = max(y, 0) at the end
};

// Adds the products of the formula. kColumns: count[2] if known at compile time and x and w are
// contiguous, as in a window; else 0.
template <int R, int C, int kColumns>
[[gnu::always_inline]] inline void add_products(const TileLoops& loops, const float* const (&x)[C],
                                                const float* const (&w)[R],
                                                Vec (&acc)[R][C * kTileVecs]) {
    constexpr int V = C * kTileVecs;
    const int columns = kColumns > 0 ? kColumns : loops.count[2];
    const std::ptrdiff_t x_step = kColumns > 0 ? kLanes : loops.x_step[2];
    const std::ptrdiff_t w_step = kColumns > 0 ? 1 : loops.w_step[2];
    for (int i = 0; i < loops.count[0]; ++i) {
        for (int j = 0; j < loops.count[1]; ++j) {
            std::ptrdiff_t at_x = i * loops.x_step[0] + j * loops.x_step[1];
            std::ptrdiff_t at_w = i * loops.w_step[0] + j * loops.w_step[1];
            for (int k = 0; k < columns; ++k) {
                Vec values[V];
                for (int v = 0; v < V; ++v) {
                    values[v] = load(x[v / kTileVecs] + at_x + v % kTileVecs * kVec);
                }
                for (int r = 0; r < R; ++r) {
                    const Vec weight = broadcast(w[r][at_w]);
                    for (int v = 0; v < V; ++v) {
                        acc[r][v] = multiply_add(weight, values[v], acc[r][v]);
                    }
                }
                at_x += x_step;
                at_w += w_step;
            }
        }
    }
}

template <int R, int C>
void run_tile(const TileLoops& loops, const TileOperands& op) {
    constexpr int V = C * kTileVecs;  // registers per row; v / kTileVecs is the column
    for (int lane = 0; lane < kLanes; lane += kTileVecs * kVec) {
        Vec acc[R][V];
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                acc[r][v] =
                    op.accumulate
                        ? load(op.y[v / kTileVecs] + r * op.y_row + lane + v % kTileVecs * kVec)
                        : broadcast(op.start ? op.start[r] : 0.0f);
            }
        }
        const float* x[C];
        for (int c = 0; c < C; ++c) {
            x[c] = op.x[c] + lane;
        }
        const float* w[R];
        for (int r = 0; r < R; ++r) {
            w[r] = op.w + r * op.w_row;
        }
        // A window's row is short compared with the overhead of its loop, so small tiles unroll it;
        // large tiles would run out of registers.
        const bool window = kRegisters == 16 && loops.x_step[2] == kLanes && loops.w_step[2] == 1;
        if (window && loops.count[2] == 5) {
            add_products<R, C, 5>(loops, x, w, acc);
        } else if (window && loops.count[2] == 3) {
            add_products<R, C, 3>(loops, x, w, acc);
        } else {
            add_products<R, C, 0>(loops, x, w, acc);
        }
        for (int r = 0; op.relu && r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                acc[r][v] = clip_below_zero(acc[r][v]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                store(op.y[v / kTileVecs] + r * op.y_row + lane + v % kTileVecs * kVec, acc[r][v]);
            }
        }
    }
}

using TileFunction = void (*)(const TileLoops&, const TileOperands&);

// 1 <= rows <= kTileRows, 1 <= cols <= kTileCols.
TileFunction tile_function(int rows, int cols);

// Divides `total` into the fewest parts of at most `most`, as equal as possible: part p covers
// [begin(p), begin(p + 1)).
struct Split {
    Split(int total_, int most)
        : total(total_),
          parts(std::max(1, (total_ + most - 1) / most)),
          least_(total / parts),
          larger_(total % parts) {}
    int begin(int part) const { return part * least_ + std::min(part, larger_); }
    int size(int part) const { return least_ + (part < larger_ ? 1 : 0); }
    int largest() const { return size(0); }
    int total, parts;

 private:
    int least_, larger_;  // the first parts have one element more
};

// A matrix product by the register tile, in tiles of kTileRows rows and kTileCols columns:
//
//   y[r * y_row + c * kLanes + lane] = (or +=) sum over k of
//       w[r * w_row + k * w_step] * x[k * x_step + c * kLanes + lane]
struct TileProduct {
    const float* w = nullptr;
    std::ptrdiff_t w_row = 0, w_step = 0;
    const float* x = nullptr;
    std::ptrdiff_t x_step = 0;
    float* y = nullptr;
    std::ptrdiff_t y_row = 0;
    int depth = 0;
    bool accumulate = false;

    // Computes the rows of parts [first, last); w and y start at the first of them.
    void run(const Split& rows, int first, int last, const Split& cols) const {
        TileLoops loops;
        loops.count = {1, 1, depth};
        loops.x_step = {0, 0, x_step};
        loops.w_step = {0, 0, w_step};
        TileOperands op;
        op.w_row = w_row;
        op.y_row = y_row;
        op.accumulate = accumulate;
        for (int part = first; part < last; ++part) {
            const int row = rows.begin(part) - rows.begin(first);
            op.w = w + row * w_row;
            for (int group = 0; group < cols.parts; ++group) {
                for (int c = 0; c < cols.size(group); ++c) {
                    op.x[c] = x + (cols.begin(group) + c) * kLanes;
                    op.y[c] = y + row * y_row + (cols.begin(group) + c) * kLanes;
                }
                tile_function(rows.size(part), cols.size(group))(loops, op);
            }
        }
    }
};

}  // namespace gyre::cpu
