// Convolution as implicit GEMM: the matrix of image patches is never stored, its elements are read
// from the image as needed. With P = output height * width, K = kernel:
//
//                    m              n              k
//   forward          out channel    (image, P)     (channel, kh, kw)
//   backward_data    channel        (image, pixel) (out channel, kh, kw)
//   backward_weights out channel    (channel, kh, kw), and the bias   (image, P)
//
// x [n][C][H][W], y and dy [n][O][OH][OW], w and dw [O][C][K][K], b and db [O]. Any stride and
// padding. Block and grid, bytes and FLOPs are in gemm.cuh.
#include "kernels/cuda/conv2d.cuh"
#include "kernels/cuda/gemm.cuh"

namespace gyre::SIMT_NAMESPACE::implicit_gemm {
namespace {

// Extents that the operands below divide by. kKernel: the kernel's size if known at compile time,
// which turns divisions into multiplications; else 0.
template <int kKernel>
struct Geometry {
    int channels, height, width, out_channels, out_height, out_width, kernel_, stride, padding;

    explicit Geometry(const Conv2dShape& s)
        : channels(s.in.channels),
          height(s.in.height),
          width(s.in.width),
          out_channels(s.out_channels),
          out_height(s.out().height),
          out_width(s.out().width),
          kernel_(s.kernel),
          stride(s.stride),
          padding(s.padding) {}
    __device__ __forceinline__ int kernel() const { return kKernel > 0 ? kKernel : kernel_; }
};

// A tap of the kernel in one channel.
struct Tap {
    int channel, kh, kw;
};
template <int kKernel>
__device__ __forceinline__ Tap tap_of(const Geometry<kKernel>& g, int index) {
    const int square = g.kernel() * g.kernel();
    const int channel = index / square, rest = index % square;
    return {channel, rest / g.kernel(), rest % g.kernel()};
}

// Row: an output position (its window's corner in x). k: a tap. Value: the pixel under the tap.
template <int kKernel>
struct PatchOperand {
    static constexpr bool kAlongK = false;
    struct Row {
        std::int64_t image;  // offset; < 0: out of range
        int h, w;
    };
    using Slice = Tap;  // channel < 0: out of range
    const float* x;
    Geometry<kKernel> g;
    int rows;

    __device__ __forceinline__ Row row(int r) const {
        if (r >= rows) {
            return {-1, 0, 0};
        }
        const int plane = g.out_height * g.out_width;
        const int image = r / plane, at = r % plane;
        return {std::int64_t{image} * g.channels * g.height * g.width,
                at / g.out_width * g.stride - g.padding, at % g.out_width * g.stride - g.padding};
    }
    __device__ __forceinline__ Slice slice(int k) const {
        return k < 0 ? Tap{-1, 0, 0} : tap_of(g, k);
    }
    __device__ __forceinline__ float at(const Row& r, const Slice& s) const {
        const int h = r.h + s.kh, w = r.w + s.kw;
        const bool inside =
            r.image >= 0 && s.channel >= 0 && h >= 0 && h < g.height && w >= 0 && w < g.width;
        return inside ? x[r.image + (std::int64_t{s.channel} * g.height + h) * g.width + w] : 0.0f;
    }
};

// The transposed matrix. Row: a tap, or the row of ones after the last one. k: an output position.
template <int kKernel>
struct TurnedPatchOperand {
    static constexpr bool kAlongK = true;
    struct Row {
        Tap tap;  // channel < 0: out of range, or ones
        bool one;
    };
    struct Slice {
        std::int64_t image;  // < 0: out of range
        int h, w;
    };
    PatchOperand<kKernel> patches;
    int taps;

    __device__ __forceinline__ Row row(int r) const {
        return {r < taps ? tap_of(patches.g, r) : Tap{-1, 0, 0}, r == taps};
    }
    __device__ __forceinline__ Slice slice(int k) const {
        const auto row = patches.row(k < 0 ? patches.rows : k);
        return {row.image, row.h, row.w};
    }
    __device__ __forceinline__ float at(const Row& r, const Slice& s) const {
        if (r.one) {
            return s.image >= 0 ? 1.0f : 0.0f;
        }
        return patches.at({s.image, s.h, s.w}, r.tap);
    }
};

// Row: a pixel of x. k: a tap of the kernel that read it, in some output channel. Value: the
// gradient of the output there, if the tap hits one: h + padding - kh must be a multiple of stride.
template <int kKernel>
struct ReversePatchOperand {
    static constexpr bool kAlongK = false;
    struct Row {
        std::int64_t image;  // offset; < 0: out of range
        int h, w;
    };
    using Slice = Tap;
    const float* dy;
    Geometry<kKernel> g;
    int rows;

    __device__ __forceinline__ Row row(int r) const {
        if (r >= rows) {
            return {-1, 0, 0};
        }
        const int plane = g.height * g.width;
        const int image = r / plane, at = r % plane;
        return {std::int64_t{image} * g.out_channels * g.out_height * g.out_width,
                at / g.width + g.padding, at % g.width + g.padding};
    }
    __device__ __forceinline__ Slice slice(int k) const {
        return k < 0 ? Tap{-1, 0, 0} : tap_of(g, k);
    }
    __device__ __forceinline__ float at(const Row& r, const Slice& s) const {
        int h = r.h - s.kh, w = r.w - s.kw;
        bool hit = r.image >= 0 && s.channel >= 0 && h >= 0 && w >= 0;
        if (g.stride > 1) {
            hit = hit && h % g.stride == 0 && w % g.stride == 0;
            h /= g.stride;
            w /= g.stride;
        }
        hit = hit && h < g.out_height && w < g.out_width;
        return hit ? dy[r.image + (std::int64_t{s.channel} * g.out_height + h) * g.out_width + w]
                   : 0.0f;
    }
};

// Row: a channel of x; k: (out channel, kh, kw). Value: w[out channel][channel][kh][kw].
template <int kKernel>
struct TurnedWeights {
    static constexpr bool kAlongK = true;
    struct Row {
        int channel;  // < 0: out of range
    };
    using Slice = Tap;
    const float* weights;
    Geometry<kKernel> g;

    __device__ __forceinline__ Row row(int r) const { return {r < g.channels ? r : -1}; }
    __device__ __forceinline__ Slice slice(int k) const {
        return k < 0 ? Tap{-1, 0, 0} : tap_of(g, k);
    }
    __device__ __forceinline__ float at(const Row& r, const Slice& s) const {
        const bool inside = r.channel >= 0 && s.channel >= 0;
        return inside ? weights[((std::int64_t{s.channel} * g.channels + r.channel) * g.kernel() +
                                 s.kh) *
                                    g.kernel() +
                                s.kw]
                      : 0.0f;
    }
};

// Row: an output channel; k: (image, position). Value: dy there.
struct GradientOperand {
    static constexpr bool kAlongK = true;
    struct Row {
        int channel;  // < 0: out of range
    };
    struct Slice {
        std::int64_t offset;  // < 0: out of range
    };
    const float* dy;
    int out_channels, plane;

    __device__ __forceinline__ Row row(int r) const { return {r < out_channels ? r : -1}; }
    __device__ __forceinline__ Slice slice(int k) const {
        return {k < 0 ? -1 : std::int64_t{k / plane} * out_channels * plane + k % plane};
    }
    __device__ __forceinline__ float at(const Row& r, const Slice& s) const {
        const bool inside = r.channel >= 0 && s.offset >= 0;
        return inside ? dy[s.offset + std::int64_t{r.channel} * plane] : 0.0f;
    }
};

// m: a channel, n: (image, position). Stores to [image][channel][position]. b may be null.
struct StorePlanes {
    float* y;
    const float* b;
    int channels, plane;
    __device__ __forceinline__ void operator()(int m, int n, float sum) const {
        const int image = n / plane, at = n % plane;
        y[(std::int64_t{image} * channels + m) * plane + at] = b == nullptr ? sum : sum + b[m];
    }
};

template <int kKernel>
void forward(const Context& context, const Conv2dShape& shape, int n, const float* x,
             const float* w, const float* b, float* y) {
    const auto plane = static_cast<int>(shape.out().plane_elems());
    const int taps = shape.in.channels * shape.kernel * shape.kernel;
    gemm(context, "conv2d_forward", shape.out_channels, n * plane, taps,
         DenseOperand<true>{w, shape.out_channels, taps, 1},
         PatchOperand<kKernel>{x, Geometry<kKernel>(shape), n * plane},
         StorePlanes{y, b, shape.out_channels, plane});
}

template <int kKernel>
void backward_data(const Context& context, const Conv2dShape& shape, int n, const float* dy,
                   const float* w, float* dx) {
    const auto plane = static_cast<int>(shape.in.plane_elems());
    gemm(context, "conv2d_backward_data", shape.in.channels, n * plane,
         shape.out_channels * shape.kernel * shape.kernel,
         TurnedWeights<kKernel>{w, Geometry<kKernel>(shape)},
         ReversePatchOperand<kKernel>{dy, Geometry<kKernel>(shape), n * plane},
         StorePlanes{dx, nullptr, shape.in.channels, plane});
}

template <int kKernel>
void backward_weights(const Context& context, const Conv2dShape& shape, int n, const float* x,
                      const float* dy, float* dw, float* db) {
    const auto plane = static_cast<int>(shape.out().plane_elems());
    const int taps = shape.in.channels * shape.kernel * shape.kernel;
    gemm(context, "conv2d_backward_weights", shape.out_channels, taps + 1, n * plane,
         GradientOperand{dy, shape.out_channels, plane},
         TurnedPatchOperand<kKernel>{{x, Geometry<kKernel>(shape), n * plane}, taps},
         StoreGradients{dw, db, taps});
}

}  // namespace

void forward(const Context& context, const Conv2dShape& shape, int n, const float* x,
             const float* w, const float* b, float* y) {
    shape.kernel == 3 ? forward<3>(context, shape, n, x, w, b, y)
                      : forward<0>(context, shape, n, x, w, b, y);
}

void backward_data(const Context& context, const Conv2dShape& shape, int n, const float* dy,
                   const float* w, float* dx) {
    shape.kernel == 3 ? backward_data<3>(context, shape, n, dy, w, dx)
                      : backward_data<0>(context, shape, n, dy, w, dx);
}

void backward_weights(const Context& context, const Conv2dShape& shape, int n, const float* x,
                      const float* dy, float* dw, float* db) {
    shape.kernel == 3 ? backward_weights<3>(context, shape, n, x, dy, dw, db)
                      : backward_weights<0>(context, shape, n, x, dy, dw, db);
}

}  // namespace gyre::SIMT_NAMESPACE::implicit_gemm
