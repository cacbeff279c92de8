// Linear layer on the CPU: y = x w^T + b and its gradients, blocked for the caches.
//
//   forward:  y[n][o]  = b[o] + sum_f w[o][f] x[n][f]
//   data:     dx[n][f] = sum_o w[o][f] dy[n][o]
//   weights:  dw[o][f] = sum_n dy[n][o] x[n][f],  db[o] = sum_n dy[n][o]
//
// All three run on the register tile of tile.hpp; n stands for blocks of kLanes images. Large
// weight matrices are read (or written) once from memory, and the smaller operand stays in the
// level-2 cache.
#include <algorithm>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/cpu/tile.hpp"

namespace gyre::cpu {
namespace {

constexpr int kCacheFloats =
    128 * 1024;                  // the part of a level-2 cache an operand may take: 512 KiB
constexpr int kPanelRows = 256;  // of w packed at a time for the data gradient
constexpr int kPanelCols = 256;
constexpr int kGradientCols = kTileCols * kLanes;  // columns of dw to a task
constexpr int kLineFloats = 16;                    // floats in a cache line

// Asks for rows of a matrix before they are needed: their strides defeat the hardware's prefetcher.
template <bool kForWriting>
void prefetch_rows(const float* first, std::ptrdiff_t row_step, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; c += kLineFloats) {
            __builtin_prefetch(first + r * row_step + c, kForWriting ? 1 : 0, 2);
        }
    }
}

}  // namespace

void CpuBackend::linear_forward(const LinearShape& shape, int n, const float* x, const float* w,
                                const float* b, float* y) {
    const int blocks = block_count(n);
    const int in = shape.in_features;
    const int out = shape.out_features;
    const int depth = std::max(64, kCacheFloats / (kLanes * std::max(1, blocks)));
    const Split rows(out, kTileRows), cols(blocks, kTileCols), depths(in, depth);
    for (int part = 0; part < depths.parts && blocks > 0; ++part) {
        const int k = depths.begin(part);
        pool_.parallel_for(rows.parts, [&](std::int64_t task, int) {
            const int row = rows.begin(static_cast<int>(task));
            const int row_count = rows.size(static_cast<int>(task));
            TileLoops loops;
            loops.count = {1, 1, depths.size(part)};
            loops.x_step = {0, 0, kLanes};
            loops.w_step = {0, 0, 1};
            TileOperands op;
            op.w = w + std::ptrdiff_t{row} * in + k;
            op.w_row = in;
            op.y_row = kLanes;
            op.start = b + row;
            op.accumulate = part > 0;
            for (int group = 0; group < cols.parts; ++group) {
                for (int c = 0; c < cols.size(group); ++c) {
                    const std::ptrdiff_t block = cols.begin(group) + c;
                    op.x[c] = x + (block * in + k) * kLanes;
                    op.y[c] = y + (block * out + row) * kLanes;
                }
                tile_function(row_count, cols.size(group))(loops, op);
            }
        });
    }
}

void CpuBackend::linear_backward_data(const LinearShape& shape, int n, const float* dy,
                                      const float* w, float* dx) {
    const int blocks = block_count(n);
    const int in = shape.in_features;
    const int out = shape.out_features;
    const Split panels(in, kPanelCols), depths(out, kPanelRows), cols(blocks, kTileCols);
    if (blocks == 0) {
        return;
    }
    pool_.parallel_for(panels.parts, [&](std::int64_t task, int worker) {
        const int first = panels.begin(static_cast<int>(task));
        const int width = panels.size(static_cast<int>(task));
        float* panel =
            worker_scratch_[static_cast<std::size_t>(worker)].floats(kPanelRows * kPanelCols);
        const Split rows(width, kTileRows);
        for (int part = 0; part < depths.parts; ++part) {
            const int k = depths.begin(part);
            const int depth = depths.size(part);
            for (int r = 0; r < depth; ++r) {
                std::copy_n(w + std::ptrdiff_t{k + r} * in + first, width, panel + r * width);
            }
            TileLoops loops;
            loops.count = {1, 1, depth};
            loops.x_step = {0, 0, kLanes};
            loops.w_step = {0, 0, width};
            TileOperands op;
            op.w_row = 1;
            op.y_row = kLanes;
            op.accumulate = part > 0;
            for (int group = 0; group < cols.parts; ++group) {
                for (int tile = 0; tile < rows.parts; ++tile) {
                    const int row = rows.begin(tile);
                    if (group == 0) {
                        // This tile's share of the next panel.
                        const bool last = part + 1 == depths.parts;
                        const int next_row = last ? 0 : k + depth;
                        const int next_first = last ? first + width : first;
                        const int begin = kPanelRows * tile / rows.parts;
                        const int end = kPanelRows * (tile + 1) / rows.parts;
                        prefetch_rows<false>(w + std::ptrdiff_t{next_row + begin} * in + next_first,
                                             in, std::min(end, out - next_row) - begin,
                                             std::min(width, in - next_first));
                    }
                    op.w = panel + row;
                    for (int c = 0; c < cols.size(group); ++c) {
                        const std::ptrdiff_t block = cols.begin(group) + c;
                        op.x[c] = dy + (block * out + k) * kLanes;
                        op.y[c] = dx + (block * in + first + row) * kLanes;
                    }
                    tile_function(rows.size(tile), cols.size(group))(loops, op);
                }
            }
        }
    });
}

void CpuBackend::linear_backward_weights(const LinearShape& shape, int n, const float* x,
                                         const float* dy, float* dw, float* db) {
    const int blocks = block_count(n);
    const int in = shape.in_features;
    const int out = shape.out_features;
    const Split rows(out, kTileRows);
    const int panel_count = (in + kGradientCols - 1) / kGradientCols;
    pool_.parallel_for(panel_count, [&](std::int64_t task, int worker) {
        const int first = static_cast<int>(task) * kGradientCols;
        const int width = std::min(kGradientCols, in - first);
        const int images = blocks * kLanes;
        // x of these features with the image as the slowest dimension, [images][kGradientCols],
        // then space for the last columns of a row tile where they fill no vector.
        float* panel = worker_scratch_[static_cast<std::size_t>(worker)].floats(
            std::int64_t{images} * kGradientCols + kTileRows * kLanes);
        float* spill = panel + std::ptrdiff_t{images} * kGradientCols;
        for (int block = 0; block < blocks; ++block) {
            const float* from = x + (std::ptrdiff_t{block} * in + first) * kLanes;
            float* to = panel + std::ptrdiff_t{block} * kLanes * kGradientCols;
            for (int f = 0; f < width; ++f) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    to[lane * kGradientCols + f] = from[f * kLanes + lane];
                }
            }
            for (int f = width; f < kGradientCols; ++f) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    to[lane * kGradientCols + f] = 0.0f;
                }
            }
        }
        TileLoops loops;
        loops.count = {1, blocks, kLanes};
        loops.x_step = {0, std::ptrdiff_t{kLanes} * kGradientCols, kGradientCols};
        loops.w_step = {0, std::ptrdiff_t{out} * kLanes, 1};
        const int whole = width / kLanes;
        const int rest = width % kLanes;
        for (int tile = 0; tile < rows.parts; ++tile) {
            const int row = rows.begin(tile);
            const int row_count = rows.size(tile);
            TileOperands op;
            op.w = dy + row * kLanes;
            op.w_row = kLanes;
            op.y_row = in;
            float* to = dw + std::ptrdiff_t{row} * in + first;
            if (tile + 1 < rows.parts) {
                prefetch_rows<true>(to + std::ptrdiff_t{row_count} * in, in, rows.size(tile + 1),
                                    width);
            }
            if (whole > 0) {
                for (int c = 0; c < whole; ++c) {
                    op.x[c] = panel + c * kLanes;
                    op.y[c] = to + c * kLanes;
                }
                tile_function(row_count, whole)(loops, op);
            }
            if (rest > 0) {
                op.x[0] = panel + whole * kLanes;
                op.y[0] = spill;
                op.y_row = kLanes;
                tile_function(row_count, 1)(loops, op);
                for (int r = 0; r < row_count; ++r) {
                    std::copy_n(spill + r * kLanes, rest,
                                to + std::ptrdiff_t{r} * in + whole * kLanes);
                }
            }
        }
    });
    for (int o = 0; o < out; ++o) {
        float sum = 0.0f;
        for (int block = 0; block < blocks; ++block) {
            const float* d = dy + (std::ptrdiff_t{block} * out + o) * kLanes;
            for (int lane = 0; lane < kLanes; ++lane) {
                sum += d[lane];
            }
        }
        db[o] = sum;
    }
}

}  // namespace gyre::cpu
