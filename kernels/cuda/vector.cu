// Functions on vectors: x = value; floats to 16 bits, back, and both at once; ||x||^2, whose bits
// do not depend on the order (base/exact_sum.hpp); x *= min(1, most / (norm + 1e-6)), the rule of
// torch.nn.utils.clip_grad_norm_, with the norm read on the device, where each rank has left the
// square of its part.
//
// Memory-bound: 4, 6, 6, 8, 4 and 8 bytes per element. One thread per 4 elements, of ||x||^2 per 16
// (16-byte accesses).
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
    SIMT_SHARED(std::int64_t, limbs, [ExactSum::kLimbs]);
    SIMT_SHARED(double, norms, [1]);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < ExactSum::kLimbs) {
        limbs[thread] = limb_of_ranks(args, thread);
    }
    __syncthreads();
    if (thread == 0) {
        norms[0] = sqrt(ExactSum::value_of(limbs));
    }
    __syncthreads();
    const double norm = norms[0];
    const float factor = clip_factor(args, norm);
    if (args.norm != nullptr && blockIdx.x == 0 && thread == 0) {
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

// Each block adds its limbs as numbers of 16 bits, with 32-bit atomics in shared memory, and then
// those that are not 0 to *sum.
__global__ void sum_of_squares_kernel(std::int64_t elems, const float* x, FiniteCheck finite,
                                      ExactSum* sum) {
    SIMT_SHARED(std::uint32_t, halves, [2 * ExactSum::kLimbs]);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 2 * ExactSum::kLimbs) {
        halves[thread] = 0;
    }
    __syncthreads();
    const std::int64_t begin = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 16;
    if (begin < elems) {
        float grain[16];
        SIMT_UNROLL
        for (int i = 0; i < 16; i += 4) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (begin + i + 4 <= elems) {
                v = load4(x + begin + i);
            } else {
                const auto element = [&](int j) {
                    return begin + i + j < elems ? x[begin + i + j] : 0.0f;
                };
                v = make_float4(element(0), element(1), element(2), element(3));
            }
            grain[i] = v.x;
            grain[i + 1] = v.y;
            grain[i + 2] = v.z;
            grain[i + 3] = v.w;
        }
        const double squares = sum_of_16_squares(grain);
        check_finite(finite, begin, static_cast<float>(squares - squares));  // 0 or NaN
        const ExactSum::Term term = ExactSum::split(squares);
        SIMT_UNROLL
        for (int i = 0; i < 3; ++i) {
            std::uint32_t* const at = halves + 2 * (term.limb + i);
            if (term.parts[i] != 0) {
                atomic_add(at, term.parts[i] & 0xffffu);
                atomic_add(at + 1, term.parts[i] >> 16);
            }
        }
    }
    __syncthreads();
    if (thread < ExactSum::kLimbs) {
        const std::int64_t limb = halves[2 * thread] + (std::int64_t{halves[2 * thread + 1]} << 16);
        if (limb != 0) {
            atomic_add(&sum->limbs[thread], limb);
        }
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
                    const FiniteCheck& finite, ExactSum* sum) {
    launch("sum_of_squares", sum_of_squares_kernel, dim3(elementwise_blocks((elems + 3) / 4)),
           dim3(kElementwiseBlock), context.stream, elems, x, finite, sum);
}

void scale_to_norm(const Context& context, const ClipArgs& args, std::int64_t elems, float* x) {
    // Launched without elements, too: the kernel writes the norm.
    launch("scale_to_norm", scale_to_norm_kernel, dim3(elementwise_blocks(elems)),
           dim3(kElementwiseBlock), context.stream, elems, args, x);
}

}  // namespace gyre::SIMT_NAMESPACE
