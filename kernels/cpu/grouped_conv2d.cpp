// Grouped 2-D convolution on the CPU (formula: GroupedConv2dSpec), for groups of few channels, such
// as the one of a depthwise convolution. Each plane of a result is computed by itself, for one
// register of images at a time; products with the padding are left out. With s = stride and p =
// padding,
//
//   forward:  y[o][oh][ow] = b[o] + sum over c, kh, kw of w[o][c][kh][kw] x[c][oh*s - p + kh][...]
//   input:    dx[c][ih][iw] = sum over o, and kh, kw where the divisions leave no remainder, of
//                 w[o][c][kh][kw] dy[o][(ih + p - kh)/s][(iw + p - kw)/s]
//   weights:  dw[o][c][kh][kw] = sum over images, oh, ow of dy[o][oh][ow] x[c][oh*s - p + kh][...]
//
// Forward and input gradient are one correlation, which differs in the products of a row or column.
#include <algorithm>
#include <vector>

#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {
namespace {

// The products that a row (or column) of the result is a sum of: kernel rows kernel, kernel + step
// of kernel, ... with the source's rows at, at + step of at, ...
struct Products {
    int kernel, at, count;
};
struct Axis {
    int kernel_step, at_step;
    std::vector<Products> of;  // for each row of the result
};

Axis forward_axis(const Conv2dShape& s, int in, int out) {
    Axis axis{.kernel_step = 1, .at_step = 1, .of = {}};
    for (int to = 0; to < out; ++to) {
        const int corner = to * s.stride - s.padding;
        const int first = std::max(0, -corner), end = std::min(s.kernel, in - corner);
        axis.of.push_back({first, corner + first, std::max(0, end - first)});
    }
    return axis;
}

// Input row `to` is read by output row `at` with kernel row to + padding - at * stride.
Axis backward_axis(const Conv2dShape& s, int in, int out) {
    Axis axis{.kernel_step = s.stride, .at_step = -1, .of = {}};
    for (int to = 0; to < in; ++to) {
        const int beyond = to + s.padding - s.kernel;  // of the first row that is read
        const int first = beyond < 0 ? 0 : beyond / s.stride + 1;
        const int last = std::min((to + s.padding) / s.stride, out - 1);
        axis.of.push_back({to + s.padding - last * s.stride, last, std::max(0, last - first + 1)});
    }
    return axis;
}

// One direction: from planes of one shape to planes of another.
struct Correlation {
    Axis rows, columns;
    std::ptrdiff_t from_line, from_plane, to_plane;  // in floats
    int kernel;

    // Writes a plane of the result: `value` and the products of `channels` planes at `from` with as
    // many kernels, which are weight_step apart.
    void run(const float* from, int channels, const float* weights, std::ptrdiff_t weight_step,
             float value, float* to) const {
        for (const Products& row : rows.of) {
            for (const Products& column : columns.of) {
                for (int lane = 0; lane < kLanes; lane += kVec, to += kVec) {
                    Vec sum = broadcast(value);
                    for (int c = 0; c < channels; ++c) {
                        const float* const plane = from + c * from_plane + lane;
                        for (int i = 0; i < row.count; ++i) {
                            const float* const line =
                                plane + (row.at + i * rows.at_step) * from_line;
                            const float* const w =
                                weights + c * weight_step +
                                std::ptrdiff_t{row.kernel + i * rows.kernel_step} * kernel +
                                column.kernel;
                            for (int j = 0; j < column.count; ++j) {
                                sum = multiply_add(
                                    w[j * columns.kernel_step],
                                    load(line +
                                         std::ptrdiff_t{column.at + j * columns.at_step} * kLanes),
                                    sum);
                            }
                        }
                    }
                    store(to, sum);
                }
            }
        }
    }
};

class GroupedConv2dOp final : public Op {
 public:
    GroupedConv2dOp(const Context& context, const Conv2dShape& shape)
        : context_(context),
          shape_(shape),
          out_(shape.out()),
          taps_(std::ptrdiff_t{shape.kernel} * shape.kernel),
          forward_(correlation(forward_axis, shape.in, out_)),
          backward_(correlation(backward_axis, out_, shape.in)) {
        context.workspace.reserve(0, (shape.group_inputs() * taps_ + 1) * kLanes);
    }

    OpNeeds needs() const override { return {}; }

    void forward(const Batch& batch, const OpIo& io) override {
        for_planes(batch, shape_.out_channels, [&](std::int64_t block, int o) {
            const int inputs = shape_.group_inputs(), group = o / shape_.group_outputs();
            forward_.run(
                io.x.f32() + (block * shape_.in.channels + group * inputs) * forward_.from_plane,
                inputs, io.params[0].f32() + o * inputs * taps_, taps_, io.params[1].f32()[o],
                io.y.f32() + (block * out_.channels + o) * forward_.to_plane);
        });
    }

    void backward_params(const Batch& batch, const OpIo& io) override {
        context_.pool.parallel_for(out_.channels, [&](std::int64_t o, int worker) {
            add_gradients(batch, io, static_cast<int>(o), context_.workspace.worker(worker));
        });
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        for_planes(batch, shape_.in.channels, [&](std::int64_t block, int c) {
            const int inputs = shape_.group_inputs(), outputs = shape_.group_outputs();
            const int group = c / inputs, first = group * outputs;
            backward_.run(
                io.dy.f32() + (block * out_.channels + first) * backward_.from_plane, outputs,
                io.params[0].f32() + (std::ptrdiff_t{first} * inputs + c % inputs) * taps_,
                inputs * taps_, 0.0f,
                io.dx.f32() + (block * shape_.in.channels + c) * backward_.to_plane);
        });
    }

 private:
    Correlation correlation(Axis (*axis)(const Conv2dShape&, int, int), const Shape& from,
                            const Shape& to) const {
        const Shape &in = shape_.in, out = shape_.out();
        return {.rows = axis(shape_, in.height, out.height),
                .columns = axis(shape_, in.width, out.width),
                .from_line = std::ptrdiff_t{from.width} * kLanes,
                .from_plane = from.plane_elems() * kLanes,
                .to_plane = to.plane_elems() * kLanes,
                .kernel = shape_.kernel};
    }
    // Calls body(block, channel) for each plane of all blocks.
    template <typename Body>
    void for_planes(const Batch& batch, int channels, Body&& body) const {
        context_.pool.parallel_for(std::int64_t{block_count(batch.n)} * channels,
                                   [&](std::int64_t plane, int) {
                                       body(plane / channels, static_cast<int>(plane % channels));
                                   });
    }
    // The gradients of output channel o's weights and bias. sums: [weights + 1][kLanes]; a row's
    // products are added up first, so that errors grow with rows instead of pixels.
    void add_gradients(const Batch& batch, const OpIo& io, int o, float* sums) const {
        const std::ptrdiff_t weights = shape_.group_inputs() * taps_;
        std::fill_n(sums, (weights + 1) * kLanes, 0.0f);
        for (std::ptrdiff_t block = 0; block < block_count(batch.n); ++block) {
            for (int lane = 0; lane < kLanes; lane += kVec) {
                add_block(io, block, o, lane, sums);
            }
        }
        for (std::ptrdiff_t i = 0; i < weights; ++i) {
            io.grads[0].f32()[o * weights + i] = lane_sum(sums + i * kLanes);
        }
        io.grads[1].f32()[o] = lane_sum(sums + weights * kLanes);
    }
    // Adds those of a register of a block's images, from `lane` on.
    void add_block(const OpIo& io, std::ptrdiff_t block, int o, int lane, float* sums) const {
        const int inputs = shape_.group_inputs(), first = o / shape_.group_outputs() * inputs;
        const auto add = [&](std::ptrdiff_t to, Vec row) {
            float* const at = sums + to * kLanes + lane;
            store(at, load(at) + row);
        };
        const float* dy = io.dy.f32() + (block * out_.channels + o) * forward_.to_plane + lane;
        const float* const x =
            io.x.f32() + (block * shape_.in.channels + first) * forward_.from_plane + lane;
        for (const Products& row : forward_.rows.of) {
            Vec of_bias = {};
            for (int i = 0; i < out_.width; ++i) {
                of_bias += load(dy + i * kLanes);
            }
            add(inputs * taps_, of_bias);
            for (int c = 0; c < inputs; ++c) {
                for (int i = 0; i < row.count; ++i) {
                    const float* const line =
                        x + c * forward_.from_plane + (row.at + i) * forward_.from_line;
                    for (int kw = 0; kw < shape_.kernel; ++kw) {
                        add(c * taps_ + (row.kernel + i) * shape_.kernel + kw,
                            row_product(dy, line, kw));
                    }
                }
            }
            dy += out_.width * kLanes;
        }
    }
    // The sum of a row of dy times the row of x that kernel column kw reads, for a register of
    // images.
    Vec row_product(const float* dy, const float* x, int kw) const {
        const int offset = kw - shape_.padding;  // of x's column from ow * stride
        const int first = offset >= 0 ? 0 : (-offset + shape_.stride - 1) / shape_.stride;
        const int room = shape_.in.width - 1 - offset;
        const int end = room < 0 ? 0 : std::min(out_.width, room / shape_.stride + 1);
        Vec sum = {};
        for (int ow = first; ow < end; ++ow) {
            sum =
                multiply_add(load(dy + std::ptrdiff_t{ow} * kLanes),
                             load(x + (std::ptrdiff_t{ow} * shape_.stride + offset) * kLanes), sum);
        }
        return sum;
    }

    const Context context_;
    const Conv2dShape shape_;
    const Shape out_;
    const std::ptrdiff_t taps_;  // of one kernel
    const Correlation forward_, backward_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const GroupedConv2dSpec& spec, const OpSizes&) {
    return std::make_unique<GroupedConv2dOp>(context, spec.shape);
}

}  // namespace gyre::cpu
