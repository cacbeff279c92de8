// Convolution of stride 1 as implicit GEMM on tensor cores, in TF32 or 16 bits, optionally fused
// with a ReLU or 2 x 2 max-pooling and a ReLU. With P = output height * width, taps = (kh, kw):
//
//             m                    n                               k
//   forward   (image, P)           out channel                     (taps, channel)
//   dx        (image, pixel)       channel                         (taps, out channel)
//   dw        out channel          (taps, channel), and the bias   (image, P)
//
// x, y, dy and dx are [n][channels][height][width]. Channels-last copies of x, dy and w, rounded as
// products read them, are made in the workspace (channels_last.cu) unless they already have this
// layout. Sums are stored to y and dx directly: 8 adjacent pixels of a row from 8 lanes, a 32-byte
// sector of floats. Block and grid, bytes and FLOPs are in tensor_gemm.cuh.
#include <algorithm>

#include "base/round_up.hpp"
#include "kernels/cuda/channels_last.cuh"
#include "kernels/cuda/conv2d.cuh"
#include "kernels/cuda/tensor_operands.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

// m: (image, position), n: a channel. Stores to [image][channel][position]. bias may be null.
template <typename Math>
struct StorePlanes {
    typename Math::Elem* y;
    const float* bias;
    int rows, channels, plane;
    bool relu;

    template <bool kWhole>
    __device__ __forceinline__ void store(int m, int n, const float (&v)[4][2]) const {
        SIMT_UNROLL
        for (int j = 0; j < 4; ++j) {
            const int row = m + j * 8, image = row / plane;
            auto* const at = y + ((image * channels + n) * plane + (row - image * plane));
            SIMT_UNROLL
            for (int e = 0; e < 2; ++e) {
                if (kWhole || (row < rows && n + e < channels)) {
                    const float sum = v[j][e] + (bias == nullptr ? 0.0f : bias[n + e]);
                    at[e * plane] = Math::value(relu ? clip_below(sum) : sum);
                }
            }
        }
    }
};

// m: in WindowAlongK's order for pooling, n: a channel. Stores to y [image][channel][window] and,
// unless it is null, to argmax [image][window][channel].
template <typename Math>
struct StorePooled {
    typename Math::Elem* y;
    std::uint8_t* argmax;
    const float* bias;
    int windows, channels, plane;  // plane: windows per image
    bool relu;

    template <bool kWhole>
    __device__ __forceinline__ void store(int m, int n, const float (&v)[4][2]) const {
        const int window = m / 32 * 8 + m % 8, image = window / plane;
        auto* const at = y + ((image * channels + n) * plane + (window - image * plane));
        SIMT_UNROLL
        for (int e = 0; e < 2; ++e) {
            if (window < windows && (kWhole || n + e < channels)) {
                float best = v[0][e] + bias[n + e];
                int where = 0;
                SIMT_UNROLL
                for (int j = 1; j < 4; ++j) {
                    const float value = v[j][e] + bias[n + e];
                    if (value > best || value != value) {
                        best = value;
                        where = j;
                    }
                }
                at[e * plane] = Math::value(relu ? clip_below(best) : best);
                if (argmax != nullptr) {
                    argmax[window * channels + n + e] = static_cast<std::uint8_t>(where);
                }
            }
        }
    }
};

// m: (image, position), n: a channel. Stores to [image][position][channel], as products read it. A
// forward output has a bias and a ReLU; a gradient is zero where `of`, the activation there, is not
// positive.
template <typename Math>
struct StoreChannelsLast {
    using Elem = typename Math::Elem;
    Elem* y;
    const float* bias;
    const Elem* of;  // either this or bias is null
    int rows, channels;

    template <bool kWhole>
    __device__ __forceinline__ void store(int m, int n, const float (&v)[4][2]) const {
        SIMT_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (kWhole || (m + j * 8 < rows && n < channels)) {
                const int i = (m + j * 8) * channels + n;
                Math::store_operands(y + i, result(v[j][0], i, n), result(v[j][1], i + 1, n + 1));
            }
        }
    }

 private:
    __device__ __forceinline__ float result(float sum, int i, int n) const {
        return of == nullptr ? clip_below(sum + bias[n]) : Math::load(of[i]) <= 0.0f ? 0.0f : sum;
    }
};

// m: an output channel, n: (tap, channel), or after the last one the bias.
struct StoreTaps {
    float *dw, *db;
    int rows, channels, taps;

    template <bool kWhole>
    __device__ __forceinline__ void store(int m, int n, const float (&v)[4][2]) const {
        const int tap = n / channels, channel = n - tap * channels;
        SIMT_UNROLL
        for (int j = 0; j < 4; ++j) {
            const int row = m + j * 8;
            if (kWhole || row < rows) {
                if (tap < taps) {
                    float* const at = dw + ((row * channels + channel) * taps + tap);
                    at[0] = v[j][0];
                    at[taps] = v[j][1];
                } else if (tap == taps && channel == 0) {
                    db[row] = v[j][0];
                }
            }
        }
    }
};

template <typename Math>
class TensorConv2dOp final : public Op {
    using Elem = typename Math::Elem;

 public:
    TensorConv2dOp(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes)
        : context_(context), spec_(spec), shape_(spec.shape), train_images_(sizes.train_images) {
        const std::int64_t most = sizes.most();
        const int inputs = shape_.in.channels * taps(), outputs = shape_.out_channels * taps();
        const auto positions = [&](const Shape& s) {
            return static_cast<int>(most * s.plane_elems()) + kBandRows * 4;
        };
        partial_elems_ = std::max(
            {tensor_partial_elems(positions(shape_.out()), shape_.out_channels, inputs, kDepth),
             tensor_partial_elems(positions(shape_.in), shape_.in.channels, outputs, kDepth),
             tensor_partial_elems(shape_.out_channels, inputs + 1, positions(shape_.out()),
                                  kDepth)});
        partial_elems_ = aligned(partial_elems_);
        weight_elems_ = aligned(shape_.weight_elems());
        x_elems_ = aligned(most * shape_.in.elems());
        const std::int64_t elems = weight_elems_ + x_elems_ + aligned(most * shape_.out().elems());
        all_elems_ = partial_elems_ + elems * std::int64_t{sizeof(Elem)} / 4;
        context.workspace.reserve(static_cast<std::size_t>(all_elems_) * sizeof(float));
    }
    OpNeeds needs() const override {
        return {.saved_bytes = argmax_bytes() + (packs_both() ? weight_bytes() : 0),
                .backward_reads_y = masks()};
    }

    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return;
        }
        const int n = batch.n, k = shape_.in.channels * taps();
        pack_weights<Math>(context_, shape_, io.params[0].f32(), weights(),
                           batch.training && packs_both() ? turned_weights(io) : nullptr);
        const Elem* const x = x_channels_last(n, io);
        const WindowShape window = window_shape(shape_.in, shape_.out(), shape_.padding);
        const DenseAlongK<Elem, false> w{weights(), shape_.out_channels, k};
        const float* const bias = io.params[1].f32();
        if (pooled()) {
            const auto plane = static_cast<int>(spec_.out().plane_elems());
            const int windows = n * plane, m = (windows + 7) / 8 * kBandRows;
            auto* const argmax = batch.training ? static_cast<std::uint8_t*>(io.saved) : nullptr;
            tensor_gemm<Math>(context_, "conv2d_forward", m, shape_.out_channels, k,
                              WindowAlongK<Elem, true>{x, window, windows}, w,
                              StorePooled<Math>{values(io.y), argmax, bias, windows,
                                                shape_.out_channels, plane, spec_.relu},
                              partial());
            return;
        }
        const auto plane = static_cast<int>(shape_.out().plane_elems());
        const int m = n * plane, out_channels = shape_.out_channels;
        const auto run = [&](const auto& epilogue) {
            tensor_gemm<Math>(context_, "conv2d_forward", m, out_channels, k,
                              WindowAlongK<Elem, false>{x, window, m}, w, epilogue, partial());
        };
        if (spec_.out_channels_last) {
            run(StoreChannelsLast<Math>{values(io.y), bias, nullptr, m, out_channels});
        } else {
            run(StorePlanes<Math>{values(io.y), bias, m, out_channels, plane, spec_.relu});
        }
    }

    // backward_params rearranges dy for backward_input too; backward_input does it itself if
    // another implementation computed the former.
    void backward_begin(const Batch&, const OpIo&) override { turned_ = false; }
    void backward_params(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), shape_.out_channels, io);
        }
        const int n = batch.n, columns = shape_.in.channels * taps();
        const Elem* const dy = dy_channels_last(n, io);
        turned_ = true;
        tensor_gemm<Math>(
            context_, "conv2d_backward_weights", shape_.out_channels, columns + 1,
            n * static_cast<int>(shape_.out().plane_elems()),
            DenseAcrossK<Elem, false>{dy, shape_.out_channels, shape_.out_channels},
            WindowAcrossK<Math>{x_channels_last(n, io),
                                window_shape(shape_.in, shape_.out(), shape_.padding)},
            StoreTaps{io.grads[0].f32(), io.grads[1].f32(), shape_.out_channels, shape_.in.channels,
                      taps()},
            partial());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return;
        }
        const int n = batch.n, channels = shape_.in.channels, k = shape_.out_channels * taps();
        const auto plane = static_cast<int>(shape_.in.plane_elems());
        const Elem* const dy =
            turned_ && !spec_.out_channels_last ? turned_dy() : dy_channels_last(n, io);
        turned_ = false;
        Elem* const w = turned_weights(io);
        if (!packs_both()) {
            pack_weights<Math>(context_, shape_, io.params[0].f32(), nullptr, w);
        }
        const int m = n * plane;
        const auto run = [&](const auto& epilogue) {
            tensor_gemm<Math>(
                context_, "conv2d_backward_data", m, channels, k,
                WindowAlongK<Elem, false>{
                    dy, window_shape(shape_.out(), shape_.in, shape_.kernel - 1 - shape_.padding),
                    m},
                DenseAlongK<Elem, false>{w, channels, k}, epilogue, partial());
        };
        if (spec_.in_channels_last) {
            run(StoreChannelsLast<Math>{values(io.dx), nullptr, values(io.x), m, channels});
        } else {
            run(StorePlanes<Math>{values(io.dx), nullptr, m, channels, plane, false});
        }
    }

 private:
    static std::int64_t aligned(std::int64_t elems) { return round_up<std::int64_t>(elems, 64); }
    bool pooled() const { return spec_.pool_kernel > 0; }
    // If no other implementation's forward pass can precede this backward pass (auto_factory.cpp),
    // the forward pass packs the weights for both.
    bool packs_both() const { return spec_.fused(); }
    std::size_t argmax_bytes() const {
        return pooled() ? (static_cast<std::size_t>(train_images_ * spec_.out().elems()) + 255) /
                              256 * 256
                        : 0;
    }
    std::size_t weight_bytes() const {
        return static_cast<std::size_t>(weight_elems_) * sizeof(Elem);
    }
    Elem* turned_weights(const OpIo& io) const {
        return packs_both()
                   ? reinterpret_cast<Elem*>(static_cast<std::uint8_t*>(io.saved) + argmax_bytes())
                   : weights();
    }
    int taps() const { return shape_.kernel * shape_.kernel; }
    WindowShape window_shape(const Shape& in, const Shape& out, int padding) const {
        unsigned row_bits = 0;
        for (int kh = 0; kh < shape_.kernel; ++kh) {
            row_bits |= 1u << kh * shape_.kernel;
        }
        return {in.channels, in.height,     in.width, out.height,
                out.width,   shape_.kernel, padding,  row_bits};
    }
    // True if dy must still be set to zero where y is not positive.
    bool masks() const { return spec_.relu && !spec_.out_channels_last; }
    static Elem* values(const Tensor& tensor) { return static_cast<Elem*>(tensor.data); }
    const Elem* x_channels_last(int n, const OpIo& io) const {
        if (spec_.in_channels_last) {
            return values(io.x);
        }
        to_channels_last<Math>(context_, n, shape_.in, values(io.x), turned_x());
        return turned_x();
    }
    const Elem* dy_channels_last(int n, const OpIo& io) const {
        if (spec_.out_channels_last) {
            return values(io.dy);
        }
        gradient_to_channels_last<Math>(context_, n, shape_.out(), masks() ? values(io.y) : nullptr,
                                        pooled() ? static_cast<std::uint8_t*>(io.saved) : nullptr,
                                        values(io.dy), turned_dy());
        return turned_dy();
    }
    // Workspace: partial sums, weights, x, dy.
    float* partial() const { return context_.workspace.floats(all_elems_); }
    Elem* weights() const { return reinterpret_cast<Elem*>(partial() + partial_elems_); }
    Elem* turned_x() const { return weights() + weight_elems_; }
    Elem* turned_dy() const { return turned_x() + x_elems_; }

    static constexpr int kDepth = kSliceBytes / static_cast<int>(sizeof(Elem));
    const Context context_;
    const Conv2dSpec spec_;
    const Conv2dShape shape_;
    const int train_images_;
    std::int64_t partial_elems_ = 0, weight_elems_ = 0, x_elems_ = 0, all_elems_ = 0;
    bool turned_ = false;  // whether the workspace holds dy
};

}  // namespace

std::unique_ptr<Op> make_tensor_conv(const Context& context, const Conv2dSpec& spec,
                                     const OpSizes& sizes, DataType type) {
    const Conv2dShape& s = spec.shape;
    const int chunk = 16 / static_cast<int>(bytes_of(type));
    const auto fits = [&](int channels) {
        return channels % chunk == 0 && channels >= WindowShape::kFewestChannels;
    };
    const bool pool = spec.pool_kernel == 2 && spec.pool_stride == 2;
    // Kernels index elements over all images in 32 bits.
    const std::int64_t elems =
        std::max(s.in.elems(), s.out().elems()) * (std::int64_t{sizes.most()} + 1);
    const bool can = context.tf32 && s.stride == 1 && s.padding < s.kernel &&
                     s.kernel * s.kernel <= WindowShape::kMostTaps && fits(s.in.channels) &&
                     fits(s.out_channels) && spec.dropout == 0.0f &&
                     (spec.pool_kernel == 0 || pool) &&
                     (!spec.out_channels_last || (spec.relu && !pool)) &&
                     elems < (std::int64_t{1} << 31) - (1 << 20);
    return can ? make_for_math<TensorConv2dOp>(type, context, spec, sizes) : nullptr;
}

}  // namespace gyre::SIMT_NAMESPACE
