// Max-pooling on the CPU. The forward pass keeps, for each output, the position of the first
// largest value within its window (one byte); the backward pass hands the gradient to it.
//
//   y[c][oh][ow] = max over kh, kw of x[c][oh*s + kh][ow*s + kw];  NaN wins, as in PyTorch
#include <algorithm>
#include <cstring>

#include "kernels/cpu/backend_cpu.hpp"

namespace gyre::cpu {
namespace {

using IntLanes = std::int32_t __attribute__((vector_size(kLanes * sizeof(std::int32_t))));
using ByteLanes = std::uint8_t __attribute__((vector_size(kLanes)));

template <typename Lanes, typename T>
Lanes load_lanes(const T* p) {
    Lanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// One plane of one block. kWindow: the kernel's extent where it is known to the compiler, else 0.
template <int kWindow>
void pool_plane(const MaxPool2dShape& shape, const float* x, float* y, std::uint8_t* argmax) {
    const int kernel = kWindow > 0 ? kWindow : shape.kernel;
    const Shape out = shape.out();
    for (int oh = 0; oh < out.height; ++oh) {
        const float* corner = x + std::ptrdiff_t{oh} * shape.stride * shape.in.width * kLanes;
        for (int ow = 0; ow < out.width; ++ow) {
            LaneVec best = load_lanes<LaneVec>(corner);
            IntLanes where = {};
            for (int kh = 0, k = 0; kh < kernel; ++kh) {
                for (int kw = 0; kw < kernel; ++kw, ++k) {
                    const LaneVec v = load_lanes<LaneVec>(
                        corner + (std::ptrdiff_t{kh} * shape.in.width + kw) * kLanes);
                    where = v > best ? IntLanes{} + k : where;
                    best = v > best ? v : best;
                    where = v != v ? IntLanes{} + k : where;
                    best = v != v ? v : best;
                }
            }
            std::memcpy(y, &best, sizeof best);
            y += kLanes;
            if (argmax != nullptr) {
                const ByteLanes bytes = __builtin_convertvector(where, ByteLanes);
                std::memcpy(argmax, &bytes, sizeof bytes);
                argmax += kLanes;
            }
            corner += std::ptrdiff_t{shape.stride} * kLanes;
        }
    }
}

template <int kWindow>
void unpool_plane(const MaxPool2dShape& shape, const float* dy, const std::uint8_t* argmax,
                  float* dx) {
    const int kernel = kWindow > 0 ? kWindow : shape.kernel;
    const Shape out = shape.out();
    const bool overlapping = shape.stride < kernel;
    for (int oh = 0; oh < out.height; ++oh) {
        float* corner = dx + std::ptrdiff_t{oh} * shape.stride * shape.in.width * kLanes;
        for (int ow = 0; ow < out.width; ++ow) {
            const LaneVec d = load_lanes<LaneVec>(dy);
            const IntLanes where = __builtin_convertvector(load_lanes<ByteLanes>(argmax), IntLanes);
            for (int kh = 0, k = 0; kh < kernel; ++kh) {
                for (int kw = 0; kw < kernel; ++kw, ++k) {
                    float* target = corner + (std::ptrdiff_t{kh} * shape.in.width + kw) * kLanes;
                    LaneVec mine = where == k ? d : LaneVec{};
                    if (overlapping) {
                        mine += load_lanes<LaneVec>(target);
                    }
                    std::memcpy(target, &mine, sizeof mine);
                }
            }
            dy += kLanes;
            argmax += kLanes;
            corner += std::ptrdiff_t{shape.stride} * kLanes;
        }
    }
}

}  // namespace

void CpuBackend::maxpool2d_forward(const MaxPool2dShape& shape, int n, const float* x, float* y,
                                   std::uint8_t* argmax) {
    const std::int64_t in_plane = shape.in.plane_elems() * kLanes;
    const std::int64_t out_plane = shape.out().plane_elems() * kLanes;
    const auto pool = shape.kernel == 2   ? pool_plane<2>
                      : shape.kernel == 3 ? pool_plane<3>
                                          : pool_plane<0>;
    pool_.parallel_for(std::int64_t{block_count(n)} * shape.in.channels, [&](std::int64_t i, int) {
        pool(shape, x + i * in_plane, y + i * out_plane,
             argmax == nullptr ? nullptr : argmax + i * out_plane);
    });
}

void CpuBackend::maxpool2d_backward(const MaxPool2dShape& shape, int n, const float*,
                                    const std::uint8_t* argmax, const float* dy, float* dx) {
    const Shape out = shape.out();
    const std::int64_t in_plane = shape.in.plane_elems() * kLanes;
    const std::int64_t out_plane = out.plane_elems() * kLanes;
    // Whether every input belongs to exactly one window, so that no zeros need be laid first.
    const bool covers = shape.stride == shape.kernel &&
                        out.height * shape.stride == shape.in.height &&
                        out.width * shape.stride == shape.in.width;
    const auto unpool = shape.kernel == 2   ? unpool_plane<2>
                        : shape.kernel == 3 ? unpool_plane<3>
                                            : unpool_plane<0>;
    pool_.parallel_for(std::int64_t{block_count(n)} * out.channels, [&](std::int64_t i, int) {
        if (!covers) {
            std::fill_n(dx + i * in_plane, in_plane, 0.0f);
        }
        unpool(shape, dy + i * out_plane, argmax + i * out_plane, dx + i * in_plane);
    });
}

}  // namespace gyre::cpu
