// The training pass of a net whose activations fit in a block's shared memory: gather, forward,
// loss and backward of an image within one block. The steps and their formulas are in
// pass_pointwise.cuh, pass_conv.cuh and pass_linear.cuh; pass_program.hpp lists a net's steps.
//
//   Block: 256 threads. Grid: one block per image, at most 256 (pass_blocks), each of which then
//   takes several images. Dynamic shared memory: all activations of an image, the weights of the
//   convolutions, two gradients and room for partial sums; `net`: see description().
//   Bytes of device memory per image: its pixels; the weights of linear layers twice, and of
//   convolutions up to twice, from the L2 cache; written: the gradient of the convolutions (per
//   block), x and dy of linear layers. FLOPs: as in the operations' formulas, except for dx of
//   convolutions with 2 x 2 pooling, which has one term per window instead of one per output. Where
//   the cycles go: docs/gpu-step.md, 5.
//
// A second kernel (pass_reduce.cu) computes gradients from what the blocks leave: partial gradients
// of convolutions, factors of linear layers and losses.
#include <string>

#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/pass_conv.cuh"
#include "kernels/cuda/pass_linear.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

__device__ __forceinline__ void begin_block(const PassProgram& program, const PassArgs& args,
                                            float* shared) {
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = pass_thread() * 4; i < program.value_floats; i += kPassBlock * 4) {
        store4(shared + i, zeros);
    }
    for (int c = 0; c < program.convs; ++c) {
        conv_begin(program.conv[c], args.params, shared);
    }
    for (int l = 0; l < program.linears; ++l) {
        linear_begin(program.linear[l], args.params, shared);
    }
    __syncthreads();
}

__device__ __forceinline__ void begin_image(const PassProgram& program, const PassArgs& args,
                                            std::int32_t sample, float* shared) {
    gather_image(program, args.images, sample, shared);
    const auto word = static_cast<std::uint32_t>(sample);
    for (int l = 0; l < program.layers; ++l) {
        const PassProgram::Layer& layer = program.layer[l];
        if (layer.kind == PassKind::dropout) {
            draw_factors(program.dropout[layer.index], args, word, shared);
        } else if (layer.kind == PassKind::conv) {
            draw_factors(program.conv[layer.index].dropout, args, word, shared);
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void forward(const PassProgram& program, const PassArgs& args, int l,
                                        float* shared) {
    const PassProgram::Layer& layer = program.layer[l];
    const Planes &x = program.values[l], &y = program.values[l + 1];
    switch (layer.kind) {
        case PassKind::conv:
            return conv_forward(program.conv[layer.index], y, shared);
        case PassKind::linear:
            return linear_forward(program.linear[layer.index], x, y, args.params, shared);
        case PassKind::maxpool:
            return maxpool_forward(program.maxpool[layer.index], x, y, shared);
        case PassKind::relu:
            return relu_forward(x, y, shared);
        case PassKind::dropout:
            return dropout_forward(program.dropout[layer.index], x, y, shared);
    }
}

// Overwrites the block's partial gradients if `image` is the block's first, else adds to them.
__device__ __forceinline__ void backward(const PassProgram& program, const PassArgs& args, int l,
                                         int image, float* shared) {
    const PassProgram::Layer& layer = program.layer[l];
    const Planes &x = program.values[l], &y = program.values[l + 1];
    switch (layer.kind) {
        case PassKind::conv:
            return conv_backward(program.conv[layer.index], x, y, layer.dy, layer.dx, args.params,
                                 args.partials + std::int64_t{blockIdx.x} * program.partial_elems,
                                 image != static_cast<int>(blockIdx.x), shared);
        case PassKind::linear:
            return linear_backward(program.linear[layer.index], x, y, layer.dy, layer.dx,
                                   args.params, args.factors, image, shared);
        case PassKind::maxpool:
            return maxpool_backward(program.maxpool[layer.index], x, y, layer.dy, layer.dx, shared);
        case PassKind::relu:
            return relu_backward(y, layer.dy, layer.dx, shared);
        case PassKind::dropout:
            return dropout_backward(program.dropout[layer.index], y.elems, layer.dy, layer.dx,
                                    shared);
    }
}

__global__ void __launch_bounds__(kPassBlock, 2)
    training_pass_kernel(SIMT_GRID_CONSTANT const PassProgram program,
                         SIMT_GRID_CONSTANT const PassArgs args) {
    SIMT_DYNAMIC_SHARED(float, shared);
    SIMT_SHARED(std::uint32_t, keys, [EpochOrder::kRounds]);
    const bool ordered = args.images.samples == nullptr;
    EpochPlace place;
    if (ordered) {
        place = *args.next.place;
        if (threadIdx.x < EpochOrder::kKeyGroups) {
            args.next.order.write_keys(place.epoch, pass_thread(), keys);
        }
    }
    begin_block(program, args, shared);
    double loss = 0.0, correct = 0.0;  // of the block, in warp 0
    for (int image = static_cast<int>(blockIdx.x); image < args.n;
         image += static_cast<int>(gridDim.x)) {
        const std::int32_t sample =
            ordered ? static_cast<std::int32_t>(args.next.order.image(
                          place.epoch, keys,
                          static_cast<std::uint32_t>(place.step * args.next.step_images +
                                                     args.next.first + image)))
                    : args.images.samples[image];
        // Read early, to hide the latency.
        const int label = threadIdx.x < 32 ? args.images.labels[sample] : 0;
        begin_image(program, args, sample, shared);
        for (int l = 0; l < program.layers; ++l) {
            forward(program, args, l, shared);
        }
        if (threadIdx.x < 32) {
            cross_entropy_of_image(program.classes, program.values[program.layers].begin,
                                   program.layer[program.layers - 1].dy, label, args.scale, shared,
                                   loss, correct);
        }
        __syncthreads();
        for (int l = program.layers; l-- > program.first;) {
            backward(program, args, l, image, shared);
        }
        if (image + static_cast<int>(gridDim.x) < args.n) {
            __syncthreads();  // before the next image overwrites this one
        }
    }
    if (threadIdx.x == 0) {
        args.sums[blockIdx.x] = loss;
        args.sums[gridDim.x + blockIdx.x] = correct;
    }
}

class FusedPass final : public TrainingPass {
 public:
    FusedPass(const Context& context, const PassPlan& plan, int images)
        : context_(context), plan_(plan) {
        context.workspace.reserve(workspace_bytes(images));
    }
    std::string description() const override {
        return "a training pass is one kernel with " + std::to_string(plan_.shared_bytes) +
               " bytes of shared memory, and one for gradients";
    }
    void run(const Batch& batch, const PassIo& io) override {
        const int groups = pass_blocks(batch.n);
        auto* losses = static_cast<double*>(context_.workspace.bytes(workspace_bytes(batch.n)));
        float* partials = reinterpret_cast<float*>(losses + 2 * pass_blocks(batch.n));
        float* factors = partials + groups * std::int64_t{plan_.program.partial_elems};
        if (batch.n > 0) {
            PassArgs args{.n = batch.n,
                          .scale = io.scale,
                          .images = io.images,
                          .next = {},
                          .seed = batch.seed,
                          .epoch = batch.epoch,
                          .params = io.params,
                          .partials = partials,
                          .factors = factors,
                          .sums = losses};
            if (io.next != nullptr) {
                args.next = *io.next;
            } else {
                args.images.samples = batch.samples;
            }
            launch("training_pass", training_pass_kernel, dim3(static_cast<unsigned>(groups)),
                   dim3(kPassBlock), SharedBytes{plan_.shared_bytes}, context_.stream,
                   plan_.program, args);
        }
        reduce_pass(context_, plan_.reduce,
                    {.n = batch.n,
                     .groups = groups,
                     .scale = io.scale,
                     .partials = partials,
                     .factors = factors,
                     .losses = losses,
                     .grads = io.grads,
                     .sums = io.sums,
                     .place = io.next == nullptr ? nullptr : io.next->place},
                    io.params, io.update);
    }

 private:
    std::size_t workspace_bytes(int n) const {
        const auto groups = static_cast<std::size_t>(pass_blocks(n));
        return groups * (2 * sizeof(double) +
                         static_cast<std::size_t>(plan_.program.partial_elems) * sizeof(float)) +
               static_cast<std::size_t>(plan_.factor_elems) * sizeof(float);
    }

    const Context context_;
    const PassPlan plan_;
};

}  // namespace

std::unique_ptr<TrainingPass> make_training_pass(const Context& context,
                                                 const TrainingPassSpec& spec) {
    PassPlan plan;
    const std::size_t declared = declared_shared_bytes("training_pass", training_pass_kernel);
    if (context.tf32 || !plan_pass(spec, context.shared_bytes - declared, plan)) {
        return nullptr;
    }
    return std::make_unique<FusedPass>(context, plan, spec.images);
}

}  // namespace gyre::SIMT_NAMESPACE
