// Max-pooling of one plane of one block and its backward pass, for the pooling operation and for a
// convolution fused with it.
//
//   y[oh][ow] = max over kh, kw of x[oh*s + kh][ow*s + kw];  NaN propagates, as in PyTorch
//
// argmax: for each output, the position of the first maximum within its window, one byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/simd.hpp"
#include "kernels/ops/shapes.hpp"

namespace gyre::cpu {

using IntVec = std::int32_t __attribute__((vector_size(sizeof(Vec))));
using ByteVec = std::uint8_t __attribute__((vector_size(kVec)));

template <typename Lanes, typename T>
Lanes load_lanes(const T* p) {
    Lanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <typename Lanes, typename T>
void store_lanes(T* p, Lanes v) {
    std::memcpy(p, &v, sizeof v);
}

// rows x cols windows of kernel x kernel pixels, `stride` apart, with `line` floats from one line
// of x to the next.
struct Windows {
    int kernel, stride;
    std::ptrdiff_t line;
    int rows, cols;
};

// The running maximum of a window and its position.
struct Largest {
    Vec value;  // initially the value at position 0
    IntVec where = {};

    void take(Vec v, int position) {
        // g++ 12 generates slower code if the two conditions are combined.
        where = v > value ? IntVec{} + position : where;
        value = v > value ? v : value;
        where = v != v ? IntVec{} + position : where;
        value = v != v ? v : value;
    }
    template <typename Elem>
    void store_value(Elem* y, bool relu) const {
        store(y, relu ? clip_below_zero(value) : value);
    }
    void store_where(std::uint8_t* argmax) const {
        store_lanes(argmax, __builtin_convertvector(where, ByteVec));
    }
};

// kWindow: the kernel's extent if known at compile time, else 0. kKeep: argmax is written.
// Operations that may be fused: kScaled multiplies x by factor [kLanes] first, and kRelu applies
// y = max(y, 0) last. Elem: of x and y.
template <int kWindow, bool kScaled, bool kRelu, bool kKeep, typename Elem = float>
void pool_windows(const Windows& all, const Elem* x, const float* factor, Elem* y,
                  std::uint8_t* argmax) {
    const Windows windows = all;  // a local copy, which stores cannot alias
    const int kernel = kWindow > 0 ? kWindow : windows.kernel;
    for (int row = 0; row < windows.rows; ++row) {
        const Elem* corner = x + row * windows.stride * windows.line;
        for (int col = 0; col < windows.cols; ++col) {
            // Prefetch the next row: lines this short defeat the hardware prefetcher.
            for (int k = 0; k < kernel * kernel; ++k) {
                __builtin_prefetch(corner + (k / kernel + windows.stride) * windows.line +
                                   k % kernel * kLanes);
            }
            for (int lane = 0; lane < kLanes; lane += kVec) {
                const auto value = [&](int kh, int kw) {
                    const Vec v =
                        load(corner + kh * windows.line + std::ptrdiff_t{kw} * kLanes + lane);
                    return kScaled ? v * load(factor + lane) : v;
                };
                Largest best{value(0, 0)};
                for (int k = 1; k < kernel * kernel; ++k) {
                    best.take(value(k / kernel, k % kernel), k);
                }
                best.store_value(y + lane, kRelu);
                if constexpr (kKeep) {
                    best.store_where(argmax + lane);
                }
            }
            y += kLanes;
            argmax += kKeep ? kLanes : 0;
            corner += std::ptrdiff_t{windows.stride} * kLanes;
        }
    }
}
template <typename Elem = float>
using PoolFunction = decltype(&pool_windows<0, false, false, false, Elem>);
template <bool kScaled, bool kRelu, bool kKeep, typename Elem>
PoolFunction<Elem> pool_function_of(int kernel) {
    return kernel == 2   ? &pool_windows<2, kScaled, kRelu, kKeep, Elem>
           : kernel == 3 ? &pool_windows<3, kScaled, kRelu, kKeep, Elem>
                         : &pool_windows<0, kScaled, kRelu, kKeep, Elem>;
}
template <bool kScaled, bool kKeep, typename Elem = float>
PoolFunction<Elem> pool_function(int kernel, bool relu) {
    return relu ? pool_function_of<kScaled, true, kKeep, Elem>(kernel)
                : pool_function_of<kScaled, false, kKeep, Elem>(kernel);
}

// Computes dx of the windows from dy, which counts as 0 where y <= 0 unless y is null. Pixels
// outside all windows are not written; if windows overlap, dx must be zeroed beforehand.
template <int kWindow, typename Elem = float>
void unpool_windows(const Windows& all, const Elem* dy, const Elem* y, const std::uint8_t* argmax,
                    Elem* dx) {
    const Windows windows = all;
    const int kernel = kWindow > 0 ? kWindow : windows.kernel;
    const bool overlapping = windows.stride < kernel;
    for (int row = 0; row < windows.rows; ++row) {
        Elem* corner = dx + row * windows.stride * windows.line;
        for (int col = 0; col < windows.cols; ++col) {
            for (int lane = 0; lane < kLanes; lane += kVec) {
                Vec d = load(dy + lane);
                if (y != nullptr) {
                    d = pass_above_zero(load(y + lane), d);
                }
                const IntVec where =
                    __builtin_convertvector(load_lanes<ByteVec>(argmax + lane), IntVec);
                for (int kh = 0, k = 0; kh < kernel; ++kh) {
                    for (int kw = 0; kw < kernel; ++kw, ++k) {
                        Elem* target =
                            corner + kh * windows.line + std::ptrdiff_t{kw} * kLanes + lane;
                        const Vec mine = where == k ? d : Vec{};
                        store(target, overlapping ? mine + load(target) : mine);
                    }
                }
            }
            dy += kLanes;
            y += y != nullptr ? kLanes : 0;
            argmax += kLanes;
            corner += std::ptrdiff_t{windows.stride} * kLanes;
        }
    }
}
template <typename Elem = float>
using UnpoolFunction = decltype(&unpool_windows<0, Elem>);
template <typename Elem = float>
UnpoolFunction<Elem> unpool_function(int kernel) {
    return kernel == 2   ? &unpool_windows<2, Elem>
           : kernel == 3 ? &unpool_windows<3, Elem>
                         : &unpool_windows<0, Elem>;
}

// True if each input belongs to exactly one window, so that dx need not be zeroed first.
inline bool windows_cover(const MaxPool2dShape& shape) {
    const Shape out = shape.out();
    return shape.stride == shape.kernel && shape.padding == 0 &&
           out.height * shape.stride == shape.in.height &&
           out.width * shape.stride == shape.in.width;
}

}  // namespace gyre::cpu
