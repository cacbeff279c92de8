// 2-D convolution (cross-correlation, as PyTorch's Conv2d) on the CPU: forward, gradient with
// respect to the input, gradient with respect to weights and bias.
//
//   forward:  y[o][oh][ow] = b[o] + sum_{c,kh,kw} w[o][c][kh][kw] x[c][oh*s - p + kh][ow*s - p +
//   kw] data:     dx[c][ih][iw] = sum_{o,kh,kw} w[o][c][kh][kw] dy[o][(ih + p - kh)/s][(iw + p -
//   kw)/s]
//             over the kh, kw for which the divisions leave no remainder
//   weights:  dw[o][c][kh][kw] = sum_{n,oh,ow} dy[o][oh][ow] x[c][oh*s - p + kh][ow*s - p + kw]
//             db[o] = sum_{n,oh,ow} dy[o][oh][ow]
//
// Forward and data gradient are the same correlation: the latter runs over dy with flipped
// weights, once for each of the s*s phases of a strided convolution, so no work goes to zeros
// between strided pixels. Where a window hangs over the edge, it reads a zero-padded copy of one
// block of images, and windows that lie wholly in the padding along an axis are skipped. Where it
// pays, both go to winograd.cpp instead.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/cpu/padding.hpp"
#include "kernels/cpu/tile.hpp"
#include "kernels/cpu/winograd.hpp"

namespace gyre::cpu {
namespace {

// An output pixel: where it reads (at window position 0, 0) and writes, in floats, and the window
// positions [i0, i1) x [j0, j1) that do not lie in the padding.
struct Pixel {
    std::ptrdiff_t x, y;
    int i0, i1, j0, j1;
};

struct Window {
    int first, last;  // [first, last)
};

// One correlation over one block of images.
struct Correlation {
    std::vector<Pixel> pixels;
    int in_channels = 0, out_channels = 0;
    const float* w = nullptr;
    std::ptrdiff_t w_row = 0, w_channel = 0, w_line = 0;
    std::ptrdiff_t x_channel = 0, x_line = 0, y_channel = 0;
    const float* bias = nullptr;
};

void correlate(ThreadPool& pool, const Correlation& corr, const float* x, float* y) {
    const Split rows(corr.out_channels, kTileRows);
    const Split cols(static_cast<int>(corr.pixels.size()), kTileCols);
    // Row tiles are the tasks; where they are too few for the threads, pixels are divided as well.
    const int wanted = pool.threads() == 1 ? 1 : 4 * pool.threads();
    const Split chunks(cols.parts, std::max(1, cols.parts * rows.parts / wanted));
    pool.parallel_for(std::int64_t{rows.parts} * chunks.parts, [&](std::int64_t task, int) {
        const int row_part = static_cast<int>(task / chunks.parts);
        const int chunk = static_cast<int>(task % chunks.parts);
        const int row = rows.begin(row_part);
        const int row_count = rows.size(row_part);
        TileLoops loops;
        loops.x_step = {corr.x_channel, corr.x_line, kLanes};
        loops.w_step = {corr.w_channel, corr.w_line, 1};
        TileOperands op;
        op.w_row = corr.w_row;
        op.y_row = corr.y_channel;
        op.start = corr.bias ? corr.bias + row : nullptr;
        for (int part = chunks.begin(chunk); part < chunks.begin(chunk + 1); ++part) {
            const Pixel* pixel = corr.pixels.data() + cols.begin(part);
            const int col_count = cols.size(part);
            Pixel all = pixel[0];
            for (int c = 1; c < col_count; ++c) {
                all.i0 = std::min(all.i0, pixel[c].i0);
                all.i1 = std::max(all.i1, pixel[c].i1);
                all.j0 = std::min(all.j0, pixel[c].j0);
                all.j1 = std::max(all.j1, pixel[c].j1);
            }
            const std::ptrdiff_t skip = all.i0 * corr.x_line + all.j0 * kLanes;
            for (int c = 0; c < col_count; ++c) {
                op.x[c] = x + pixel[c].x + skip;
                op.y[c] = y + pixel[c].y + row * corr.y_channel;
            }
            op.w = corr.w + row * corr.w_row + all.i0 * corr.w_line + all.j0;
            loops.count = {corr.in_channels, std::max(0, all.i1 - all.i0),
                           std::max(0, all.j1 - all.j0)};
            tile_function(row_count, col_count)(loops, op);
        }
    });
}

Window forward_window(int at, int extent, const Conv2dShape& shape) {
    const int first = at * shape.stride - shape.padding;
    return {std::max(0, -first), std::min(shape.kernel, extent - first)};
}

PaddedPlane forward_plane(const Conv2dShape& shape) {
    return {shape.in.height + 2 * shape.padding, shape.in.width + 2 * shape.padding, shape.padding};
}

// The window positions of one axis that meet input pixels of one phase (a remainder modulo the
// stride): kernel positions phase + stride * (count - 1 - j), j in [0, count).
struct Phase {
    int phase, count;
    Phase(const Conv2dShape& shape, int phase_)
        : phase(phase_),
          count(phase_ < shape.kernel ? (shape.kernel - phase_ + shape.stride - 1) / shape.stride
                                      : 0) {}
    int kernel_at(const Conv2dShape& shape, int j) const {
        return phase + shape.stride * (count - 1 - j);
    }
    // Input position `at` reads dy from `line(at)` on, j lines further for window position j.
    int line(const Conv2dShape& shape, int at) const {
        return (at + shape.padding) / shape.stride - (count - 1);
    }
    Window window(int line, int dy_extent) const {
        return {std::max(0, -line), std::min(count, dy_extent - line)};
    }
};

// The gradient with respect to the input, one correlation for each phase. Flipped weights go to
// `flipped` (as many floats as w), [c][o][line][column] within each phase.
std::vector<Correlation> data_correlations(const Conv2dShape& shape, const PaddedPlane& plane,
                                           const float* w, float* flipped) {
    const Shape out = shape.out();
    const int s = shape.stride;
    std::vector<Correlation> result;
    for (int a = 0; a < s; ++a) {
        for (int b = 0; b < s; ++b) {
            const Phase rows(shape, a), cols(shape, b);
            const int window = rows.count * cols.count;
            Correlation corr;
            corr.in_channels = shape.out_channels;
            corr.out_channels = shape.in.channels;
            corr.w = flipped;
            corr.w_row = std::ptrdiff_t{shape.out_channels} * window;
            corr.w_channel = window;
            corr.w_line = cols.count;
            corr.x_channel = plane.plane_floats();
            corr.x_line = std::ptrdiff_t{plane.width} * kLanes;
            corr.y_channel = shape.in.plane_elems() * kLanes;
            for (int c = 0; c < shape.in.channels; ++c) {
                for (int o = 0; o < shape.out_channels; ++o) {
                    const float* from = w + (std::ptrdiff_t{o} * shape.in.channels + c) *
                                                shape.kernel * shape.kernel;
                    for (int i = 0; i < rows.count; ++i) {
                        for (int j = 0; j < cols.count; ++j) {
                            *flipped++ = from[rows.kernel_at(shape, i) * shape.kernel +
                                              cols.kernel_at(shape, j)];
                        }
                    }
                }
            }
            const auto first = [&](int phase) { return ((phase - shape.padding) % s + s) % s; };
            for (int ih = first(a); ih < shape.in.height; ih += s) {
                const int line = rows.line(shape, ih);
                const Window i = rows.window(line, out.height);
                for (int iw = first(b); iw < shape.in.width; iw += s) {
                    const int column = cols.line(shape, iw);
                    const Window j = cols.window(column, out.width);
                    corr.pixels.push_back(
                        {(line + plane.before) * corr.x_line + (column + plane.before) * kLanes,
                         (std::ptrdiff_t{ih} * shape.in.width + iw) * kLanes, i.first, i.last,
                         j.first, j.last});
                }
            }
            if (!corr.pixels.empty()) {
                result.push_back(std::move(corr));
            }
        }
    }
    return result;
}

// The register tile of the weight gradient: sums over pixels, blocks and lanes for `R` output
// channels and `T` window positions, 2*R*T flops for every R + T loads.
struct GradientOperands {
    int blocks = 0;
    const float* x = nullptr;
    std::ptrdiff_t x_block = 0;
    const std::ptrdiff_t* tap = nullptr;  // [T], offsets of the window positions
    const float* dy = nullptr;
    std::ptrdiff_t dy_block = 0, dy_row = 0;
    const std::vector<std::ptrdiff_t>* pixels = nullptr;  // where each output pixel reads x
    float* dw = nullptr;                                  // dw[r * dw_row + t] += sum
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
void gradient_tile(const GradientOperands& op) {
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

constexpr int kGradientTile = kTileRows > 4 ? 5 : 3;  // rows and taps; fits 32 or 16 registers
using GradientFunction = void (*)(const GradientOperands&);

template <int... Index>
constexpr std::array<GradientFunction, sizeof...(Index)> make_gradient_table(
    std::integer_sequence<int, Index...>) {
    return {&gradient_tile<Index / kGradientTile + 1, Index % kGradientTile + 1>...};
}
constexpr auto kGradientTable =
    make_gradient_table(std::make_integer_sequence<int, kGradientTile * kGradientTile>());

constexpr std::int64_t kPaddedGroupFloats = 1 << 20;  // padded copies held at a time: 4 MiB

}  // namespace

void CpuBackend::conv2d_forward(const Conv2dShape& shape, int n, const float* x, const float* w,
                                const float* b, float* y) {
    const Shape out = shape.out();
    if (winograd_pays(shape)) {
        const Correlation3x3 corr{shape.in, out, shape.padding, w, shape.in.channels * 9, 9,
                                  false,    b};
        correlate_3x3(pool_, corr, block_count(n), x, y, {scratch_, scratch_b_, worker_scratch_});
        return;
    }
    const PaddedPlane plane = forward_plane(shape);
    Correlation corr;
    corr.in_channels = shape.in.channels;
    corr.out_channels = shape.out_channels;
    corr.w = w;
    corr.w_line = shape.kernel;
    corr.w_channel = std::ptrdiff_t{shape.kernel} * shape.kernel;
    corr.w_row = corr.w_channel * shape.in.channels;
    corr.x_channel = plane.plane_floats();
    corr.x_line = std::ptrdiff_t{plane.width} * kLanes;
    corr.y_channel = out.plane_elems() * kLanes;
    corr.bias = b;
    corr.pixels.reserve(static_cast<std::size_t>(out.plane_elems()));
    for (int oh = 0; oh < out.height; ++oh) {
        const Window i = forward_window(oh, shape.in.height, shape);
        for (int ow = 0; ow < out.width; ++ow) {
            const Window j = forward_window(ow, shape.in.width, shape);
            corr.pixels.push_back({(std::ptrdiff_t{oh} * plane.width + ow) * shape.stride * kLanes,
                                   (std::ptrdiff_t{oh} * out.width + ow) * kLanes, i.first, i.last,
                                   j.first, j.last});
        }
    }
    const std::int64_t x_block = shape.in.elems() * kLanes;
    const std::int64_t y_block = out.elems() * kLanes;
    for (int block = 0; block < block_count(n); ++block) {
        const float* from = x + block * x_block;
        if (shape.padding > 0) {
            float* padded = scratch_.floats(shape.in.channels * plane.plane_floats());
            pad_block(pool_, shape.in, plane, from, padded);
            from = padded;
        }
        correlate(pool_, corr, from, y + block * y_block);
    }
}

void CpuBackend::conv2d_backward_data(const Conv2dShape& shape, int n, const float* dy,
                                      const float* w, float* dx) {
    const Shape out = shape.out();
    if (winograd_pays(shape)) {
        const Correlation3x3 corr{out,  shape.in, 2 - shape.padding, w, 9, shape.in.channels * 9,
                                  true, nullptr};
        correlate_3x3(pool_, corr, block_count(n), dy, dx, {scratch_, scratch_b_, worker_scratch_});
        return;
    }
    const int before = (shape.kernel + shape.stride - 1) / shape.stride - 1;
    const auto extent = [&](int in, int out_extent) {
        return before + std::max(out_extent, (in - 1 + shape.padding) / shape.stride + 1);
    };
    const PaddedPlane plane{extent(shape.in.height, out.height), extent(shape.in.width, out.width),
                            before};
    float* flipped = scratch_.floats(shape.weight_elems());
    float* padded = scratch_b_.floats(out.channels * plane.plane_floats());
    const std::vector<Correlation> phases = data_correlations(shape, plane, w, flipped);
    for (int block = 0; block < block_count(n); ++block) {
        pad_block(pool_, out, plane, dy + block * out.elems() * kLanes, padded);
        for (const Correlation& corr : phases) {
            correlate(pool_, corr, padded, dx + block * shape.in.elems() * kLanes);
        }
    }
}

void CpuBackend::conv2d_backward_weights(const Conv2dShape& shape, int n, const float* x,
                                         const float* dy, float* dw, float* db) {
    const Shape out = shape.out();
    const PaddedPlane plane = forward_plane(shape);
    const int blocks = block_count(n);
    const int taps = shape.in.channels * shape.kernel * shape.kernel;
    std::vector<std::ptrdiff_t> tap;
    for (int c = 0; c < shape.in.channels; ++c) {
        for (int kh = 0; kh < shape.kernel; ++kh) {
            for (int kw = 0; kw < shape.kernel; ++kw) {
                tap.push_back(c * plane.plane_floats() +
                              (std::ptrdiff_t{kh} * plane.width + kw) * kLanes);
            }
        }
    }
    std::vector<std::ptrdiff_t> pixels;
    for (int oh = 0; oh < out.height; ++oh) {
        for (int ow = 0; ow < out.width; ++ow) {
            pixels.push_back((std::ptrdiff_t{oh} * plane.width + ow) * shape.stride * kLanes);
        }
    }
    std::fill_n(dw, shape.weight_elems(), 0.0f);
    std::fill_n(db, shape.out_channels, 0.0f);

    const std::int64_t padded_block = shape.in.channels * plane.plane_floats();
    const int group =
        shape.padding == 0
            ? std::max(1, blocks)
            : static_cast<int>(std::max<std::int64_t>(1, kPaddedGroupFloats / padded_block));
    const Split rows(shape.out_channels, kGradientTile);
    const Split cols(taps, kGradientTile);
    for (int first = 0; first < blocks; first += group) {
        GradientOperands op;
        op.blocks = std::min(group, blocks - first);
        op.x = x + first * shape.in.elems() * kLanes;
        op.x_block = shape.in.elems() * kLanes;
        op.dy = dy + first * out.elems() * kLanes;
        op.dy_block = out.elems() * kLanes;
        op.dy_row = out.plane_elems() * kLanes;
        op.pixels = &pixels;
        op.dw_row = taps;
        if (shape.padding > 0) {
            float* padded = scratch_.floats(padded_block * std::min(group, blocks));
            for (int block = 0; block < op.blocks; ++block) {
                pad_block(pool_, shape.in, plane, op.x + block * op.x_block,
                          padded + block * padded_block);
            }
            op.x = padded;
            op.x_block = padded_block;
        }
        // Each task owns whole rows of dw, so the order of the sums never depends on the threads.
        pool_.parallel_for(rows.parts, [&](std::int64_t task, int) {
            const int row = rows.begin(static_cast<int>(task));
            const int row_count = rows.size(static_cast<int>(task));
            GradientOperands mine = op;
            mine.dy += row * op.dy_row;
            for (int part = 0; part < cols.parts; ++part) {
                mine.tap = tap.data() + cols.begin(part);
                mine.dw = dw + std::ptrdiff_t{row} * taps + cols.begin(part);
                const int entry = (row_count - 1) * kGradientTile + cols.size(part) - 1;
                kGradientTable[static_cast<std::size_t>(entry)](mine);
            }
            for (int r = 0; r < row_count; ++r) {
                Vec sum[4] = {};
                for (int block = 0; block < op.blocks; ++block) {
                    const float* d = mine.dy + block * op.dy_block + r * op.dy_row;
                    int turn = 0;  // several sums hide the latency of the additions
                    for (std::ptrdiff_t i = 0; i < op.dy_row; i += kVec) {
                        sum[turn++ % 4] += load(d + i);
                    }
                }
                db[row + r] += lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
            }
        });
    }
}

}  // namespace gyre::cpu
