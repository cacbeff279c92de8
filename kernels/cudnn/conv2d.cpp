// Convolution by cuDNN, or by gyre's own kernels in a direction without a permitted algorithm.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "kernels/cuda/timing.hpp"
#include "kernels/cudnn/handles.hpp"

#if defined(GYRE_WITH_LIBRARIES)
namespace gyre::cuda {
namespace {

constexpr std::size_t kMostWorkspace = std::size_t{256} << 20;

// The descriptor sets the arithmetic (math type), which belongs to the algorithm.
template <typename Algorithm>
struct Direction {
    CudnnOwned<cudnnConvolutionDescriptor_t> descriptor;
    Algorithm algorithm{};
    std::size_t workspace_bytes = 0;
    bool ours = false;  // cuDNN has no permitted algorithm
};
struct Plan {
    int n;
    TensorDescriptor in, out;
    Direction<cudnnConvolutionFwdAlgo_t> forward;
    Direction<cudnnConvolutionBwdDataAlgo_t> backward_data;
    Direction<cudnnConvolutionBwdFilterAlgo_t> backward_filter;
};

// The purpose for which a number of images was listed.
enum class Named { not_at_all, for_evaluation, for_training };

// cuDNN's candidate algorithms, best first.
template <typename Perf>
struct Candidates {
    static constexpr int kMost = 32;  // more than cuDNN has
    std::array<Perf, kMost> perfs{};
    int count = 0;
};

// The operands on which algorithms are timed.
struct Operands {
    Operands(Stream& stream, const Conv2dShape& shape, int n)
        : x(stream, n * shape.in.elems()),
          y(stream, n * shape.out().elems()),
          w(stream, shape.weight_elems()),
          scratch(stream, kMostWorkspace / sizeof(float)) {}
    TimingOperand x, y, w;
    TimingOperand scratch;  // not the workspace itself, which would stay this large
};

class Conv2dOp final : public Op {
 public:
    Conv2dOp(Handles& handles, const std::string& layer, const Conv2dShape& shape,
             const OpSizes& sizes)
        : handles_(handles),
          cudnn_(handles.cudnn),
          shape_(shape),
          sizes_(sizes),
          filter_(cudnn_.own(cudnn_.cudnnCreateFilterDescriptor,
                             cudnn_.cudnnDestroyFilterDescriptor, "cudnnCreateFilterDescriptor")),
          bias_(handles, shape.out_channels) {
        GYRE_CALL(cudnn_, cudnnSetFilter4dDescriptor(
                              filter_.get(), CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW,
                              shape.out_channels, shape.in.channels, shape.kernel, shape.kernel));
        for_each_size(sizes, [&](int n, bool training) { prepare(layer, n, training); });
    }
    OpNeeds needs() const override { return {}; }

    void forward(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return;
        }
        const Plan& made = plan(batch.n, Named::not_at_all);
        const auto& pass = made.forward;
        if (pass.ours) {
            return ours().forward(batch, io);
        }
        GYRE_CALL(cudnn_, cudnnConvolutionForward(
                              handles_.dnn.get(), &kOne, made.in.get(), io.x.f32(), filter_.get(),
                              io.params[0].f32(), pass.descriptor.get(), pass.algorithm,
                              workspace(pass.workspace_bytes), pass.workspace_bytes, &kZero,
                              made.out.get(), io.y.f32()));
        bias_.add(io.params[1].f32(), made.out, io.y.f32());
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return zero_gradients(handles_.context, shape_.weight_elems(), shape_.out_channels, io);
        }
        const Plan& made = plan(batch.n, Named::not_at_all);
        const auto& pass = made.backward_filter;
        if (pass.ours) {
            return ours().backward_params(batch, io);
        }
        GYRE_CALL(cudnn_, cudnnConvolutionBackwardFilter(
                              handles_.dnn.get(), &kOne, made.in.get(), io.x.f32(), made.out.get(),
                              io.dy.f32(), pass.descriptor.get(), pass.algorithm,
                              workspace(pass.workspace_bytes), pass.workspace_bytes, &kZero,
                              filter_.get(), io.grads[0].f32()));
        bias_.sum(made.out, io.dy.f32(), io.grads[1].f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        if (batch.n == 0) {
            return;
        }
        const Plan& made = plan(batch.n, Named::not_at_all);
        const auto& pass = made.backward_data;
        if (pass.ours) {
            return ours().backward_input(batch, io);
        }
        GYRE_CALL(cudnn_, cudnnConvolutionBackwardData(
                              handles_.dnn.get(), &kOne, filter_.get(), io.params[0].f32(),
                              made.out.get(), io.dy.f32(), pass.descriptor.get(), pass.algorithm,
                              workspace(pass.workspace_bytes), pass.workspace_bytes, &kZero,
                              made.in.get(), io.dx.f32()));
    }

 private:
    void* workspace(std::size_t bytes) const { return handles_.context.workspace.bytes(bytes); }
    Op& ours() {
        if (!ours_) {
            ours_ = cuda::make_op(handles_.context, Conv2dSpec{.shape = shape_}, sizes_);
        }
        return *ours_;
    }
    void prepare(const std::string& layer, int n, bool training) {
        const Plan& made = plan(n, training ? Named::for_training : Named::for_evaluation);
        std::size_t bytes = made.forward.workspace_bytes;
        bool any_ours = made.forward.ours;
        if (training) {
            bytes = std::max(
                {bytes, made.backward_data.workspace_bytes, made.backward_filter.workspace_bytes});
            any_ours = any_ours || made.backward_data.ours || made.backward_filter.ours;
        }
        handles_.context.workspace.reserve(bytes);
        handles_.convolution_bytes = std::max(handles_.convolution_bytes, bytes);
        if (any_ours) {
            ours();
            handles_.remarks += fmt::format(
                "{}, {} images: one direction uses gyre's own kernels, because cuDNN "
                "has no {}algorithm for it within {} MiB\n",
                layer, n, handles_.deterministic ? "deterministic " : "", kMostWorkspace >> 20);
        }
    }
    const Plan& plan(int n, Named named) {
        return plans_.at(n, [&] { return make_plan(n, named); });
    }

    CudnnOwned<cudnnConvolutionDescriptor_t> descriptor() const {
        auto made = cudnn_.own(cudnn_.cudnnCreateConvolutionDescriptor,
                               cudnn_.cudnnDestroyConvolutionDescriptor,
                               "cudnnCreateConvolutionDescriptor");
        GYRE_CALL(cudnn_, cudnnSetConvolution2dDescriptor(
                              made.get(), shape_.padding, shape_.padding, shape_.stride,
                              shape_.stride, 1, 1, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
        GYRE_CALL(cudnn_,
                  cudnnSetConvolutionMathType(
                      made.get(), handles_.context.tf32 ? CUDNN_TENSOR_OP_MATH : CUDNN_FMA_MATH));
        return made;
    }
    Plan make_plan(int n, Named named) const {
        Plan made{n,
                  {cudnn_, n, shape_.in},
                  {cudnn_, n, shape_.out()},
                  {descriptor()},
                  {descriptor()},
                  {descriptor()}};
        // Timing may choose different algorithms, with different rounding, from run to run; and it
        // has no place within a step.
        const bool find = named != Named::not_at_all && !handles_.deterministic;
        std::optional<Operands> operands;
        if (find) {
            operands.emplace(handles_.context.stream, shape_, n);
        }
        const Operands* const backward =
            named == Named::for_training && operands ? &*operands : nullptr;
        // A smaller last batch must not make the workspace grow during training.
        const std::size_t limit =
            named != Named::not_at_all ? kMostWorkspace : handles_.convolution_bytes;
        choose_forward(made, operands ? &*operands : nullptr, limit);
        choose_backward_data(made, backward, limit);
        choose_backward_filter(made, backward, limit);
        if (find) {
            handles_.context.stream.synchronize();
        }
        return made;
    }

    // Chooses an algorithm for each direction: timed on `on`, or by cuDNN's heuristics if it is
    // null.
    void choose_forward(Plan& plan, const Operands* on, std::size_t limit) const {
        Candidates<cudnnConvolutionFwdAlgoPerf_t> found;
        const auto handle = handles_.dnn.get();
        const auto in = plan.in.get(), out = plan.out.get();
        const auto convolution = plan.forward.descriptor.get();
        if (on != nullptr) {
            GYRE_CALL(cudnn_, cudnnFindConvolutionForwardAlgorithmEx(
                                  handle, in, on->x.get(), filter_.get(), on->w.get(), convolution,
                                  out, on->y.get(), found.kMost, &found.count, found.perfs.data(),
                                  on->scratch.get(), kMostWorkspace));
        } else {
            GYRE_CALL(cudnn_, cudnnGetConvolutionForwardAlgorithm_v7(
                                  handle, in, filter_.get(), convolution, out, found.kMost,
                                  &found.count, found.perfs.data()));
        }
        choose(found, limit, plan.forward, [&](auto algorithm, std::size_t* bytes) {
            return cudnn_.cudnnGetConvolutionForwardWorkspaceSize(
                handle, in, filter_.get(), convolution, out, algorithm, bytes);
        });
    }
    void choose_backward_data(Plan& plan, const Operands* on, std::size_t limit) const {
        Candidates<cudnnConvolutionBwdDataAlgoPerf_t> found;
        const auto handle = handles_.dnn.get();
        const auto in = plan.in.get(), out = plan.out.get();
        const auto convolution = plan.backward_data.descriptor.get();
        if (on != nullptr) {
            GYRE_CALL(cudnn_, cudnnFindConvolutionBackwardDataAlgorithmEx(
                                  handle, filter_.get(), on->w.get(), out, on->y.get(), convolution,
                                  in, on->x.get(), found.kMost, &found.count, found.perfs.data(),
                                  on->scratch.get(), kMostWorkspace));
        } else {
            GYRE_CALL(cudnn_, cudnnGetConvolutionBackwardDataAlgorithm_v7(
                                  handle, filter_.get(), out, convolution, in, found.kMost,
                                  &found.count, found.perfs.data()));
        }
        choose(found, limit, plan.backward_data, [&](auto algorithm, std::size_t* bytes) {
            return cudnn_.cudnnGetConvolutionBackwardDataWorkspaceSize(
                handle, filter_.get(), out, convolution, in, algorithm, bytes);
        });
    }
    void choose_backward_filter(Plan& plan, const Operands* on, std::size_t limit) const {
        Candidates<cudnnConvolutionBwdFilterAlgoPerf_t> found;
        const auto handle = handles_.dnn.get();
        const auto in = plan.in.get(), out = plan.out.get();
        const auto convolution = plan.backward_filter.descriptor.get();
        if (on != nullptr) {
            GYRE_CALL(cudnn_, cudnnFindConvolutionBackwardFilterAlgorithmEx(
                                  handle, in, on->x.get(), out, on->y.get(), convolution,
                                  filter_.get(), on->w.get(), found.kMost, &found.count,
                                  found.perfs.data(), on->scratch.get(), kMostWorkspace));
        } else {
            GYRE_CALL(cudnn_, cudnnGetConvolutionBackwardFilterAlgorithm_v7(
                                  handle, in, out, convolution, filter_.get(), found.kMost,
                                  &found.count, found.perfs.data()));
        }
        choose(found, limit, plan.backward_filter, [&](auto algorithm, std::size_t* bytes) {
            return cudnn_.cudnnGetConvolutionBackwardFilterWorkspaceSize(
                handle, in, out, convolution, filter_.get(), algorithm, bytes);
        });
    }
    // Takes the best candidate that needs at most `limit` bytes of workspace, or else the best
    // permitted one; if there is none (deterministic ones may be missing), gyre's own kernels.
    template <typename Perf, typename Algorithm, typename WorkspaceSize>
    void choose(const Candidates<Perf>& candidates, std::size_t limit,
                Direction<Algorithm>& direction, const WorkspaceSize& workspace_size) const {
        const auto take = [&](std::size_t most, bool same_arithmetic) {
            for (int i = 0; i < candidates.count; ++i) {
                const Perf& perf = candidates.perfs[static_cast<std::size_t>(i)];
                // cuDNN's default math type would allow TF32.
                const cudnnMathType_t math = handles_.context.tf32 ? perf.mathType : CUDNN_FMA_MATH;
                if (perf.status != CUDNN_STATUS_SUCCESS ||
                    (handles_.deterministic && perf.determinism != CUDNN_DETERMINISTIC) ||
                    (same_arithmetic ? perf.mathType != math
                                     : perf.mathType == CUDNN_TENSOR_OP_MATH)) {
                    continue;
                }
                GYRE_CALL(cudnn_, cudnnSetConvolutionMathType(direction.descriptor.get(), math));
                // Query the size again, as it depends on the math type too.
                std::size_t bytes = 0;
                if (workspace_size(perf.algo, &bytes) == CUDNN_STATUS_SUCCESS && bytes <= most) {
                    direction.algorithm = perf.algo;
                    direction.workspace_bytes = bytes;
                    return true;
                }
            }
            return false;
        };
        // Without TF32, prefer candidates that were timed with the arithmetic they will run with.
        direction.ours =
            !take(limit, true) && !take(kMostWorkspace, true) && !take(kMostWorkspace, false);
    }

    Handles& handles_;
    const Cudnn& cudnn_;
    const Conv2dShape shape_;
    const OpSizes sizes_;
    const CudnnOwned<cudnnFilterDescriptor_t> filter_;
    const Bias bias_;
    std::unique_ptr<Op> ours_;
    Plans<Plan> plans_;
};

}  // namespace

std::unique_ptr<Op> make_op(Handles& handles, const std::string& layer, const Conv2dSpec& spec,
                            const OpSizes& sizes) {
    return spec.fused() ? nullptr : std::make_unique<Conv2dOp>(handles, layer, spec.shape, sizes);
}

}  // namespace gyre::cuda
#endif
