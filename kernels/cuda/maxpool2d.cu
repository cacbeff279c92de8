// Max-pooling: y[p][oh][ow] = max over kh, kw of x[p][oh*s - padding + kh][ow*s - padding + kw],
// those within the plane, for each plane p of n * channels. NaN propagates. The forward pass keeps
// the position kh * kernel + kw of the first maximum (one byte), and the backward pass routes dy to
// it:
//   dx[p][h][w] = sum of dy[p][oh][ow] over the windows whose argmax is (h, w), by oh, ow.
//
// Memory-bound. Bytes per input for 2x2 windows: forward 4 read, 1.25 written; backward 1.25 read,
// 4 written; 1 comparison. 256 threads per block.
//   2x2 windows, stride 2, even width, no padding: a thread has 2 adjacent windows, with accesses
//   of 16 bytes (x, dx), 8 (y, dy) and 2 (argmax), or half of that if the width is not a multiple
//   of 4.
//   Otherwise: forward one thread per output; backward one thread per square of stride x stride
//   inputs, which reads all windows that cover it, so that no two threads add to one input.
// A plane has fewer than 2^31 elements.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

// Unsigned, because nvcc's 64-bit division uses the 32-bit one at run time if operands allow it.
struct Extents {
    std::uint32_t in_height, in_width, out_height, out_width;
    int kernel, stride, padding;
};

// One unit of work per thread, without a loop over `elems`: nvcc would unroll it, which takes a
// division, and split its 16-byte stores.
__device__ __forceinline__ std::int64_t thread_index() {
    return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
template <typename... P, typename... A>
void start(const char* name, void (*kernel)(std::int64_t, P...), const Context& context,
           std::int64_t elems, int thread_elems, A... arguments) {
    const std::int64_t block_elems = std::int64_t{kElementwiseBlock} * thread_elems;
    if (elems > 0) {
        launch(name, kernel, dim3(static_cast<unsigned>((elems + block_elems - 1) / block_elems)),
               dim3(kElementwiseBlock), context.stream, elems, arguments...);
    }
}

// Takes v at position k if it is larger than the best so far, or NaN.
__device__ __forceinline__ void take_larger(float v, int k, float& best, int& where) {
    if (v > best || v != v) {
        best = v;
        where = k;
    }
}

// --- 2x2 windows, stride 2, even width ---------------------------------------------------------
// `i` indexes the elements of the windows' upper rows, over all consecutive planes: windows begin
// at even i, and window i / 2 is output i / 2.

struct UpperRow {
    std::int64_t x;        // the index of the element in the input
    bool above_left_over;  // the row below the window is in no window
};

__device__ __forceinline__ UpperRow upper_row(const Extents& e, std::int64_t i) {
    const auto at = static_cast<std::uint64_t>(i);
    const std::uint64_t row = at / e.in_width;
    std::uint64_t in_row = 2 * row;
    bool above_left_over = false;
    if (e.in_height % 2 != 0) {
        const std::uint64_t plane = row / e.out_height;
        in_row += plane;
        above_left_over = row - plane * e.out_height == e.out_height - 1;
    }
    return {static_cast<std::int64_t>(in_row * e.in_width + (at - row * e.in_width)),
            above_left_over};
}

struct Window {
    float best;
    int where;
};

__device__ __forceinline__ Window window_2x2(float a, float b, float c, float d) {
    Window window{a, 0};
    take_larger(b, 1, window.best, window.where);
    take_larger(c, 2, window.best, window.where);
    take_larger(d, 3, window.best, window.where);
    return window;
}

__device__ __forceinline__ float2 load2(const float* at) {
    return load_vector<float2>(at);
}
__device__ __forceinline__ void store2(float* at, float x, float y) {
    float2 value;
    value.x = x;
    value.y = y;
    store_vector(at, value);
}

// kWide: elements of a row processed by one thread at a time, 4 or 2.
template <int kWide>
__global__ void forward_2x2_kernel(std::int64_t elems, Extents e, const float* x, float* y,
                                   std::uint8_t* argmax) {
    const std::int64_t i = thread_index() * kWide;
    if (i >= elems) {
        return;
    }
    const float* upper = x + upper_row(e, i).x;
    const std::int64_t out = i / 2;
    if constexpr (kWide == 4) {
        const float4 u = load4(upper), l = load4(upper + e.in_width);
        const Window first = window_2x2(u.x, u.y, l.x, l.y);
        const Window second = window_2x2(u.z, u.w, l.z, l.w);
        store2(y + out, first.best, second.best);
        if (argmax != nullptr) {
            // Little-endian, so the first window's byte comes first.
            *reinterpret_cast<std::uint16_t*>(argmax + out) =
                static_cast<std::uint16_t>(first.where | second.where << 8);
        }
    } else {
        const float2 u = load2(upper), l = load2(upper + e.in_width);
        const Window window = window_2x2(u.x, u.y, l.x, l.y);
        y[out] = window.best;
        if (argmax != nullptr) {
            argmax[out] = static_cast<std::uint8_t>(window.where);
        }
    }
}

__device__ __forceinline__ float given(int where, int k, float d) {
    return where == k ? d : 0.0f;
}

template <int kWide>
__global__ void backward_2x2_kernel(std::int64_t elems, Extents e, const float* dy,
                                    const std::uint8_t* argmax, float* dx) {
    const std::int64_t i = thread_index() * kWide;
    if (i >= elems) {
        return;
    }
    const UpperRow row = upper_row(e, i);
    float* upper = dx + row.x;
    float* lower = upper + e.in_width;
    float* left_over = lower + e.in_width;
    const std::int64_t out = i / 2;
    if constexpr (kWide == 4) {
        const float2 d = load2(dy + out);
        const int both = *reinterpret_cast<const std::uint16_t*>(argmax + out);
        const int first = both & 0xff, second = both >> 8;
        store4(upper, make_float4(given(first, 0, d.x), given(first, 1, d.x), given(second, 0, d.y),
                                  given(second, 1, d.y)));
        store4(lower, make_float4(given(first, 2, d.x), given(first, 3, d.x), given(second, 2, d.y),
                                  given(second, 3, d.y)));
        if (row.above_left_over) {
            store4(left_over, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        }
    } else {
        const float d = dy[out];
        const int where = argmax[out];
        store2(upper, given(where, 0, d), given(where, 1, d));
        store2(lower, given(where, 2, d), given(where, 3, d));
        if (row.above_left_over) {
            store2(left_over, 0.0f, 0.0f);
        }
    }
}

// --- any window --------------------------------------------------------------------------------
// kKernel, kStride: the extents if known at compile time, else 0. kPadded: windows may reach beyond
// the input.

struct Place2d {
    std::int64_t plane;
    int h, w;
};

__device__ __forceinline__ Place2d place_of(std::int64_t i, std::uint32_t height,
                                            std::uint32_t width) {
    const auto at = static_cast<std::uint64_t>(i);
    const std::uint64_t row = at / width, plane = row / height;
    return {static_cast<std::int64_t>(plane), static_cast<int>(row - plane * height),
            static_cast<int>(at - row * width)};
}

template <int kKernel, int kStride, bool kPadded>
__global__ void forward_kernel(std::int64_t elems, Extents e, const float* x, float* y,
                               std::uint8_t* argmax) {
    const int kernel = kKernel > 0 ? kKernel : e.kernel;
    const int stride = kStride > 0 ? kStride : e.stride;
    const std::int64_t i = thread_index();
    if (i >= elems) {
        return;
    }
    const Place2d out = place_of(i, e.out_height, e.out_width);
    float best = 0.0f;
    int where = 0;
    if constexpr (kPadded) {
        const int h = out.h * stride - e.padding, w = out.w * stride - e.padding;
        const int first_h = max(-h, 0), first_w = max(-w, 0);
        const int end_h = min(kernel, static_cast<int>(e.in_height) - h);
        const int end_w = min(kernel, static_cast<int>(e.in_width) - w);
        const float* row = x + (out.plane * e.in_height + h + first_h) * e.in_width + w + first_w;
        best = *row;
        where = first_h * kernel + first_w;
        for (int kh = first_h; kh < end_h; ++kh, row += e.in_width) {
            for (int kw = first_w; kw < end_w; ++kw) {
                take_larger(row[kw - first_w], kh * kernel + kw, best, where);
            }
        }
    } else {
        const float* row = x +
                           (out.plane * e.in_height + std::int64_t{out.h} * stride) * e.in_width +
                           std::int64_t{out.w} * stride;
        best = *row;
        for (int kh = 0; kh < kernel; ++kh, row += e.in_width) {
            for (int kw = 0; kw < kernel; ++kw) {
                take_larger(row[kw], kh * kernel + kw, best, where);
            }
        }
    }
    y[i] = best;
    if (argmax != nullptr) {
        argmax[i] = static_cast<std::uint8_t>(where);
    }
}

// squares: the number of stride x stride squares of inputs, with the padding above and left of
// them, in all planes; each has the index of the window that begins in its corner.
template <int kKernel, int kStride, bool kPadded>
__global__ void backward_kernel(std::int64_t squares, Extents e, const float* __restrict__ dy,
                                const std::uint8_t* __restrict__ argmax, float* __restrict__ dx) {
    const std::int64_t i = thread_index();
    if (i >= squares) {
        return;
    }
    const int kernel = kKernel > 0 ? kKernel : e.kernel;
    const int stride = kStride > 0 ? kStride : e.stride;
    const auto in_height = static_cast<int>(e.in_height), in_width = static_cast<int>(e.in_width);
    const auto out_height = static_cast<int>(e.out_height),
               out_width = static_cast<int>(e.out_width);
    const int padding = kPadded ? e.padding : 0;
    const auto squares_of = [=](std::uint32_t extent) {
        return (extent + static_cast<std::uint32_t>(padding) - 1) /
                   static_cast<std::uint32_t>(stride) +
               1;
    };
    const Place2d square = place_of(i, squares_of(e.in_height), squares_of(e.in_width));
    const std::int64_t in_plane = square.plane * in_height * in_width;
    const std::int64_t out_plane = square.plane * out_height * out_width;
    const int reach = (kernel - 1) / stride;  // earlier windows that also cover the square
    for (int r = 0; r < stride; ++r) {
        for (int c = 0; c < stride; ++c) {
            const int h = square.h * stride + r - padding, w = square.w * stride + c - padding;
            if (h >= in_height || w >= in_width || (kPadded && (h < 0 || w < 0))) {
                continue;
            }
            float sum = 0.0f;
            for (int up = reach; up >= 0; --up) {
                for (int left = reach; left >= 0; --left) {
                    const int oh = square.h - up, ow = square.w - left;
                    const int kh = up * stride + r, kw = left * stride + c;
                    if (kh < kernel && kw < kernel && oh >= 0 && oh < out_height && ow >= 0 &&
                        ow < out_width) {
                        const std::int64_t out = out_plane + std::int64_t{oh} * out_width + ow;
                        sum += given(argmax[out], kh * kernel + kw, dy[out]);
                    }
                }
            }
            dx[in_plane + std::int64_t{h} * in_width + w] = sum;
        }
    }
}

Extents extents_of(const MaxPool2dShape& shape) {
    const Shape out = shape.out();
    return {static_cast<std::uint32_t>(shape.in.height),
            static_cast<std::uint32_t>(shape.in.width),
            static_cast<std::uint32_t>(out.height),
            static_cast<std::uint32_t>(out.width),
            shape.kernel,
            shape.stride,
            shape.padding};
}

bool aligned(const void* at, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
}

// The width of a thread's part of a row; 0 if only the kernels for any window apply. wide: the
// larger of input and output, narrow: the smaller.
int width_2x2(const MaxPool2dShape& shape, const float* wide, const float* narrow,
              const std::uint8_t* argmax) {
    if (shape.kernel != 2 || shape.stride != 2 || shape.clips() || shape.in.width % 2 != 0 ||
        shape.out().elems() == 0 || !aligned(wide, sizeof(float2))) {
        return 0;
    }
    return shape.in.width % 4 == 0 && aligned(wide, sizeof(float4)) &&
                   aligned(narrow, sizeof(float2)) && aligned(argmax, 2)
               ? 4
               : 2;
}

void maxpool2d_forward(const Context& context, const MaxPool2dShape& shape, int n, const float* x,
                       float* y, std::uint8_t* argmax) {
    const std::int64_t outputs = shape.out().elems() * n;
    const int wide = width_2x2(shape, x, y, argmax);
    const bool pads = shape.clips(), by_two = shape.stride == 2;
    const auto kernel = wide == 4                             ? forward_2x2_kernel<4>
                        : wide == 2                           ? forward_2x2_kernel<2>
                        : pads && shape.kernel == 3 && by_two ? forward_kernel<3, 2, true>
                        : pads                                ? forward_kernel<0, 0, true>
                        : shape.kernel == 2 && by_two         ? forward_kernel<2, 2, false>
                        : shape.kernel == 3 && by_two         ? forward_kernel<3, 2, false>
                                                              : forward_kernel<0, 0, false>;
    // For the first two kernels, the number of elements in the windows' upper rows.
    const std::int64_t elems = wide > 0 ? 2 * outputs : outputs;
    start("maxpool2d_forward", kernel, context, elems, std::max(wide, 1), extents_of(shape), x, y,
          argmax);
}

void maxpool2d_backward(const Context& context, const MaxPool2dShape& shape, int n, const float* dy,
                        const std::uint8_t* argmax, float* dx) {
    const int wide = width_2x2(shape, dx, dy, argmax);
    const bool pads = shape.clips(), by_two = shape.stride == 2;
    const auto kernel = wide == 4                             ? backward_2x2_kernel<4>
                        : wide == 2                           ? backward_2x2_kernel<2>
                        : pads && shape.kernel == 3 && by_two ? backward_kernel<3, 2, true>
                        : pads                                ? backward_kernel<0, 0, true>
                        : shape.kernel == 2 && by_two         ? backward_kernel<2, 2, false>
                        : shape.kernel == 3 && by_two         ? backward_kernel<3, 2, false>
                                                              : backward_kernel<0, 0, false>;
    const auto squares = [&](int extent) {
        return (extent + shape.padding - 1) / shape.stride + 1;
    };
    const std::int64_t elems = wide > 0 ? 2 * shape.out().elems() * n
                                        : std::int64_t{n} * shape.in.channels *
                                              squares(shape.in.height) * squares(shape.in.width);
    start("maxpool2d_backward", kernel, context, elems, std::max(wide, 1), extents_of(shape), dy,
          argmax, dx);
}

// Saves the windows' argmax.
class MaxPool2dOp final : public Op {
 public:
    MaxPool2dOp(const Context& context, const MaxPool2dShape& shape, int train_images)
        : context_(context),
          shape_(shape),
          saved_bytes_(static_cast<std::size_t>(shape.out().elems() * train_images)) {}
    OpNeeds needs() const override {
        return {.saved_bytes = saved_bytes_, .backward_reads_x = false};
    }
    void forward(const Batch& batch, const OpIo& io) override {
        maxpool2d_forward(context_, shape_, batch.n, io.x.f32(), io.y.f32(),
                          batch.training ? static_cast<std::uint8_t*>(io.saved) : nullptr);
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        maxpool2d_backward(context_, shape_, batch.n, io.dy.f32(),
                           static_cast<const std::uint8_t*>(io.saved), io.dx.f32());
    }

 private:
    const Context context_;
    const MaxPool2dShape shape_;
    const std::size_t saved_bytes_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const MaxPool2dSpec& spec,
                            const OpSizes& sizes) {
    return std::make_unique<MaxPool2dOp>(context, spec.shape, sizes.train_images);
}

}  // namespace gyre::SIMT_NAMESPACE
