// Both directions of a convolution by the register tile (correlation.hpp).
//
// The input gradient runs over dy with flipped weights, once for each of the s*s phases of a
// strided convolution, so no work is spent on zeros between strided pixels. Window positions that
// are entirely in the padding along an axis are skipped.
#include <algorithm>
#include <vector>

#include "kernels/cpu/conv2d_direction.hpp"
#include "kernels/cpu/correlation.hpp"

namespace gyre::cpu {
namespace {

struct Window {
    int first, last;  // [first, last)
};

class TileForward final : public Direction {
 public:
    TileForward(const Conv2dShape& shape, const Conv2dTail& tail, int threads)
        : Direction(forward_plane(shape)),
          tail_(tail),
          out_(shape.out()),
          chunks_(tail.has_windows() ? window_rows(shape.out_channels, threads)
                                     : Split(out_.height, out_.height)),
          correlation_(shape.in.channels, shape.out_channels, steps(shape),
                       tail.relu() && !tail.has_windows()) {
        if (tail.has_windows()) {
            append_chunks(shape);
        } else {
            append_all(shape, threads);
        }
    }

    std::int64_t worker_floats() const override {
        return tail_.has_windows() ? kTileRows * chunk_floats() : 0;
    }
    void run(const Context& context, const Input& in, const Conv2dTail::Output& to) const override;

 private:
    Window window(const Conv2dShape& shape, int at, int extent) const {
        const int first = at * shape.stride - shape.padding;
        return {std::max(0, -first), std::min(shape.kernel, extent - first)};
    }
    Pixel pixel(const Conv2dShape& shape, int oh, int ow, std::ptrdiff_t y) const {
        const Window i = window(shape, oh, shape.in.height);
        const Window j = window(shape, ow, shape.in.width);
        return {
            oh * shape.stride * plane().line_floats() + std::ptrdiff_t{ow} * shape.stride * kLanes,
            y * kLanes,
            i.first,
            i.last,
            j.first,
            j.last};
    }
    Correlation::Steps steps(const Conv2dShape& shape) const;
    void append_all(const Conv2dShape& shape, int threads);

    // If the tail has windows, a part computes the outputs that some rows of windows read into a
    // worker's memory, where they are pooled while in the cache. Unread outputs are skipped.
    void run_part(const Correlation::Part& part, const Input& in, const Conv2dTail::Output& to,
                  float* outputs) const;
    Split window_rows(int channels, int threads) const;
    void append_chunks(const Conv2dShape& shape);
    // Floats of one channel between the first and last output read by a row of windows or a chunk.
    std::ptrdiff_t line_floats() const { return seen(tail_.out().width) * kLanes; }
    std::ptrdiff_t chunk_floats() const { return seen(chunks_.largest()) * line_floats(); }
    std::ptrdiff_t seen(int windows) const {
        const Windows all = tail_.windows(0);
        return std::ptrdiff_t{windows - 1} * all.stride + all.kernel;
    }

    const Conv2dTail& tail_;
    const Shape out_;
    const Split chunks_;  // rows of windows
    Correlation correlation_;
};

Correlation::Steps TileForward::steps(const Conv2dShape& shape) const {
    const std::ptrdiff_t window = std::ptrdiff_t{shape.kernel} * shape.kernel;
    return {.w_row = window * shape.in.channels,
            .w_channel = window,
            .w_line = shape.kernel,
            .x_channel = plane().plane_floats(),
            .x_line = plane().line_floats(),
            .y_channel = tail_.has_windows() ? chunk_floats() : out_.plane_elems() * kLanes};
}

void TileForward::append_all(const Conv2dShape& shape, int threads) {
    std::vector<Pixel> pixels;
    for (int oh = 0; oh < out_.height; ++oh) {
        for (int ow = 0; ow < out_.width; ++ow) {
            pixels.push_back(pixel(shape, oh, ow, std::ptrdiff_t{oh} * out_.width + ow));
        }
    }
    correlation_.append(pixels);
    correlation_.share_out(threads);
}

Split TileForward::window_rows(int channels, int threads) const {
    const Windows all = tail_.windows(0);
    // Rows read by the windows of two chunks are computed twice. If there are any, chunks may fill
    // half a level-2 cache, otherwise a level-1 cache.
    const std::ptrdiff_t most_floats = all.stride < all.kernel ? 64 * 1024 : 6 * 1024;
    const std::ptrdiff_t lines = most_floats / (kTileRows * line_floats());
    const auto fit = static_cast<int>((lines - all.kernel) / all.stride + 1);
    const Split row_tiles(channels, kTileRows);
    const int wanted = Correlation::wanted_tasks(threads);
    const int shared = all.rows * row_tiles.parts / wanted;
    return {all.rows, std::clamp(std::min(fit, shared), 1, all.rows)};
}

void TileForward::append_chunks(const Conv2dShape& shape) {
    const Windows all = tail_.windows(0);
    const auto is_seen = [&](int at) { return at % all.stride < all.kernel; };
    for (int chunk = 0; chunk < chunks_.parts; ++chunk) {
        const int first = chunks_.begin(chunk) * all.stride;
        std::vector<Pixel> pixels;
        for (int row = 0; row < seen(chunks_.size(chunk)); ++row) {
            for (int ow = 0; ow < seen(all.cols); ++ow) {
                if (is_seen(row) && is_seen(ow)) {
                    pixels.push_back(pixel(shape, first + row, ow, row * seen(all.cols) + ow));
                }
            }
        }
        correlation_.append(pixels);
        correlation_.end_chunk();
    }
}

void TileForward::run(const Context& context, const Input& in, const Conv2dTail::Output& to) const {
    if (!tail_.has_windows()) {
        correlation_.run(context.pool, in.padded, in.weights, in.bias, to.y);
        return;
    }
    // Parts are small: group as many as leave enough work for each thread.
    const auto parts = static_cast<int>(correlation_.tasks());
    const Split shares(parts,
                       std::max(1, parts / Correlation::wanted_tasks(context.pool.threads())));
    context.pool.parallel_for(shares.parts, [&](std::int64_t task, int worker) {
        const auto share = static_cast<int>(task);
        for (int i = shares.begin(share); i < shares.begin(share + 1); ++i) {
            run_part(correlation_.part(i), in, to, context.workspace.worker(worker));
        }
    });
}

void TileForward::run_part(const Correlation::Part& part, const Input& in,
                           const Conv2dTail::Output& to, float* outputs) const {
    correlation_.run(part, in.padded, in.weights, in.bias, outputs);
    Windows windows = tail_.windows(line_floats());
    windows.rows = chunks_.size(part.chunk);
    for (int r = 0; r < part.rows; ++r) {
        tail_.finish(to, part.row + r, chunks_.begin(part.chunk), windows,
                     outputs + r * chunk_floats());
    }
}

// The window positions along one axis that meet input pixels of one phase (a remainder modulo the
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
    // The first input position of the phase.
    int first(const Conv2dShape& shape) const {
        return ((phase - shape.padding) % shape.stride + shape.stride) % shape.stride;
    }
    // Input position `at` reads dy from `line(at)`, and j lines further down for window position j.
    int line(const Conv2dShape& shape, int at) const {
        return (at + shape.padding) / shape.stride - (count - 1);
    }
    Window window(int line, int dy_extent) const {
        return {std::max(0, -line), std::min(count, dy_extent - line)};
    }
};

PaddedPlane gradient_plane(const Conv2dShape& shape) {
    const int before = (shape.kernel + shape.stride - 1) / shape.stride - 1;
    const auto extent = [&](int in, int out) {
        return before + std::max(out, (in - 1 + shape.padding) / shape.stride + 1);
    };
    const Shape out = shape.out();
    return {extent(shape.in.height, out.height), extent(shape.in.width, out.width), before};
}

std::vector<Pixel> phase_pixels(const Conv2dShape& shape, const PaddedPlane& plane,
                                const Phase& rows, const Phase& cols) {
    const Shape out = shape.out();
    std::vector<Pixel> pixels;
    for (int ih = rows.first(shape); ih < shape.in.height; ih += shape.stride) {
        const int line = rows.line(shape, ih);
        const Window i = rows.window(line, out.height);
        for (int iw = cols.first(shape); iw < shape.in.width; iw += shape.stride) {
            const int column = cols.line(shape, iw);
            const Window j = cols.window(column, out.width);
            pixels.push_back({(line + plane.before) * plane.line_floats() +
                                  (column + plane.before) * std::ptrdiff_t{kLanes},
                              (std::ptrdiff_t{ih} * shape.in.width + iw) * kLanes, i.first, i.last,
                              j.first, j.last});
        }
    }
    return pixels;
}

class TileBackward final : public Direction {
 public:
    TileBackward(const Conv2dShape& shape, int threads);
    std::int64_t weight_floats() const override { return shape_.weight_elems(); }
    const float* arrange(const float* w, float* to) const override;
    void run(const Context& context, const Input& in, const Conv2dTail::Output& to) const override {
        for (const PhaseGradient& phase : phases_) {
            phase.correlation.run(context.pool, in.padded, in.weights + phase.first_weight, in.bias,
                                  to.y);
        }
    }

 private:
    // The input pixels of one pair of phases.
    struct PhaseGradient {
        Phase rows, cols;
        Correlation correlation;
        std::int64_t first_weight;  // first of its flipped weights, [c][o][line][column]
    };
    const Conv2dShape shape_;
    std::vector<PhaseGradient> phases_;
};

TileBackward::TileBackward(const Conv2dShape& shape, int threads)
    : Direction(gradient_plane(shape)), shape_(shape) {
    std::int64_t weights = 0;
    // Each input position has exactly one phase; with a large stride some phases have no positions.
    for (int ih = 0; ih < std::min(shape.stride, shape.in.height); ++ih) {
        for (int iw = 0; iw < std::min(shape.stride, shape.in.width); ++iw) {
            const Phase rows(shape, (ih + shape.padding) % shape.stride);
            const Phase cols(shape, (iw + shape.padding) % shape.stride);
            const std::vector<Pixel> pixels = phase_pixels(shape, plane(), rows, cols);
            const std::ptrdiff_t window = std::ptrdiff_t{rows.count} * cols.count;
            Correlation correlation(shape.out_channels, shape.in.channels,
                                    {.w_row = shape.out_channels * window,
                                     .w_channel = window,
                                     .w_line = cols.count,
                                     .x_channel = plane().plane_floats(),
                                     .x_line = plane().line_floats(),
                                     .y_channel = shape.in.plane_elems() * kLanes});
            correlation.append(pixels);
            correlation.share_out(threads);
            phases_.push_back({rows, cols, std::move(correlation), weights});
            weights += window * shape.in.channels * shape.out_channels;
        }
    }
}

const float* TileBackward::arrange(const float* w, float* to) const {
    for (const PhaseGradient& phase : phases_) {
        float* flipped = to + phase.first_weight;
        for (int c = 0; c < shape_.in.channels; ++c) {
            for (int o = 0; o < shape_.out_channels; ++o) {
                const float* from = w + (std::ptrdiff_t{o} * shape_.in.channels + c) *
                                            shape_.kernel * shape_.kernel;
                for (int i = 0; i < phase.rows.count; ++i) {
                    for (int j = 0; j < phase.cols.count; ++j) {
                        *flipped++ = from[phase.rows.kernel_at(shape_, i) * shape_.kernel +
                                          phase.cols.kernel_at(shape_, j)];
                    }
                }
            }
        }
    }
    return to;
}

}  // namespace

std::unique_ptr<Direction> make_tile_forward(const Conv2dShape& shape, const Conv2dTail& tail,
                                             int threads) {
    return std::make_unique<TileForward>(shape, tail, threads);
}
std::unique_ptr<Direction> make_tile_backward(const Conv2dShape& shape, int threads) {
    return std::make_unique<TileBackward>(shape, threads);
}

}  // namespace gyre::cpu
