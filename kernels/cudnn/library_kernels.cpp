// cuDNN (convolutions, pooling, softmax) and cuBLASLt (linear layers) as LayerKernels.
//
// Descriptors and algorithms are kept by shape and number of images: a step makes none after the
// first of its kind.
#include "kernels/cudnn/library_kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <optional>
#include <string>

#include "kernels/base/error.hpp"
#include "kernels/cuda/layer_kernels.hpp"
#include "kernels/cuda/native.hpp"
#include "kernels/cudnn/libraries.hpp"

namespace gyre::cuda {
#if defined(GYRE_WITH_LIBRARIES)

namespace {

constexpr float kOne = 1.0f, kZero = 0.0f;
// For convolutions, at most; and what NVIDIA advises for cuBLAS on Hopper.
constexpr std::size_t kConvolutionWorkspace = std::size_t{256} << 20;
constexpr std::size_t kMatmulWorkspace = std::size_t{32} << 20;

CudnnOwned<cudnnHandle_t> make_handle(const Cudnn& cudnn, Stream& stream) {
    auto handle = cudnn.own(cudnn.cudnnCreate, cudnn.cudnnDestroy, "cudnnCreate");
    GYRE_CALL(cudnn, cudnnSetStream(handle.get(), native(stream)));
    return handle;
}

// Descriptors of float32 tensors [n][channels][height][width].
class Tensors {
 public:
    explicit Tensors(const Cudnn& cudnn) : cudnn_(cudnn) {}

    cudnnTensorDescriptor_t operator()(int n, const Shape& shape) {
        const std::array key{n, shape.channels, shape.height, shape.width};
        auto found = made_.find(key);
        if (found == made_.end()) {
            auto made =
                cudnn_.own(cudnn_.cudnnCreateTensorDescriptor, cudnn_.cudnnDestroyTensorDescriptor,
                           "cudnnCreateTensorDescriptor");
            GYRE_CALL(cudnn_,
                      cudnnSetTensor4dDescriptor(made.get(), CUDNN_TENSOR_NCHW, CUDNN_DATA_FLOAT, n,
                                                 shape.channels, shape.height, shape.width));
            found = made_.emplace(key, std::move(made)).first;
        }
        return found->second.get();
    }

 private:
    const Cudnn& cudnn_;
    std::map<std::array<int, 4>, CudnnOwned<cudnnTensorDescriptor_t>> made_;
};

// One direction of a convolution. The descriptor holds the kind of arithmetic, which belongs to the
// algorithm.
template <typename Algorithm>
struct Direction {
    CudnnOwned<cudnnConvolutionDescriptor_t> descriptor;
    Algorithm algorithm{};
    std::size_t workspace_bytes = 0;
    bool ours = false;  // cuDNN has no algorithm that is allowed
};
enum class Announced { not_at_all, for_evaluation, for_training };
struct Convolution {
    CudnnOwned<cudnnFilterDescriptor_t> filter;
    Direction<cudnnConvolutionFwdAlgo_t> forward;
    Direction<cudnnConvolutionBwdDataAlgo_t> backward_data;
    Direction<cudnnConvolutionBwdFilterAlgo_t> backward_filter;
};

// cuDNN's answers to the question for algorithms, the best one first.
template <typename Perf>
struct Candidates {
    static constexpr int kMost = 32;  // more than there are
    std::array<Perf, kMost> perfs{};
    int count = 0;
};

// A product of two matrices, as cuBLASLt sees them: by columns, so that its matrix [rows, cols] is
// our array [cols][rows].
struct Matmul {
    CublasOwned<cublasLtMatmulDesc_t> descriptor;
    CublasOwned<cublasLtMatrixLayout_t> a, b, d;
    cublasLtMatmulAlgo_t algorithm{};
    std::size_t workspace_bytes = 0;
    bool with_bias = false;  // adds the bias, or sums its gradient, on the way
};
enum class LinearPass { forward, backward_data, backward_weights };

// Of a pointer, in bytes, as far as algorithms care.
std::uint32_t alignment(const void* pointer) {
    constexpr std::uint32_t kMost = 256;
    const auto low_bits = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(pointer));
    return std::min(kMost, std::uint32_t{1} << std::countr_zero(low_bits | kMost));
}

class LibraryKernels final : public LayerKernels {
 public:
    LibraryKernels(const Context& context, const GpuOptions& options)
        : context_(context),
          deterministic_(options.deterministic),
          cudnn_handle_(make_handle(cudnn_, context.stream)),
          lt_handle_(own_lt(lt_.cublasLtCreate, lt_.cublasLtDestroy)) {}

    std::string implementation() const override {
        const std::size_t cudnn = cudnn_.cudnnGetVersion(), lt = lt_.cublasLtGetVersion();
        return fmt::format("cuDNN {}.{}.{} and cuBLASLt {}.{}.{}", cudnn / 10000, cudnn / 100 % 100,
                           cudnn % 100, lt / 10000, lt / 100 % 100, lt % 100);
    }

    void prepare_conv2d(const std::string& layer, const Conv2dShape& shape, int n,
                        bool training) override {
        if (n < 1) {
            return;
        }
        const Convolution& made =
            convolution(shape, n, training ? Announced::for_training : Announced::for_evaluation);
        std::size_t bytes = made.forward.workspace_bytes;
        bool ours = made.forward.ours;
        if (training) {
            bytes = std::max(
                {bytes, made.backward_data.workspace_bytes, made.backward_filter.workspace_bytes});
            ours = ours || made.backward_data.ours || made.backward_filter.ours;
        }
        context_.workspace.bytes(bytes);
        prepared_bytes_ = std::max(prepared_bytes_, bytes);
        if (ours) {
            context_.workspace.floats(conv2d_workspace_elems(context_, shape, n));
            choices_ += fmt::format(
                "{}, {} images: a direction by gyre's own kernels, as cuDNN "
                "has no {}algorithm for it within {} MiB\n",
                layer, n, deterministic_ ? "deterministic " : "", kConvolutionWorkspace >> 20);
        }
    }
    void prepare_maxpool2d(const std::string&, const MaxPool2dShape& shape, int n,
                           bool training) override {
        if (training) {
            context_.workspace.floats(shape.out().elems() * n);
        }
    }
    void prepare_linear(const std::string&, const LinearShape&, int, bool) override {
        context_.workspace.bytes(kMatmulWorkspace);
    }
    std::string choices() const override { return choices_; }

    void conv2d_forward(const Conv2dShape& shape, int n, const float* x, const float* w,
                        const float* b, float* y) override {
        const Convolution& made = convolution(shape, n, Announced::not_at_all);
        const auto& pass = made.forward;
        if (pass.ours) {
            return cuda::conv2d_forward(context_, shape, n, x, w, b, y);
        }
        GYRE_CALL(cudnn_, cudnnConvolutionForward(
                              cudnn_handle_.get(), &kOne, tensors_(n, shape.in), x,
                              made.filter.get(), w, pass.descriptor.get(), pass.algorithm,
                              context_.workspace.bytes(pass.workspace_bytes), pass.workspace_bytes,
                              &kZero, tensors_(n, shape.out()), y));
        add_bias(n, shape.out(), b, y);
    }
    void conv2d_backward_data(const Conv2dShape& shape, int n, const float* dy, const float* w,
                              float* dx) override {
        const Convolution& made = convolution(shape, n, Announced::not_at_all);
        const auto& pass = made.backward_data;
        if (pass.ours) {
            return cuda::conv2d_backward_data(context_, shape, n, dy, w, dx);
        }
        GYRE_CALL(cudnn_, cudnnConvolutionBackwardData(
                              cudnn_handle_.get(), &kOne, made.filter.get(), w,
                              tensors_(n, shape.out()), dy, pass.descriptor.get(), pass.algorithm,
                              context_.workspace.bytes(pass.workspace_bytes), pass.workspace_bytes,
                              &kZero, tensors_(n, shape.in), dx));
    }
    void conv2d_backward_weights(const Conv2dShape& shape, int n, const float* x, const float* dy,
                                 float* dw, float* db) override {
        const Convolution& made = convolution(shape, n, Announced::not_at_all);
        const auto& pass = made.backward_filter;
        if (pass.ours) {
            return cuda::conv2d_backward_weights(context_, shape, n, x, dy, dw, db);
        }
        GYRE_CALL(cudnn_, cudnnConvolutionBackwardFilter(
                              cudnn_handle_.get(), &kOne, tensors_(n, shape.in), x,
                              tensors_(n, shape.out()), dy, pass.descriptor.get(), pass.algorithm,
                              context_.workspace.bytes(pass.workspace_bytes), pass.workspace_bytes,
                              &kZero, made.filter.get(), dw));
        sum_bias(n, shape.out(), dy, db);
    }

    // cuDNN finds the largest values anew in the backward pass, and needs y for that.
    void maxpool2d_forward(const MaxPool2dShape& shape, int n, const float* x, float* y,
                           std::uint8_t* /*argmax*/) override {
        GYRE_CALL(cudnn_, cudnnPoolingForward(cudnn_handle_.get(), pooling(shape), &kOne,
                                              tensors_(n, shape.in), x, &kZero,
                                              tensors_(n, shape.out()), y));
    }
    void maxpool2d_backward(const MaxPool2dShape& shape, int n, const float* x,
                            const std::uint8_t* /*argmax*/, const float* dy, float* dx) override {
        float* const y = context_.workspace.floats(shape.out().elems() * n);
        maxpool2d_forward(shape, n, x, y, nullptr);
        const auto in = tensors_(n, shape.in), out = tensors_(n, shape.out());
        GYRE_CALL(cudnn_, cudnnPoolingBackward(cudnn_handle_.get(), pooling(shape), &kOne, out, y,
                                               out, dy, in, x, &kZero, in, dx));
    }

    void linear_forward(const LinearShape& shape, int n, const float* x, const float* w,
                        const float* b, float* y) override {
        if (!multiply(LinearPass::forward, shape, n, w, x, y, b)) {
            add_bias(n, {shape.out_features, 1, 1}, b, y);
        }
    }
    void linear_backward_data(const LinearShape& shape, int n, const float* dy, const float* w,
                              float* dx) override {
        multiply(LinearPass::backward_data, shape, n, w, dy, dx, nullptr);
    }
    void linear_backward_weights(const LinearShape& shape, int n, const float* x, const float* dy,
                                 float* dw, float* db) override {
        if (!multiply(LinearPass::backward_weights, shape, n, x, dy, dw, db)) {
            sum_bias(n, {shape.out_features, 1, 1}, dy, db);
        }
    }

    // The libraries have no loss: their softmax leaves most of it undone (LogSoftmax times it).
    void cross_entropy(const CrossEntropyArgs& args, int n) override {
        cuda::cross_entropy(context_, args, n);
    }

 private:
    template <typename Handle, typename... Args>
    CublasOwned<Handle> own_lt(cublasStatus_t (*create)(Handle*, Args...),
                               cublasStatus_t (*destroy)(Handle),
                               std::type_identity_t<Args>... args) const {
        Handle handle = nullptr;
        lt_.check(create(&handle, args...), "the creation of a cuBLASLt object", __FILE__,
                  __LINE__);
        return {handle, destroy};
    }

    void add_bias(int n, const Shape& out, const float* b, float* y) {
        GYRE_CALL(cudnn_,
                  cudnnAddTensor(cudnn_handle_.get(), &kOne, tensors_(1, {out.channels, 1, 1}), b,
                                 &kOne, tensors_(n, out), y));
    }
    void sum_bias(int n, const Shape& out, const float* dy, float* db) {
        GYRE_CALL(cudnn_,
                  cudnnConvolutionBackwardBias(cudnn_handle_.get(), &kOne, tensors_(n, out), dy,
                                               &kZero, tensors_(1, {out.channels, 1, 1}), db));
    }

    cudnnPoolingDescriptor_t pooling(const MaxPool2dShape& shape) {
        const std::array key{shape.kernel, shape.stride};
        auto found = poolings_.find(key);
        if (found == poolings_.end()) {
            auto made =
                cudnn_.own(cudnn_.cudnnCreatePoolingDescriptor,
                           cudnn_.cudnnDestroyPoolingDescriptor, "cudnnCreatePoolingDescriptor");
            GYRE_CALL(cudnn_,
                      cudnnSetPooling2dDescriptor(
                          made.get(),
                          deterministic_ ? CUDNN_POOLING_MAX_DETERMINISTIC : CUDNN_POOLING_MAX,
                          CUDNN_PROPAGATE_NAN, shape.kernel, shape.kernel, 0, 0, shape.stride,
                          shape.stride));
            found = poolings_.emplace(key, std::move(made)).first;
        }
        return found->second.get();
    }

    CudnnOwned<cudnnConvolutionDescriptor_t> convolution_descriptor(const Conv2dShape& shape) {
        auto made = cudnn_.own(cudnn_.cudnnCreateConvolutionDescriptor,
                               cudnn_.cudnnDestroyConvolutionDescriptor,
                               "cudnnCreateConvolutionDescriptor");
        GYRE_CALL(cudnn_, cudnnSetConvolution2dDescriptor(
                              made.get(), shape.padding, shape.padding, shape.stride, shape.stride,
                              1, 1, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
        GYRE_CALL(cudnn_, cudnnSetConvolutionMathType(
                              made.get(), context_.tf32 ? CUDNN_TENSOR_OP_MATH : CUDNN_FMA_MATH));
        return made;
    }

    const Convolution& convolution(const Conv2dShape& shape, int n, Announced announced) {
        const std::array key{shape.in.channels, shape.in.height, shape.in.width, shape.out_channels,
                             shape.kernel,      shape.stride,    shape.padding,  n};
        auto found = convolutions_.find(key);
        if (found == convolutions_.end()) {
            found = convolutions_.emplace(key, make_convolution(shape, n, announced)).first;
        }
        return found->second;
    }
    Convolution make_convolution(const Conv2dShape& shape, int n, Announced announced) {
        Convolution made{
            cudnn_.own(cudnn_.cudnnCreateFilterDescriptor, cudnn_.cudnnDestroyFilterDescriptor,
                       "cudnnCreateFilterDescriptor"),
            {convolution_descriptor(shape)},
            {convolution_descriptor(shape)},
            {convolution_descriptor(shape)}};
        const auto filter = made.filter.get();
        GYRE_CALL(cudnn_, cudnnSetFilter4dDescriptor(filter, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW,
                                                     shape.out_channels, shape.in.channels,
                                                     shape.kernel, shape.kernel));
        const auto handle = cudnn_handle_.get();
        const auto in = tensors_(n, shape.in), out = tensors_(n, shape.out());
        const auto forward = made.forward.descriptor.get();
        const auto backward_data = made.backward_data.descriptor.get();
        const auto backward_filter = made.backward_filter.descriptor.get();
        Candidates<cudnnConvolutionFwdAlgoPerf_t> for_forward;
        Candidates<cudnnConvolutionBwdDataAlgoPerf_t> for_data;
        Candidates<cudnnConvolutionBwdFilterAlgoPerf_t> for_filter;
        // Timings choose one algorithm today and another tomorrow, with other roundings; and they
        // have no place in a step.
        const bool known = announced != Announced::not_at_all;
        const bool find = known && !deterministic_;
        const bool find_backward = find && announced == Announced::for_training;
        std::optional<TimingOperand> x, y, w, scratch;
        if (find) {
            x.emplace(context_.stream, n * shape.in.elems());
            y.emplace(context_.stream, n * shape.out().elems());
            w.emplace(context_.stream, shape.weight_elems());
            // Not the workspace itself, which would stay as large as this.
            scratch.emplace(context_.stream, kConvolutionWorkspace / sizeof(float));
            GYRE_CALL(cudnn_, cudnnFindConvolutionForwardAlgorithmEx(
                                  handle, in, x->get(), filter, w->get(), forward, out, y->get(),
                                  for_forward.kMost, &for_forward.count, for_forward.perfs.data(),
                                  scratch->get(), kConvolutionWorkspace));
        } else {
            GYRE_CALL(cudnn_, cudnnGetConvolutionForwardAlgorithm_v7(
                                  handle, in, filter, forward, out, for_forward.kMost,
                                  &for_forward.count, for_forward.perfs.data()));
        }
        if (find_backward) {
            GYRE_CALL(cudnn_, cudnnFindConvolutionBackwardDataAlgorithmEx(
                                  handle, filter, w->get(), out, y->get(), backward_data, in,
                                  x->get(), for_data.kMost, &for_data.count, for_data.perfs.data(),
                                  scratch->get(), kConvolutionWorkspace));
            GYRE_CALL(cudnn_, cudnnFindConvolutionBackwardFilterAlgorithmEx(
                                  handle, in, x->get(), out, y->get(), backward_filter, filter,
                                  w->get(), for_filter.kMost, &for_filter.count,
                                  for_filter.perfs.data(), scratch->get(), kConvolutionWorkspace));
        } else {
            GYRE_CALL(cudnn_, cudnnGetConvolutionBackwardDataAlgorithm_v7(
                                  handle, filter, out, backward_data, in, for_data.kMost,
                                  &for_data.count, for_data.perfs.data()));
            GYRE_CALL(cudnn_, cudnnGetConvolutionBackwardFilterAlgorithm_v7(
                                  handle, in, out, backward_filter, filter, for_filter.kMost,
                                  &for_filter.count, for_filter.perfs.data()));
        }
        if (find) {
            context_.stream.synchronize();
        }
        // A last, smaller batch should not make the workspace grow in the midst of a training.
        const std::size_t limit = known ? kConvolutionWorkspace : prepared_bytes_;
        choose(for_forward, limit, made.forward, [&](auto algorithm, std::size_t* bytes) {
            return cudnn_.cudnnGetConvolutionForwardWorkspaceSize(handle, in, filter, forward, out,
                                                                  algorithm, bytes);
        });
        choose(for_data, limit, made.backward_data, [&](auto algorithm, std::size_t* bytes) {
            return cudnn_.cudnnGetConvolutionBackwardDataWorkspaceSize(
                handle, filter, out, backward_data, in, algorithm, bytes);
        });
        choose(for_filter, limit, made.backward_filter, [&](auto algorithm, std::size_t* bytes) {
            return cudnn_.cudnnGetConvolutionBackwardFilterWorkspaceSize(
                handle, in, out, backward_filter, filter, algorithm, bytes);
        });
        return made;
    }
    // Takes the best candidate that needs no more than `limit` of workspace, or that is allowed at
    // all; where there is none (deterministic ones may be missing), gyre's own kernels.
    template <typename Perf, typename Algorithm, typename WorkspaceSize>
    void choose(const Candidates<Perf>& candidates, std::size_t limit,
                Direction<Algorithm>& direction, const WorkspaceSize& workspace_size) const {
        const auto take = [&](std::size_t most, bool same_arithmetic) {
            for (int i = 0; i < candidates.count; ++i) {
                const Perf& perf = candidates.perfs[static_cast<std::size_t>(i)];
                // Of the kinds of arithmetic, the default would allow TF32.
                const cudnnMathType_t math = context_.tf32 ? perf.mathType : CUDNN_FMA_MATH;
                if (perf.status != CUDNN_STATUS_SUCCESS ||
                    (deterministic_ && perf.determinism != CUDNN_DETERMINISTIC) ||
                    (same_arithmetic ? perf.mathType != math
                                     : perf.mathType == CUDNN_TENSOR_OP_MATH)) {
                    continue;
                }
                GYRE_CALL(cudnn_, cudnnSetConvolutionMathType(direction.descriptor.get(), math));
                // Asked for again: it belongs to the arithmetic, too.
                std::size_t bytes = 0;
                if (workspace_size(perf.algo, &bytes) == CUDNN_STATUS_SUCCESS && bytes <= most) {
                    direction.algorithm = perf.algo;
                    direction.workspace_bytes = bytes;
                    return true;
                }
            }
            return false;
        };
        // Without TF32, rows of its kind of arithmetic were timed as they will run; others were
        // not.
        direction.ours = !take(limit, true) && !take(kConvolutionWorkspace, true) &&
                         !take(kConvolutionWorkspace, false);
    }

    CublasOwned<cublasLtMatrixLayout_t> layout(int rows, int cols) const {
        return own_lt(lt_.cublasLtMatrixLayoutCreate, lt_.cublasLtMatrixLayoutDestroy, CUDA_R_32F,
                      static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols),
                      std::int64_t{rows});
    }
    template <typename T>
    void set(const Matmul& matmul, cublasLtMatmulDescAttributes_t attribute, const T& value) const {
        GYRE_CALL(lt_, cublasLtMatmulDescSetAttribute(matmul.descriptor.get(), attribute, &value,
                                                      sizeof value));
    }

    // d = a b, transposed as the pass needs it. Returns whether the bias is done, too.
    bool multiply(LinearPass pass, const LinearShape& shape, int n, const float* a, const float* b,
                  float* d, const float* bias) {
        const std::array<std::uint32_t, 4> alignments{alignment(a), alignment(b), alignment(d),
                                                      alignment(bias)};
        const Key key{static_cast<int>(pass),
                      shape.in_features,
                      shape.out_features,
                      n,
                      static_cast<int>(alignments[0]),
                      static_cast<int>(alignments[1]),
                      static_cast<int>(alignments[2]),
                      static_cast<int>(alignments[3])};
        auto found = matmuls_.find(key);
        if (found == matmuls_.end()) {
            found = matmuls_.emplace(key, make_matmul(pass, shape, n, alignments, bias)).first;
        }
        const Matmul& made = found->second;
        if (made.with_bias) {
            set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias));
        }
        GYRE_CALL(lt_,
                  cublasLtMatmul(lt_handle_.get(), made.descriptor.get(), &kOne, a, made.a.get(), b,
                                 made.b.get(), &kZero, d, made.d.get(), d, made.d.get(),
                                 &made.algorithm, context_.workspace.bytes(made.workspace_bytes),
                                 made.workspace_bytes, native(context_.stream)));
        return made.with_bias;
    }
    Matmul make_matmul(LinearPass pass, const LinearShape& shape, int n,
                       const std::array<std::uint32_t, 4>& alignments, const float* bias) const {
        const int in = shape.in_features, out = shape.out_features;
        const bool forward = pass == LinearPass::forward;
        const bool weights = pass == LinearPass::backward_weights;
        //                    a             b            d
        // forward            w^T           x            y    [out, in] [in, n] = [out, n]
        // backward data      w             dy           dx   [in, out] [out, n] = [in, n]
        // backward weights   x             dy^T         dw   [in, n] [n, out] = [in, out]
        Matmul made{
            own_lt(lt_.cublasLtMatmulDescCreate, lt_.cublasLtMatmulDescDestroy,
                   context_.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
            layout(in, weights ? n : out), layout(forward ? in : out, n),
            layout(forward ? out : in, weights ? out : n)};
        set(made, CUBLASLT_MATMUL_DESC_TRANSA,
            static_cast<std::int32_t>(forward ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(made, CUBLASLT_MATMUL_DESC_TRANSB,
            static_cast<std::int32_t>(weights ? CUBLAS_OP_T : CUBLAS_OP_N));

        const auto preference =
            own_lt(lt_.cublasLtMatmulPreferenceCreate, lt_.cublasLtMatmulPreferenceDestroy);
        const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
            GYRE_CALL(lt_, cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value,
                                                                sizeof value));
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kMatmulWorkspace});
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[2]);

        // Returns whether there is an algorithm; without `strict` it is no error if there is none.
        const auto choose = [&](cublasLtEpilogue_t epilogue, bool strict) {
            set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(epilogue));
            cublasLtMatmulHeuristicResult_t result{};
            int count = 0;
            const cublasStatus_t status = lt_.cublasLtMatmulAlgoGetHeuristic(
                lt_handle_.get(), made.descriptor.get(), made.a.get(), made.b.get(), made.d.get(),
                made.d.get(), preference.get(), 1, &result, &count);
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
            // The heuristic looks at the pointer's alignment.
            set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias));
            made.with_bias =
                choose(forward ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_BGRADB, false);
        }
        if (!made.with_bias) {
            set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(nullptr));
            choose(CUBLASLT_EPILOGUE_DEFAULT, true);
        }
        return made;
    }

    using Key = std::array<int, 8>;

    const Context context_;
    const bool deterministic_;
    const Cudnn cudnn_;
    const CublasLt lt_;
    const CudnnOwned<cudnnHandle_t> cudnn_handle_;
    const CublasOwned<cublasLtHandle_t> lt_handle_;
    Tensors tensors_{cudnn_};
    std::map<std::array<int, 2>, CudnnOwned<cudnnPoolingDescriptor_t>> poolings_;
    std::map<Key, Convolution> convolutions_;  // by shape and n
    std::map<Key, Matmul> matmuls_;            // by pass, shape, n and alignments
    std::size_t prepared_bytes_ = 0;           // largest workspace of the convolutions announced
    std::string choices_;
};

}  // namespace

struct LogSoftmax::State {
    Context context;
    Cudnn cudnn{};
    CudnnOwned<cudnnHandle_t> handle = make_handle(cudnn, context.stream);
    Tensors tensors{cudnn};
};

LogSoftmax::LogSoftmax(const Context& context) : state_(new State{context}) {}

void LogSoftmax::forward_backward(int n, int classes, const float* logits, float* log_probabilities,
                                  const float* d_log_probabilities, float* d_logits) {
    const Cudnn& cudnn = state_->cudnn;
    const auto handle = state_->handle.get();
    const auto tensor = state_->tensors(n, {classes, 1, 1});
    GYRE_CALL(cudnn, cudnnSoftmaxForward(handle, CUDNN_SOFTMAX_LOG, CUDNN_SOFTMAX_MODE_INSTANCE,
                                         &kOne, tensor, logits, &kZero, tensor, log_probabilities));
    GYRE_CALL(cudnn, cudnnSoftmaxBackward(handle, CUDNN_SOFTMAX_LOG, CUDNN_SOFTMAX_MODE_INSTANCE,
                                          &kOne, tensor, log_probabilities, tensor,
                                          d_log_probabilities, &kZero, tensor, d_logits));
}

std::unique_ptr<LayerKernels> make_library_kernels(const Context& context,
                                                   const GpuOptions& options) {
    return std::make_unique<LibraryKernels>(context, options);
}

#else  // no libraries

namespace {

Error not_built_in() {
    return usage_error(
        "this gyre was built without cuDNN: cudnn.h (of cuDNN 9 or newer) and cublasLt.h were not "
        "there; install cuDNN's headers and build again, or use --kernels ours");
}

}  // namespace

struct LogSoftmax::State {};
LogSoftmax::LogSoftmax(const Context&) {
    throw not_built_in();
}
void LogSoftmax::forward_backward(int, int, const float*, float*, const float*, float*) {}

std::unique_ptr<LayerKernels> make_library_kernels(const Context&, const GpuOptions&) {
    throw not_built_in();
}

#endif

LogSoftmax::~LogSoftmax() = default;

}  // namespace gyre::cuda
