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

}  // namespace

void CpuBackend::maxpool2d_forward(const MaxPool2dShape& shape, int n, const float* x, float* y,
                                   std::uint8_t* argmax) {
    const Shape out = shape.out();
    const std::int64_t in_plane = shape.in.plane_elems() * kLanes;
    const std::int64_t out_plane = out.plane_elems() * kLanes;
    pool_.parallel_for(std::int64_t{block_count(n)} * out.channels, [&](std::int64_t plane, int) {
        const float* from = x + plane * in_plane;
        std::ptrdiff_t at = plane * out_plane;
        for (int oh = 0; oh < out.height; ++oh) {
            for (int ow = 0; ow < out.width; ++ow, at += kLanes) {
                const float* corner =
                    from +
                    (std::ptrdiff_t{oh} * shape.in.width + ow) * shape.stride * kLanes;
                LaneVec best = load_lanes<LaneVec>(corner);
                IntLanes where = {};
                for (int kh = 0, k = 0; kh < shape.kernel; ++kh) {
                    for (int kw = 0; kw < shape.kernel; ++kw, ++k) {
                        const LaneVec v = load_lanes<LaneVec>(
                            corner + (std::ptrdiff_t{kh} * shape.in.width + kw) * kLanes);
                        const IntLanes better = (v > best) | (v != v);
                        best = better ? v : best;
                        where = better ? IntLanes{} + k : where;
                    }
                }
                std::memcpy(y + at, &best, sizeof best);
                if (argmax != nullptr) {
                    const ByteLanes bytes = __builtin_convertvector(where, ByteLanes);
                    std::memcpy(argmax + at, &bytes, sizeof bytes);
                }
            }
        }
    });
}

void CpuBackend::maxpool2d_backward(const MaxPool2dShape& shape, int n, const float* dy,
                                    const std::uint8_t* argmax, float* dx) {
    const Shape out = shape.out();
    const std::int64_t in_plane = shape.in.plane_elems() * kLanes;
    const std::int64_t out_plane = out.plane_elems() * kLanes;
    const bool overlapping = shape.stride < shape.kernel;
    const bool covers = shape.stride == shape.kernel &&
                        out.height * shape.stride == shape.in.height &&
                        out.width * shape.stride == shape.in.width;
    pool_.parallel_for(std::int64_t{block_count(n)} * out.channels, [&](std::int64_t plane, int) {
        float* to = dx + plane * in_plane;
        if (!covers) {
            std::fill_n(to, in_plane, 0.0f);
        }
        std::ptrdiff_t at = plane * out_plane;
        for (int oh = 0; oh < out.height; ++oh) {
            for (int ow = 0; ow < out.width; ++ow, at += kLanes) {
                float* corner =
                    to + (std::ptrdiff_t{oh} * shape.in.width + ow) * shape.stride * kLanes;
                const LaneVec d = load_lanes<LaneVec>(dy + at);
                const IntLanes where =
                    __builtin_convertvector(load_lanes<ByteLanes>(argmax + at), IntLanes);
                for (int kh = 0, k = 0; kh < shape.kernel; ++kh) {
                    for (int kw = 0; kw < shape.kernel; ++kw, ++k) {
                        float* target =
                            corner + (std::ptrdiff_t{kh} * shape.in.width + kw) * kLanes;
                        LaneVec mine = (where == k) ? d : LaneVec{};
                        if (overlapping) {
                            mine += load_lanes<LaneVec>(target);
                        }
                        std::memcpy(target, &mine, sizeof mine);
                    }
                }
            }
        }
    });
}

}  // namespace gyre::cpu
