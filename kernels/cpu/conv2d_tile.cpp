// Both directions of a convolution by the register tile (correlation.hpp).
//
// The input gradient runs over dy with flipped weights, once for each of the s*s phases of a
// strided convolution, so no work goes to zeros between strided pixels. Windows that lie wholly in
// the padding along an axis are skipped.
#include <algorithm>
#include <vector>

#include "kernels/cpu/conv2d_direction.hpp"
#include "kernels/cpu/correlation.hpp"

namespace gyre::cpu {
namespace {

struct Window {
    int first, last;  // [first, last)
};

Window forward_window(int at, int extent, const Conv2dShape& shape) {
    const int first = at * shape.stride - shape.padding;
    return {std::max(0, -first), std::min(shape.kernel, extent - first)};
}

class TileForward final : public Direction {
 public:
    TileForward(const Conv2dShape& shape, int threads)
        : Direction(forward_plane(shape)), correlation_(plan(shape, plane(), threads)) {}
    void run(const Context& context, const float* x, const float* w, const float* bias,
             float* y) const override {
        correlation_.run(context.pool, x, w, bias, y);
    }

 private:
    static Correlation plan(const Conv2dShape& shape, const PaddedPlane& plane, int threads);
    const Correlation correlation_;
};

Correlation TileForward::plan(const Conv2dShape& shape, const PaddedPlane& plane, int threads) {
    const Shape out = shape.out();
    const std::ptrdiff_t window = std::ptrdiff_t{shape.kernel} * shape.kernel;
    Correlation result(shape.in.channels, shape.out_channels,
                       {.w_row = window * shape.in.channels,
                        .w_channel = window,
                        .w_line = shape.kernel,
                        .x_channel = plane.plane_floats(),
                        .x_line = plane.line_floats(),
                        .y_channel = out.plane_elems() * kLanes});
    std::vector<Pixel> pixels;
    for (int oh = 0; oh < out.height; ++oh) {
        const Window i = forward_window(oh, shape.in.height, shape);
        for (int ow = 0; ow < out.width; ++ow) {
            const Window j = forward_window(ow, shape.in.width, shape);
            pixels.push_back({(std::ptrdiff_t{oh} * plane.width + ow) * shape.stride * kLanes,
                              (std::ptrdiff_t{oh} * out.width + ow) * kLanes, i.first, i.last,
                              j.first, j.last});
        }
    }
    result.append(pixels);
    result.share_out(threads);
    return result;
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
    // The first input position of the phase.
    int first(const Conv2dShape& shape) const {
        return ((phase - shape.padding) % shape.stride + shape.stride) % shape.stride;
    }
    // Input position `at` reads dy from `line(at)` on, j lines further for window position j.
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
    void run(const Context& context, const float* dy, const float* weights, const float*,
             float* dx) const override {
        for (const PhaseGradient& phase : phases_) {
            phase.correlation.run(context.pool, dy, weights + phase.first_weight, nullptr, dx);
        }
    }

 private:
    // The pixels of one pair of phases.
    struct PhaseGradient {
        Phase rows, cols;
        Correlation correlation;
        std::int64_t first_weight;  // of those that are flipped, [c][o][line][column]
    };
    const Conv2dShape shape_;
    std::vector<PhaseGradient> phases_;
};

TileBackward::TileBackward(const Conv2dShape& shape, int threads)
    : Direction(gradient_plane(shape)), shape_(shape) {
    std::int64_t weights = 0;
    for (int a = 0; a < shape.stride; ++a) {
        for (int b = 0; b < shape.stride; ++b) {
            const Phase rows(shape, a), cols(shape, b);
            const std::vector<Pixel> pixels = phase_pixels(shape, plane(), rows, cols);
            if (pixels.empty()) {
                continue;
            }
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

std::unique_ptr<Direction> make_tile_forward(const Conv2dShape& shape, int threads) {
    return std::make_unique<TileForward>(shape, threads);
}
std::unique_ptr<Direction> make_tile_backward(const Conv2dShape& shape, int threads) {
    return std::make_unique<TileBackward>(shape, threads);
}

}  // namespace gyre::cpu
