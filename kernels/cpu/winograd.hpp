// 3 x 3 convolution by Winograd's minimal filtering, with 16 multiplications for four outputs where
// the formula has 36: Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR
// 2016, F(2 x 2, 3 x 3).
//
//   y tile [2][2] = A^T [ sum over c of (G w[o][c] G^T) * (B^T x[c] tile [4][4] B) ] A
//
// Its rounding error is a small multiple of the direct sum's (the transforms have entries 0, 1/2,
// 1); tests/kernels_test.cpp bounds it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/backend_cpu.hpp"
#include "kernels/ops/shapes.hpp"

namespace gyre::cpu {

// Whether the transforms, which grow with the channels, cost less than the multiplications saved,
// which grow with their product.
inline bool winograd_pays(const Conv2dShape& shape) {
    return shape.kernel == 3 && shape.stride == 1 && shape.padding <= 2 &&
           shape.in.channels >= 16 && shape.out_channels >= 16;
}

struct Correlation3x3 {
    Shape in, out;
    int padding = 0;
    const float* w = nullptr;  // w[o * w_out + c * w_in + position]
    std::ptrdiff_t w_out = 0, w_in = 0;
    bool flipped = false;         // positions in reverse order, for the data gradient
    const float* bias = nullptr;  // [out.channels], or null
};

struct WinogradScratch {
    Scratch &weights, &padded;
    std::vector<Scratch>& workers;  // [threads]
};

// x [blocks][in][lane] -> y [blocks][out][lane].
void correlate_3x3(ThreadPool& pool, const Correlation3x3& corr, int blocks, const float* x,
                   float* y, WinogradScratch scratch);

}  // namespace gyre::cpu
