// Linear layers by cuBLASLt: y = x w^T + b, dx = dy w, dw = dy^T x, db = sum of dy.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "kernels/cudnn/handles.hpp"

#if defined(GYRE_WITH_LIBRARIES)
namespace gyre::cuda {
namespace {

constexpr std::size_t kWorkspace = std::size_t{32} << 20;  // as NVIDIA recommends for Hopper

// A pointer's alignment in bytes, up to the largest that algorithms distinguish.
std::uint32_t alignment(const void* pointer) {
    constexpr std::uint32_t kMost = 256;
    const auto low_bits = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(pointer));
    return std::min(kMost, std::uint32_t{1} << std::countr_zero(low_bits | kMost));
}

enum class Pass { forward, backward_input, backward_params };

// d = a b, transposed as the pass requires. cuBLASLt's matrices are column-major: its matrix [rows,
// cols] is our array [cols][rows].
struct Product {
    const float *a, *b;
    float* d;
    const float* bias;  // added, or its gradient to be computed as well; null: neither
};
using Alignments = std::array<std::uint32_t, 4>;
Alignments alignments_of(const Product& product) {
    return {alignment(product.a), alignment(product.b), alignment(product.d),
            alignment(product.bias)};
}

struct Matmul {
    int n;
    Pass pass;
    Alignments alignments;
    CublasOwned<cublasLtMatmulDesc_t> descriptor;
    CublasOwned<cublasLtMatrixLayout_t> a, b, d;
    TensorDescriptor y;  // for a separate bias kernel
    cublasLtMatmulAlgo_t algorithm{};
    std::size_t workspace_bytes = 0;
    bool with_bias = false;
};

class LinearOp final : public Op {
 public:
    LinearOp(Handles& handles, const LinearShape& shape)
        : handles_(handles), lt_(handles.lt), shape_(shape), bias_(handles, shape.out_features) {
        handles.context.workspace.reserve(kWorkspace);
    }
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return;
        }
        const Matmul& made =
            multiply(Pass::forward, batch.n,
                     {io.params[0].f32(), io.x.f32(), io.y.f32(), io.params[1].f32()});
        if (!made.with_bias) {
            bias_.add(io.params[1].f32(), made.y, io.y.f32());
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return zero_gradients(handles_.context, shape_.weight_elems(), shape_.out_features, io);
        }
        const Matmul& made =
            multiply(Pass::backward_params, batch.n,
                     {io.x.f32(), io.dy.f32(), io.grads[0].f32(), io.grads[1].f32()});
        if (!made.with_bias) {
            bias_.sum(made.y, io.dy.f32(), io.grads[1].f32());
        }
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        if (batch.n > 0) {
            multiply(Pass::backward_input, batch.n,
                     {io.params[0].f32(), io.dy.f32(), io.dx.f32(), nullptr});
        }
    }

 private:
    const Matmul& multiply(Pass pass, int n, const Product& product) {
        const Matmul& made = matmul(pass, n, product);
        if (made.with_bias) {
            set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(product.bias));
        }
        GYRE_CALL(lt_, cublasLtMatmul(handles_.blas.get(), made.descriptor.get(), &kOne, product.a,
                                      made.a.get(), product.b, made.b.get(), &kZero, product.d,
                                      made.d.get(), product.d, made.d.get(), &made.algorithm,
                                      handles_.context.workspace.bytes(made.workspace_bytes),
                                      made.workspace_bytes, native(handles_.context.stream)));
        return made;
    }
    // Depends on the operands' alignment, so it is created in the first pass.
    const Matmul& matmul(Pass pass, int n, const Product& product) {
        const Alignments alignments = alignments_of(product);
        for (const auto& made : matmuls_) {
            if (made->n == n && made->pass == pass && made->alignments == alignments) {
                return *made;
            }
        }
        auto made = std::make_unique<Matmul>(empty_matmul(pass, n, alignments));
        choose_algorithm(*made, product.bias);
        matmuls_.push_back(std::move(made));
        return *matmuls_.back();
    }

    CublasOwned<cublasLtMatrixLayout_t> layout(int rows, int cols) const {
        return handles_.own_lt(lt_.cublasLtMatrixLayoutCreate, lt_.cublasLtMatrixLayoutDestroy,
                               CUDA_R_32F, static_cast<std::uint64_t>(rows),
                               static_cast<std::uint64_t>(cols), std::int64_t{rows});
    }
    template <typename T>
    void set(const Matmul& matmul, cublasLtMatmulDescAttributes_t attribute, const T& value) const {
        GYRE_CALL(lt_, cublasLtMatmulDescSetAttribute(matmul.descriptor.get(), attribute, &value,
                                                      sizeof value));
    }
    //                    a             b            d
    // forward            w^T           x            y    [out, in] [in, n] = [out, n]
    // backward_input     w             dy           dx   [in, out] [out, n] = [in, n]
    // backward_params    x             dy^T         dw   [in, n] [n, out] = [in, out]
    Matmul empty_matmul(Pass pass, int n, const Alignments& alignments) const {
        const int in = shape_.in_features, out = shape_.out_features;
        const bool forward = pass == Pass::forward, weights = pass == Pass::backward_params;
        Matmul made{n,
                    pass,
                    alignments,
                    handles_.own_lt(
                        lt_.cublasLtMatmulDescCreate, lt_.cublasLtMatmulDescDestroy,
                        handles_.context.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                        CUDA_R_32F),
                    layout(in, weights ? n : out),
                    layout(forward ? in : out, n),
                    layout(forward ? out : in, weights ? out : n),
                    {handles_.cudnn, n, {out, 1, 1}}};
        set(made, CUBLASLT_MATMUL_DESC_TRANSA,
            static_cast<std::int32_t>(forward ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(made, CUBLASLT_MATMUL_DESC_TRANSB,
            static_cast<std::int32_t>(weights ? CUBLAS_OP_T : CUBLAS_OP_N));
        return made;
    }
    void choose_algorithm(Matmul& made, const float* bias) const {
        const auto preference = handles_.own_lt(lt_.cublasLtMatmulPreferenceCreate,
                                                lt_.cublasLtMatmulPreferenceDestroy);
        const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
            GYRE_CALL(lt_, cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value,
                                                                sizeof value));
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kWorkspace});
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, made.alignments[0]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, made.alignments[1]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, made.alignments[2]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, made.alignments[2]);

        // Returns whether an algorithm exists; if not, throws only if `strict`.
        const auto choose = [&](cublasLtEpilogue_t epilogue, bool strict) {
            set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(epilogue));
            cublasLtMatmulHeuristicResult_t result{};
            int count = 0;
            const cublasStatus_t status = lt_.cublasLtMatmulAlgoGetHeuristic(
                handles_.blas.get(), made.descriptor.get(), made.a.get(), made.b.get(),
                made.d.get(), made.d.get(), preference.get(), 1, &result, &count);
            if (strict) {
                lt_.check(status, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
                lt_.check(count > 0 ? result.state : CUBLAS_STATUS_NOT_SUPPORTED,
                          "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
            }
            made.algorithm = result.algo;
            made.workspace_bytes = result.workspaceSize;
            return status == CUBLAS_STATUS_SUCCESS && count > 0 &&
                   result.state == CUBLAS_STATUS_SUCCESS;
        };
        if (bias != nullptr) {
            // The heuristic considers the pointer's alignment.
            set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias));
            made.with_bias = choose(
                made.pass == Pass::forward ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_BGRADB,
                false);
        }
        if (!made.with_bias) {
            set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(nullptr));
            choose(CUBLASLT_EPILOGUE_DEFAULT, true);
        }
    }

    Handles& handles_;
    const CublasLt& lt_;
    const LinearShape shape_;
    const Bias bias_;
    std::vector<std::unique_ptr<Matmul>> matmuls_;
};

}  // namespace

std::unique_ptr<Op> make_op(Handles& handles, const std::string& /*layer*/, const LinearSpec& spec,
                            const OpSizes&) {
    return spec.fused() ? nullptr : std::make_unique<LinearOp>(handles, spec.shape);
}

}  // namespace gyre::cuda
#endif
