// Operands and epilogues of tensor-core products (interface: tensor_gemm.cuh).
#pragma once

#include <type_traits>

#include "kernels/cuda/dropout.cuh"
#include "kernels/cuda/tensor_gemm.cuh"

namespace gyre::SIMT_NAMESPACE {

// A matrix contiguous along k: element (row, k) at row * pitch + k. Rows are aligned to 16 bytes.
template <typename Elem_, bool kRound_>
struct DenseAlongK {
    using Elem = Elem_;
    static constexpr bool kAlongK = true, kRound = kRound_;
    const Elem* matrix;
    int rows, pitch;

    template <int kEach, int kStep, int kDepth>
    class Cursor {
     public:
        __device__ __forceinline__ Cursor(const DenseAlongK& operand, int row, int k, int end)
            : offset_(static_cast<unsigned>(row) * static_cast<unsigned>(operand.pitch) +
                      static_cast<unsigned>(k)),
              left_(end - k),
              rows_(operand.rows - row) {}
        template <typename Copy>
        __device__ __forceinline__ void fetch(const DenseAlongK& operand, Copy copy) {
            const unsigned step = static_cast<unsigned>(operand.pitch) * kStep;
            const int rows = left_ > 0 ? rows_ : 0;
            SIMT_UNROLL
            for (int i = 0; i < kEach; ++i) {
                copy(i, operand.matrix + (offset_ + static_cast<unsigned>(i) * step),
                     i * kStep < rows);
            }
            offset_ += kDepth;
            left_ -= kDepth;
        }

     private:
        unsigned offset_;
        int left_, rows_;  // remaining k and rows, from the thread's first on
    };
};

alignas(16) __device__ const std::uint32_t kOnesAndZeros[3][4] = {
    {Tf32Math::kOne}, {Bf16Math::kOne}, {F16Math::kOne}};
// 16 bytes: a 1 followed by zeros.
template <typename Math>
__device__ __forceinline__ const typename Math::Elem* one_and_zeros() {
    constexpr int kNumber = Math::kType == DataType::float32    ? 0
                            : Math::kType == DataType::bfloat16 ? 1
                                                                : 2;
    return reinterpret_cast<const typename Math::Elem*>(kOnesAndZeros[kNumber]);
}

// A matrix contiguous across k: element (row, k) at k * pitch + row. pitch and rows are multiples
// of 16 bytes. With Ones, the Math of the product, the row after the last is all ones, so that a
// weight gradient's product also yields the bias gradient.
template <typename Elem_, bool kRound_, typename Ones = void>
struct DenseAcrossK {
    using Elem = Elem_;
    static constexpr bool kAlongK = false, kRound = kRound_;
    const Elem* matrix;
    int rows, pitch;

    template <int kEach, int kStep, int kDepth>
    class Cursor {
     public:
        __device__ __forceinline__ Cursor(const DenseAcrossK& operand, int row, int k, int end)
            : base_(operand.matrix),
              pitch_(static_cast<unsigned>(operand.pitch)),
              offset_(static_cast<unsigned>(k) * pitch_ + static_cast<unsigned>(row)),
              left_(row < operand.rows ? end - k : 0) {
            if constexpr (!std::is_void_v<Ones>) {
                if (row == operand.rows) {
                    base_ = one_and_zeros<Ones>();
                    pitch_ = offset_ = 0;
                    left_ = end - k;
                }
            }
        }
        template <typename Copy>
        __device__ __forceinline__ void fetch(const DenseAcrossK&, Copy copy) {
            SIMT_UNROLL
            for (int i = 0; i < kEach; ++i) {
                copy(i, base_ + (offset_ + static_cast<unsigned>(i * kStep) * pitch_),
                     i * kStep < left_);
            }
            offset_ += kDepth * pitch_;
            left_ -= kDepth;
        }

     private:
        const Elem* base_;
        unsigned pitch_, offset_;
        int left_;
    };
};

// The windows of a convolution of stride 1 over channels-last activations x [image][H][W][C] that
// are already operands (Math::operand).
struct WindowShape {
    int channels, height, width;  // of x; channels: multiple of 16 bytes, >= kFewestChannels
    int out_height, out_width;
    int kernel, padding;
    unsigned row_bits;  // the bits 1 << kh * kernel
    static constexpr int kFewestChannels = 16, kMostTaps = 25;
};

// Row: an output position (image, oh, ow). k: (kh, kw, channel), contiguous along the channels.
// kPooled: rows are ordered so that one thread gets all sums of a 2 x 2 window: row r is output
// r / 8 % 4 of window r / 32 * 8 + r % 8 (image, oh / 2, ow / 2).
template <typename Elem_, bool kPooled>
struct WindowAlongK {
    using Elem = Elem_;
    static constexpr bool kAlongK = true, kRound = false;
    const Elem* x;
    WindowShape s;
    int count;  // number of output positions, or of windows

    template <int kEach, int kStep, int kDepth>
    class Cursor {
     public:
        __device__ __forceinline__ Cursor(const WindowAlongK& operand, int row, int k, int) {
            const WindowShape& s = operand.s;
            tap_ = k / s.channels;
            const int channel = k - tap_ * s.channels, kh = tap_ / s.kernel;
            left_ = s.channels - channel;
            kw_left_ = s.kernel - (tap_ - kh * s.kernel);
            at_ = (kh * s.width + s.kernel - kw_left_) * s.channels + channel;
            SIMT_UNROLL
            for (int i = 0; i < kEach; ++i) {
                place(operand, row + i * kStep, offset_[i], taps_[i]);
            }
        }
        template <typename Copy>
        __device__ __forceinline__ void fetch(const WindowAlongK& operand, Copy copy) {
            SIMT_UNROLL
            for (int i = 0; i < kEach; ++i) {
                copy(i, operand.x + (offset_[i] + at_), (taps_[i] >> tap_ & 1u) != 0);
            }
            // Advance by at most kDepth / kFewestChannels taps.
            const WindowShape& s = operand.s;
            at_ += kDepth;
            left_ -= kDepth;
            SIMT_UNROLL
            for (int i = 0; i < kDepth / WindowShape::kFewestChannels; ++i) {
                if (left_ <= 0) {
                    left_ += s.channels;
                    ++tap_;
                    if (--kw_left_ == 0) {
                        kw_left_ = s.kernel;
                        at_ += (s.width - s.kernel) * s.channels;
                    }
                }
            }
        }

     private:
        // The offset of the window's beginning, and which of its taps are inside the image.
        static __device__ __forceinline__ void place(const WindowAlongK& operand, int row,
                                                     int& offset, unsigned& taps) {
            const WindowShape& s = operand.s;
            const int number = kPooled ? row / 32 * 8 + row % 8 : row, part = row / 8 % 4;
            const int rows = kPooled ? s.out_height / 2 : s.out_height;
            const int columns = kPooled ? s.out_width / 2 : s.out_width;
            const int image = number / (rows * columns), at = number % (rows * columns);
            int h = at / columns, w = at % columns;
            if (kPooled) {
                h = 2 * h + part / 2;
                w = 2 * w + part % 2;
            }
            h -= s.padding;
            w -= s.padding;
            offset = ((image * s.height + h) * s.width + w) * s.channels;
            const auto range = [](int begin, int end) {  // a range of bits; both at most 25
                return (1u << max(end, 0)) - (1u << min(max(begin, 0), max(end, 0)));
            };
            const unsigned columns_inside = range(-w, min(s.kernel, s.width - w));
            const unsigned rows_inside =
                s.row_bits & range(-h * s.kernel, min(s.kernel, s.height - h) * s.kernel);
            taps = number < operand.count ? columns_inside * rows_inside : 0;
        }

        int offset_[kEach];
        unsigned taps_[kEach];
        int tap_, at_;        // of the thread's chunk: tap, and offset from the window's beginning
        int left_, kw_left_;  // channels left in this tap; taps left in this row
    };
};

// Row: (kh, kw, channel), contiguous along the channels, or the row of ones after the last. k: an
// output position.
template <typename Math>
struct WindowAcrossK {
    using Elem = typename Math::Elem;
    static constexpr bool kAlongK = false, kRound = false;
    const Elem* x;
    WindowShape s;

    template <int kEach, int kStep, int kDepth>
    class Cursor {
        static_assert(kEach * kStep == kDepth);

     public:
        __device__ __forceinline__ Cursor(const WindowAcrossK& operand, int row, int k, int end) {
            const WindowShape& s = operand.s;
            const int tap = row / s.channels, channel = row - tap * s.channels;
            const int kh = tap / s.kernel, kw = tap - kh * s.kernel;
            const int plane = s.out_height * s.out_width;
            const int image = k / plane, at = k - image * plane, oh = at / s.out_width;
            one_ = tap == s.kernel * s.kernel && channel == 0;
            left_ = kh < s.kernel || one_ ? end - k : 0;
            h_end_ = s.out_height + kh - s.padding;
            w_end_ = s.out_width + kw - s.padding;
            h_ = oh + kh - s.padding;
            w_ = at - oh * s.out_width + kw - s.padding;
            offset_ = ((image * s.height + h_) * s.width + w_) * s.channels + channel;
            const int rest = kStep % plane;
            w_step_ = rest % s.out_width;
            h_step_ = rest / s.out_width;
            step_ = ((kStep / plane * s.height + h_step_) * s.width + w_step_) * s.channels;
        }
        template <typename Copy>
        __device__ __forceinline__ void fetch(const WindowAcrossK& operand, Copy copy) {
            const WindowShape& s = operand.s;
            SIMT_UNROLL
            for (int i = 0; i < kEach; ++i) {
                const bool inside = static_cast<unsigned>(h_) < static_cast<unsigned>(s.height) &&
                                    static_cast<unsigned>(w_) < static_cast<unsigned>(s.width);
                copy(i, one_ ? one_and_zeros<Math>() : operand.x + offset_,
                     (inside || one_) && i * kStep < left_);
                offset_ += step_;
                w_ += w_step_;
                h_ += h_step_;
                if (w_ >= w_end_) {
                    w_ -= s.out_width;
                    ++h_;
                    offset_ += (s.width - s.out_width) * s.channels;
                }
                if (h_ >= h_end_) {
                    h_ -= s.out_height;
                    offset_ += (s.height - s.out_height) * s.width * s.channels;
                }
            }
            left_ -= kDepth;
        }

     private:
        bool one_;
        int left_;  // remaining k
        int offset_, h_, w_, h_end_, w_end_;
        int step_, h_step_, w_step_;
    };
};

__device__ __forceinline__ float clip_below(float value) {
    return value <= 0.0f ? 0.0f : value;  // NaN stays NaN
}

// y[m][columns] = sum (+ bias[n]), with an optional ReLU; or a gradient: factor * sum where `of` is
// positive or NaN, else zero.
template <typename Math>
struct StoreMatrix {
    typename Math::Elem* y;
    const float* bias;  // may be null
    int rows, columns;
    bool relu;
    const typename Math::Elem* of = nullptr;  // may be null, [m][columns]
    float factor = 1.0f;

    template <bool kWhole>
    __device__ __forceinline__ void store(int m, int n, const float (&v)[4][2]) const {
        const bool second = kWhole || n + 1 < columns;
        if (!kWhole && n >= columns) {
            return;
        }
        const float b0 = bias == nullptr ? 0.0f : bias[n];
        const float b1 = bias == nullptr || !second ? 0.0f : bias[n + 1];
        SIMT_UNROLL
        for (int j = 0; j < 4; ++j) {
            if (kWhole || m + j * 8 < rows) {
                float first = v[j][0] + b0, next = v[j][1] + b1;
                if (relu) {
                    first = clip_below(first);
                    next = clip_below(next);
                }
                const std::int64_t i = std::int64_t{m + j * 8} * columns + n;
                if (of != nullptr) {
                    first = Math::load(of[i]) <= 0.0f ? 0.0f : first * factor;
                    next = second && Math::load(of[i + 1]) <= 0.0f ? 0.0f : next * factor;
                }
                auto* const at = y + i;
                if (second && columns % 2 == 0) {
                    Math::store_values(at, first, next);
                } else {
                    at[0] = Math::value(first);
                    if (second) {
                        at[1] = Math::value(next);
                    }
                }
            }
        }
    }
};

// The same followed by dropout, in two roundings; columns is even. m: the image. Only used for sums
// of parts, because random numbers take so many instructions.
template <typename Math>
struct StoreDropped {
    StoreMatrix<Math> store_matrix;
    BatchDropout dropout;

    template <bool kWhole>
    __device__ __forceinline__ void store(int m, int n, const float (&v)[4][2]) const {
        store_matrix.template store<kWhole>(m, n, v);
        SIMT_NO_UNROLL
        for (int row = m; row < min(m + 32, store_matrix.rows); row += 8) {
            const float4 factors = dropout.factors(row, static_cast<std::uint32_t>(n) / 4);
            auto* const at = store_matrix.y + std::int64_t{row} * store_matrix.columns + n;
            const bool low = n % 4 == 0;
            Math::store_values(at, Math::load(at[0]) * (low ? factors.x : factors.z),
                               Math::load(at[1]) * (low ? factors.y : factors.w));
        }
    }
};

// dw[m][columns] = sum; column `columns`, from the row of ones, is db[m]. columns is even.
struct StoreMatrixGradients {
    float *dw, *db;
    int rows, columns;

    template <bool kWhole>
    __device__ __forceinline__ void store(int m, int n, const float (&v)[4][2]) const {
        SIMT_UNROLL
        for (int j = 0; j < 4; ++j) {
            const int row = m + j * 8;
            if (kWhole || row < rows) {
                if (n < columns) {
                    Tf32Math::store_values(dw + std::int64_t{row} * columns + n, v[j][0], v[j][1]);
                } else if (n == columns) {
                    db[row] = v[j][0];
                }
            }
        }
    }
};

}  // namespace gyre::SIMT_NAMESPACE
