// Functions on vectors: x = value; floats to 16 bits, back, and both at once; ||x||^2 in double
// precision; x *= min(1, most / (norm + 1e-6)), the rule of torch.nn.utils.clip_grad_norm_, with
// the norm read on the device, where each rank has left the square of its part.
//
// Memory-bound: 4, 6, 6, 8, 4 and 8 bytes per element. One thread per 4 elements (16-byte
// accesses). Sums have a fixed order: the elements of a thread, the threads of a block, then one
// block adds the blocks.
#include <cmath>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

__global__ void fill_kernel(std::int64_t elems, float value, float* x) {
    for_my_quad(
        elems, [=](std::int64_t i) { store4(x + i, make_float4(value, value, value, value)); },
        [=](std::int64_t i) { x[i] = value; });
}

template <DataType type>
__global__ void narrow_kernel(std::int64_t elems, const float* x, const float* factor,
                              std::uint16_t* y) {
    const float times = factor == nullptr ? 1.0f : *factor;
    const auto to = [=](float v) { return narrow::to<type>(v * times); };
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(x + i);
            uint2 four;
            four.x = to(v.x) | std::uint32_t{to(v.y)} << 16;
            four.y = to(v.z) | std::uint32_t{to(v.w)} << 16;
            store_vector(y + i, four);
        },
        [=](std::int64_t i) { y[i] = to(x[i]); });
}

template <DataType type>
__global__ void widen_kernel(std::int64_t elems, const std::uint16_t* x, float* y) {
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const uint2 four = load_vector<uint2>(x + i);
            const auto low = [](std::uint32_t two) {
                return narrow::from<type>(static_cast<std::uint16_t>(two & 0xffffu));
            };
            const auto high = [](std::uint32_t two) {
                return narrow::from<type>(static_cast<std::uint16_t>(two >> 16));
            };
            store4(y + i, make_float4(low(four.x), high(four.x), low(four.y), high(four.y)));
        },
        [=](std::int64_t i) { y[i] = narrow::from<type>(x[i]); });
}

template <DataType type>
__global__ void round_kernel(std::int64_t elems, const float* x, float* y) {
    const auto round = [](float v) { return narrow::from<type>(narrow::to<type>(v)); };
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(x + i);
            store4(y + i, make_float4(round(v.x), round(v.y), round(v.z), round(v.w)));
        },
        [=](std::int64_t i) { y[i] = round(x[i]); });
}

__global__ void scale_to_norm_kernel(std::int64_t elems, ClipArgs args, float* x) {
    const double norm = gradient_norm(args);
    const float factor = clip_factor(args, norm);
    if (args.norm != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
        *args.norm = static_cast<float>(norm);
    }
    for_my_quad(
        elems,
        [=](std::int64_t i) {
            const float4 v = load4(x + i);
            store4(x + i, make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor));
        },
        [=](std::int64_t i) { x[i] *= factor; });
}

// partial: [blocks]
__global__ void sum_of_squares_kernel(std::int64_t elems, const float* x, FiniteCheck finite,
                                      double* partial) {
    double sum = 0.0;
    const auto add = [&](float v) { sum += static_cast<double>(v) * static_cast<double>(v); };
    for_my_quad(
        elems,
        [&](std::int64_t i) {
            const float4 v = load4(x + i);
            check_finite(finite, i, v);
            add(v.x);
            add(v.y);
            add(v.z);
            add(v.w);
        },
        [&](std::int64_t i) {
            check_finite(finite, i, x[i]);
            add(x[i]);
        });
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
    }
}

// Launched with one block.
__global__ void sum_kernel(int elems, const double* x, bool add, double* result) {
    double sum = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < elems;
         i += static_cast<int>(kElementwiseBlock)) {
        sum += x[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        *result = add ? *result + sum : sum;
    }
}

}  // namespace

void fill(const Context& context, std::int64_t elems, float value, float* x) {
    launch_elementwise("fill", fill_kernel, context, elems, value, x);
}

void narrow(const Context& context, DataType type, std::int64_t elems, const float* x,
            std::uint16_t* y, const float* factor) {
    launch_elementwise("narrow",
                       type == DataType::bfloat16 ? narrow_kernel<DataType::bfloat16>
                                                  : narrow_kernel<DataType::float16>,
                       context, elems, x, factor, y);
}

void widen(const Context& context, DataType type, std::int64_t elems, const std::uint16_t* x,
           float* y) {
    launch_elementwise("widen",
                       type == DataType::bfloat16 ? widen_kernel<DataType::bfloat16>
                                                  : widen_kernel<DataType::float16>,
                       context, elems, x, y);
}

void round_to(const Context& context, DataType type, std::int64_t elems, const float* x, float* y) {
    launch_elementwise("round_to",
                       type == DataType::bfloat16 ? round_kernel<DataType::bfloat16>
                                                  : round_kernel<DataType::float16>,
                       context, elems, x, y);
}

void sum_of_squares(const Context& context, std::int64_t elems, const float* x,
                    const FiniteCheck& finite, bool add, double* sum) {
    const unsigned blocks = elementwise_blocks(elems);
    auto* sums =
        static_cast<double*>(context.workspace.bytes(sizeof(double) * std::size_t{blocks}));
    const dim3 block(kElementwiseBlock);
    launch("sum_of_squares", sum_of_squares_kernel, dim3(blocks), block, context.stream, elems, x,
           finite, sums);
    launch("sum", sum_kernel, dim3(1), block, context.stream, static_cast<int>(blocks),
           static_cast<const double*>(sums), add, sum);
}

void scale_to_norm(const Context& context, const ClipArgs& args, std::int64_t elems, float* x) {
    // Launched without elements, too: the kernel writes the norm.
    launch("scale_to_norm", scale_to_norm_kernel, dim3(elementwise_blocks(elems)),
           dim3(kElementwiseBlock), context.stream, elems, args, x);
}

}  // namespace gyre::SIMT_NAMESPACE
