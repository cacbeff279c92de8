// Vectors: x = value, x *= factor, and the sum of squares in double precision.
//
// Memory-bound: 4, 8 and 4 bytes an element. One thread to 4 elements (16-byte accesses).
// The sum has a fixed order: the elements of a thread, the threads of a block, then one block adds
// the blocks.
#include <algorithm>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

__global__ void fill_kernel(std::int64_t elems, float value, float* x) {
    for_my_quad(
        elems, [=](std::int64_t i) { store4(x + i, make_float4(value, value, value, value)); },
        [=](std::int64_t i) { x[i] = value; });
}

__global__ void scale_kernel(std::int64_t elems, float factor, float* x) {
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(x + i);
            store4(x + i, make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor));
        },
        [=](std::int64_t i) { x[i] *= factor; });
}

// partial: [blocks]
__global__ void sum_of_squares_kernel(std::int64_t elems, const float* x, double* partial) {
    double sum = 0.0;
    const auto add = [&](float v) { sum += static_cast<double>(v) * static_cast<double>(v); };
    for_my_quad(
        elems,
        [&](std::int64_t i) {
            const float4 v = load4(x + i);
            add(v.x);
            add(v.y);
            add(v.z);
            add(v.w);
        },
        [&](std::int64_t i) { add(x[i]); });
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
    }
}

// One block.
__global__ void sum_kernel(int elems, const double* x, double* result) {
    double sum = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < elems;
         i += static_cast<int>(kElementwiseBlock)) {
        sum += x[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        *result = sum;
    }
}

}  // namespace

void fill(const Context& context, std::int64_t elems, float value, float* x) {
    launch_elementwise("fill", fill_kernel, context, elems, value, x);
}

void scale(const Context& context, std::int64_t elems, float factor, float* x) {
    launch_elementwise("scale", scale_kernel, context, elems, factor, x);
}

void sum_of_squares(const Context& context, std::int64_t elems, const float* x, double* result) {
    const auto blocks = static_cast<int>(elementwise_blocks(elems));
    auto* partial = static_cast<double*>(
        context.workspace.bytes(sizeof(double) * static_cast<std::size_t>(blocks)));
    launch("sum_of_squares", sum_of_squares_kernel, dim3(static_cast<unsigned>(blocks)),
           dim3(kElementwiseBlock), context.stream, elems, x, partial);
    launch("sum", sum_kernel, dim3(1), dim3(kElementwiseBlock), context.stream, blocks, partial,
           result);
}

}  // namespace gyre::SIMT_NAMESPACE
