#include "kernels/cpu/winograd.hpp"

#include <algorithm>

#include "kernels/cpu/padding.hpp"
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

// transformed [16][out.channels][in.channels] = G w G^T.
void transform_weights(const Correlation3x3& corr, float* transformed) {
    const std::ptrdiff_t plane = std::ptrdiff_t{corr.out.channels} * corr.in.channels;
    for (int o = 0; o < corr.out.channels; ++o) {
        for (int c = 0; c < corr.in.channels; ++c) {
            const float* from = corr.w + o * corr.w_out + c * corr.w_in;
            float w[9], columns[12], points[kPoints];
            std::copy_n(from, 9, w);
            if (corr.flipped) {
                std::reverse(w, w + 9);
            }
            for (int j = 0; j < 3; ++j) {
                transform_weights_1d(w + j, 3, columns + j, 3);
            }
            for (int i = 0; i < 4; ++i) {
                transform_weights_1d(columns + 3 * i, 1, points + 4 * i, 1);
            }
            for (int point = 0; point < kPoints; ++point) {
                transformed[point * plane + std::ptrdiff_t{o} * corr.in.channels + c] =
                    points[point];
            }
        }
    }
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

// y tile of rows x cols (1 or 2) = A^T points A + bias.
void transform_output(const float* points, std::ptrdiff_t step, float bias, float* y,
                      std::ptrdiff_t line, int rows, int cols) {
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec half[2][4];
        for (int j = 0; j < 4; ++j) {
            const auto m = [&](int i) { return load(points + (4 * i + j) * step + lane); };
            half[0][j] = m(0) + m(1) + m(2);
            half[1][j] = m(1) - m(2) - m(3);
        }
        for (int i = 0; i < rows; ++i) {
            const Vec left = half[i][0] + half[i][1] + half[i][2];
            const Vec right = half[i][1] - half[i][2] - half[i][3];
            store(y + i * line + lane, left + broadcast(bias));
            if (cols == 2) {
                store(y + i * line + kLanes + lane, right + broadcast(bias));
            }
        }
    }
}

}  // namespace

void correlate_3x3(ThreadPool& pool, const Correlation3x3& corr, int blocks, const float* x,
                   float* y, WinogradScratch scratch) {
    const int in_channels = corr.in.channels;
    const int tiles_across = (corr.out.width + 1) / 2;
    const int tiles_down = (corr.out.height + 1) / 2;
    const PaddedPlane plane{2 * tiles_down + 2, 2 * tiles_across + 2, corr.padding};
    const std::ptrdiff_t line = std::ptrdiff_t{plane.width} * kLanes;
    const std::ptrdiff_t weights_plane = std::ptrdiff_t{corr.out.channels} * in_channels;
    float* weights = scratch.weights.floats(kPoints * weights_plane);
    float* padded = scratch.padded.floats(in_channels * plane.plane_floats());
    transform_weights(corr, weights);

    // A task is a group of neighbouring tiles. Its transformed input [16][channel][tile][lane]
    // stays in the level-2 cache while every row tile of output channels goes over it.
    const Split groups(tiles_across * tiles_down, kTileCols);
    const Split rows(corr.out.channels, kTileRows);
    constexpr std::ptrdiff_t kGroupFloats = kTileCols * kLanes;
    const std::ptrdiff_t input_step = in_channels * kGroupFloats;
    constexpr std::ptrdiff_t kOutputStep = kTileRows * kGroupFloats;
    for (int block = 0; block < blocks; ++block) {
        pad_block(pool, corr.in, plane, x + block * corr.in.elems() * kLanes, padded);
        float* out = y + block * corr.out.elems() * kLanes;
        pool.parallel_for(groups.parts, [&](std::int64_t task, int worker) {
            const int first = groups.begin(static_cast<int>(task));
            const int count = groups.size(static_cast<int>(task));
            float* input = scratch.workers[static_cast<std::size_t>(worker)].floats(
                kPoints * (input_step + kOutputStep));
            float* output = input + kPoints * input_step;
            for (int c = 0; c < in_channels; ++c) {
                for (int t = 0; t < count; ++t) {
                    const int down = (first + t) / tiles_across,
                              across = (first + t) % tiles_across;
                    transform_input(padded + c * plane.plane_floats() + 2 * down * line +
                                        std::ptrdiff_t{2} * across * kLanes,
                                    line, input + c * kGroupFloats + t * kLanes, input_step);
                }
            }
            TileLoops loops;
            loops.count = {1, 1, in_channels};
            loops.x_step = {0, 0, kGroupFloats};
            loops.w_step = {0, 0, 1};
            TileOperands op;
            op.w_row = in_channels;
            op.y_row = kGroupFloats;
            for (int part = 0; part < rows.parts; ++part) {
                const int row = rows.begin(part);
                const TileFunction run = tile_function(rows.size(part), count);
                for (int point = 0; point < kPoints; ++point) {
                    op.w = weights + point * weights_plane + std::ptrdiff_t{row} * in_channels;
                    for (int t = 0; t < count; ++t) {
                        op.x[t] = input + point * input_step + t * kLanes;
                        op.y[t] = output + point * kOutputStep + t * kLanes;
                    }
                    run(loops, op);
                }
                for (int r = 0; r < rows.size(part); ++r) {
                    float* channel = out + (row + r) * corr.out.plane_elems() * kLanes;
                    for (int t = 0; t < count; ++t) {
                        const int oh = 2 * ((first + t) / tiles_across);
                        const int ow = 2 * ((first + t) % tiles_across);
                        transform_output(
                            output + r * kGroupFloats + t * kLanes, kOutputStep,
                            corr.bias ? corr.bias[row + r] : 0.0f,
                            channel + (std::ptrdiff_t{oh} * corr.out.width + ow) * kLanes,
                            std::ptrdiff_t{corr.out.width} * kLanes,
                            std::min(2, corr.out.height - oh), std::min(2, corr.out.width - ow));
                    }
                }
            }
        });
    }
}

}  // namespace gyre::cpu
