// Linear layers: y = x w^T + b, dx = dy w, dw = dy^T x, db = sum of dy over the images.
// x [n][in], y [n][out], w [out][in], b [out].
//
// All three are tiled matrix products (block and grid, bytes and FLOPs: tensor_gemm.cuh for tensor
// cores, else gemm.cuh). The bias is added as sums are stored; its gradient is an additional column
// of dw's product, with a row of ones.
#include <type_traits>

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/tensor_operands.cuh"
#include "kernels/cuda/tensor_update.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

struct StoreWithBias {
    float* y;
    const float* b;
    int columns;
    __device__ __forceinline__ void operator()(int m, int n, float sum) const {
        y[std::int64_t{m} * columns + n] = sum + b[n];
    }
};

// Stores factor * sum where `of` is null, positive or NaN, else zero.
struct StoreInputGradient {
    float* dx;
    int columns;
    const float* of;
    float factor;
    __device__ __forceinline__ void operator()(int m, int n, float sum) const {
        const std::int64_t i = std::int64_t{m} * columns + n;
        dx[i] = of == nullptr ? sum : of[i] <= 0.0f ? 0.0f : sum * factor;
    }
};

class LinearOp final : public Op {
 public:
    LinearOp(const Context& context, const LinearSpec& spec)
        : context_(context), shape_(spec.shape), dx_factor_(spec.dx_factor) {
        context.workspace.reserve(kGemmWorkspaceBytes);
    }
    OpNeeds needs() const override { return {}; }
    void forward(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n > 0) {
            gemm(context_, "linear_forward", n, out, in, DenseOperand<true>{io.x.f32(), n, in, 1},
                 DenseOperand<true>{io.params[0].f32(), out, in, 1},
                 StoreWithBias{io.y.f32(), io.params[1].f32(), out});
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), out, io);
        }
        gemm(context_, "linear_backward_weights", out, in + 1, n,
             DenseOperand<false>{io.dy.f32(), out, 1, out},
             DenseOperand<false>{io.x.f32(), in, 1, in, in},
             StoreGradients{io.grads[0].f32(), io.grads[1].f32(), in});
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n > 0) {
            gemm(context_, "linear_backward_data", n, in, out,
                 DenseOperand<true>{io.dy.f32(), n, out, 1},
                 DenseOperand<false>{io.params[0].f32(), in, 1, in},
                 StoreInputGradient{io.dx.f32(), in, dx_factor_ > 0.0f ? io.x.f32() : nullptr,
                                    dx_factor_});
        }
    }

 private:
    const Context context_;
    const LinearShape shape_;
    const float dx_factor_;
};

// The same on tensor cores, in TF32 or 16 bits, always with float weights. The numbers of features
// are multiples of 4 or 8, so that rows are aligned to 16 bytes. May be fused with a ReLU and
// dropout, whose backward pass needs no mask: y is not positive where the gradient is zero.
template <typename Math>
class TensorLinearOp final : public Op {
    using Elem = typename Math::Elem;
    using AlongK = DenseAlongK<Elem, true>;
    using WeightsAlongK = DenseAlongK<float, true>;

 public:
    TensorLinearOp(const Context& context, const LinearSpec& spec, const OpSizes& sizes)
        : context_(context), spec_(spec), shape_(spec.shape) {
        const int in = shape_.in_features, out = shape_.out_features, n = sizes.most();
        // A gradient may include the images of all ranks, more than the layer was created for.
        partial_elems_ = std::max({tensor_partial_elems(n, out, in, kDepth),
                                   tensor_partial_elems(n, in, out, kDepth),
                                   tensor_partial_elems(out, in + 1, kMostImages, kDepth)});
        context.workspace.reserve(static_cast<std::size_t>(partial_elems_) * sizeof(float));
    }
    OpNeeds needs() const override { return {.backward_reads_y = spec_.relu && !spec_.dy_masked}; }
    void forward(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n == 0) {
            return;
        }
        const StoreMatrix<Math> store{values(io.y), io.params[1].f32(), n, out, spec_.relu};
        const auto run = [&](const auto& of_parts) {
            return tensor_gemm<Math>(
                context_, "linear_forward", n, out, in, AlongK{values(io.x), n, in},
                WeightsAlongK{io.params[0].f32(), out, in}, store, partial(), of_parts);
        };
        if (!batch.training || spec_.dropout <= 0.0f) {
            run(store);
        } else if (!run(StoreDropped<Math>{
                       store, batch_dropout(batch, spec_.dropout_stream, spec_.dropout)})) {
            dropout(
                context_,
                {.in = spec_.out(), .probability = spec_.dropout, .stream = spec_.dropout_stream},
                batch, io.y);
        }
    }
    void backward_begin(const Batch& batch, const OpIo& io) override {
        if (needs().backward_reads_y) {
            relu_backward(context_, std::int64_t{batch.n} * shape_.out_features,
                          kept_factor(spec_.dropout), io.y, io.dy);
        }
    }
    void backward_params(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n == 0) {
            return zero_gradients(context_, shape_.weight_elems(), out, io);
        }
        tensor_gemm<Math>(context_, "linear_backward_weights", out, in + 1, n,
                          DenseAcrossK<Elem, true>{values(io.dy), out, out},
                          DenseAcrossK<Elem, true, Math>{values(io.x), in, in},
                          StoreMatrixGradients{io.grads[0].f32(), io.grads[1].f32(), out, in},
                          partial());
    }
    // Saves memory traffic: 24 bytes per element instead of 32 for gradient and Adam. Requires
    // enough tiles for a GPU's multiprocessors. Not in float16, where all gradients must be checked
    // before any is used.
    static constexpr bool kUpdates = Math::kType != DataType::float16;
    bool can_update(const Batch& batch) const override {
        return kUpdates && batch.n > 0 && shape_.out_features > 64 && shape_.in_features >= 64 &&
               tensor_tiles_suffice<UpdateTile>(shape_.out_features, shape_.in_features + 1);
    }
    void backward_update(const Batch& batch, const OpIo& io, const UpdateArgs& rule,
                         std::int64_t offset) override {
        if constexpr (kUpdates) {
            const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
            float* const w = io.params[0].f32();
            with_update(rule, w, offset, [&](const auto& update) {
                using Update = std::remove_cvref_t<decltype(update)>;
                const UpdateWeights<Update> epilogue{update, io.params[1].f32() - w, out, in};
                run_tensor_gemm<UpdateTile, Math>(
                    context_, "linear_update_weights", out, in + 1, n,
                    DenseAcrossK<Elem, true>{values(io.dy), out, out},
                    DenseAcrossK<Elem, true, Math>{values(io.x), in, in}, epilogue, nullptr,
                    epilogue);
            });
        }
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        const int n = batch.n, in = shape_.in_features, out = shape_.out_features;
        if (n > 0) {
            tensor_gemm<Math>(
                context_, "linear_backward_data", n, in, out, AlongK{values(io.dy), n, out},
                DenseAcrossK<float, true>{io.params[0].f32(), in, in},
                StoreMatrix<Math>{values(io.dx), nullptr, n, in, false,
                                  spec_.dx_factor > 0.0f ? values(io.x) : nullptr, spec_.dx_factor},
                partial());
        }
    }

 private:
    static constexpr int kDepth = kSliceBytes / static_cast<int>(sizeof(Elem));
    static constexpr int kMostImages = 1 << 20;
    using UpdateTile = TensorTile<128, 128>;
    static Elem* values(const Tensor& tensor) { return static_cast<Elem*>(tensor.data); }
    float* partial() const { return context_.workspace.floats(partial_elems_); }

    const Context context_;
    const LinearSpec spec_;
    const LinearShape shape_;
    std::int64_t partial_elems_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes& sizes,
                            DataType type) {
    const int in = spec.shape.in_features, out = spec.shape.out_features;
    const int chunk = 16 / static_cast<int>(bytes_of(type));
    const std::int64_t most = std::max({in, out, sizes.most()});
    const bool can = context.tf32 && in % chunk == 0 && out % chunk == 0 && in >= 32 && out > 32 &&
                     most * std::max(in, out) < std::int64_t{1} << 31;
    return can ? make_for_math<TensorLinearOp>(type, context, spec, sizes) : nullptr;
}

std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes& sizes) {
    if (auto op = make_op(context, spec, sizes, DataType::float32)) {
        return op;
    }
    return spec.relu || spec.dropout > 0.0f || spec.dy_masked
               ? nullptr
               : std::make_unique<LinearOp>(context, spec);
}

}  // namespace gyre::SIMT_NAMESPACE
