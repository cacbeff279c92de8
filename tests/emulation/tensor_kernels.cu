#include "tests/emulation/tensor_kernels.hpp"

#include <type_traits>

#include "kernels/cuda/tensor_operands.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

__global__ void fragments_kernel(MatrixType type, MatrixLayout layout, const std::uint32_t* a,
                                 const std::uint32_t* b, float* d) {
    SIMT_SHARED(std::uint32_t, rows, [24][8]);     // a, then b
    SIMT_SHARED(std::uint16_t, turned, [16][24]);  // [k][a's rows, b's rows]
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 24 * 8; i += 32) {
        const std::uint32_t word = i < 16 * 8 ? a[i] : b[i - 16 * 8];
        rows[i / 8][i % 8] = word;
        turned[i % 8 * 2][i / 8] = static_cast<std::uint16_t>(word & 0xffffu);
        turned[i % 8 * 2 + 1][i / 8] = static_cast<std::uint16_t>(word >> 16);
    }
    __syncwarp();
    std::uint32_t of_a[4], of_b[4];
    const unsigned low = lane / 8 % 2, high = lane / 16;
    if (layout == MatrixLayout::rows) {
        ldmatrix_x4(of_a, &rows[low * 8 + lane % 8][high * 4]);
        ldmatrix_x4(of_b, &rows[16 + lane % 8][low * 4]);  // the same rows twice
    } else {
        ldmatrix_x4_transposed(of_a, &turned[high * 8 + lane % 8][low * 8]);
        ldmatrix_x4_transposed(of_b, &turned[low * 8 + lane % 8][16]);
    }
    float sum[4] = {};
    const std::uint32_t half_b[2] = {of_b[0], of_b[1]};
    if (type == MatrixType::tf32) {
        mma_tf32(sum, of_a, half_b);
    } else if (type == MatrixType::bf16) {
        mma_bf16(sum, of_a, half_b);
    } else {
        mma_f16(sum, of_a, half_b);
    }
    for (unsigned j = 0; j < 4; ++j) {
        d[(lane / 4 + j / 2 * 8) * 8 + lane % 4 * 2 + j % 2] = sum[j];
    }
}

template <typename Math, typename ElemB>
void run_product(const Context& context, const TensorProduct& p, const void* matrix_a,
                 const void* matrix_b, float* c) {
    using Elem = typename Math::Elem;
    constexpr bool kRound = sizeof(Elem) == 4;
    const auto* const a = static_cast<const Elem*>(matrix_a);
    const auto* const b = static_cast<const ElemB*>(matrix_b);
    const std::int64_t partial_elems =
        tensor_partial_elems(p.m, p.n, p.k, kSliceBytes / static_cast<int>(sizeof(Elem)));
    context.workspace.reserve(static_cast<std::size_t>(partial_elems) * sizeof(float));
    const auto product = [&](const auto& of_a, const auto& of_b) {
        tensor_gemm<Math>(context, "product", p.m, p.n, p.k, of_a, of_b,
                          StoreMatrix<Tf32Math>{c, nullptr, p.m, p.n, false},
                          context.workspace.floats(partial_elems));
    };
    const DenseAlongK<Elem, kRound> rows_a{a, p.m, p.pitch_a};
    const DenseAlongK<ElemB, kRound> rows_b{b, p.n, p.pitch_b};
    const DenseAcrossK<ElemB, kRound> columns_b{b, p.n, p.pitch_b};
    if (p.layout_a == MatrixLayout::transposed) {
        product(DenseAcrossK<Elem, kRound>{a, p.m, p.pitch_a}, columns_b);
    } else if (p.layout_b == MatrixLayout::transposed) {
        product(rows_a, columns_b);
    } else {
        product(rows_a, rows_b);
    }
}

}  // namespace

void start_fragments(Stream& stream, MatrixType type, MatrixLayout layout, const std::uint32_t* a,
                     const std::uint32_t* b, float* d) {
    launch("fragments", fragments_kernel, dim3(1), dim3(32), stream, type, layout, a, b, d);
}

void run_tensor_product(const TensorProduct& product, int multiprocessors, const void* a,
                        const void* b, float* c) {
    Stream stream;
    Workspace workspace(stream);
    const Context context{stream, workspace, multiprocessors, true};
    const auto run = [&]<typename Math>(Math) {
        if (product.floats_b) {
            run_product<Math, float>(context, product, a, b, c);
        } else {
            run_product<Math, typename Math::Elem>(context, product, a, b, c);
        }
    };
    switch (product.type) {
        case MatrixType::tf32:
            run(Tf32Math{});
            break;
        case MatrixType::bf16:
            run(Bf16Math{});
            break;
        case MatrixType::f16:
            run(F16Math{});
            break;
    }
    stream.synchronize();
}

}  // namespace gyre::SIMT_NAMESPACE
