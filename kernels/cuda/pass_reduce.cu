// Gradients from what the pass kernel leaves, in the flat buffer, and where asked the update.
//   convolutions  g[e] = sum over the pass kernel's blocks of partial[block][e]
//   linear        dw[o][i] = sum over images of dy[image][o] x[image][i]; db likewise with x = 1
//   sums          scale * sum of losses, number of correct images
//
//   Block: 256 threads; grid: a block to 32 elements of a convolution's tensor, whose 8 warps take
//   every eighth partial and are then added in order; a block to 16 x 64 of a linear layer's
//   gradient, a thread to 4 of them, images in order through shared memory, 32 at a time; one block
//   to the sums. Bytes: 4 (blocks elems + images (in + out)) from the L2 cache, written 4 an
//   element, with the update as the optimisers (optimizers.cu). FLOPs: blocks + the update for an
//   element of a convolution, 2 images for one of a linear layer. All orders follow from the number
//   of images alone.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/optimizers.cuh"
#include "kernels/cuda/pass_program.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kElems = kReduceElems, kSlices = kPassBlock / kElems;
constexpr int kTileRows = kReduceRows, kTileColumns = kReduceColumns, kImages = 32;
static_assert(kTileRows * kTileColumns == 4 * kPassBlock);

// What becomes of a gradient beside being written: nothing, or the update of element i.
struct KeepParams {
    __device__ __forceinline__ void operator()(std::int64_t, float) const {}
};
struct UpdateSgd {
    SgdArgs a;
    float* p;
    __device__ __forceinline__ void operator()(std::int64_t i, float g) const {
        check_finite(a.finite, i, g);
        sgd(a, a.scalars->learning_rate, p[i], g);
    }
};
struct UpdateSgdMomentum {
    SgdArgs a;
    float *p, *velocity;
    __device__ __forceinline__ void operator()(std::int64_t i, float g) const {
        check_finite(a.finite, i, g);
        sgd(a, a.scalars->learning_rate, p[i], g, velocity[i]);
    }
};
struct UpdateAdam {
    Adam a;
    float *p, *m, *v;
    __device__ __forceinline__ void operator()(std::int64_t i, float g) const {
        check_finite(a.finite, i, g);
        adam(a, *a.scalars, p[i], g, m[i], v[i]);
    }
};

template <typename Update>
__device__ __forceinline__ void reduce_partials(const ReduceProgram::Tensor& tensor,
                                                int partial_elems, const ReduceArgs& args,
                                                int block, const Update& update, float* slices) {
    const int in_block = static_cast<int>(threadIdx.x) % kElems;
    const int slice = static_cast<int>(threadIdx.x) / kElems;
    const int elem = block * kElems + in_block;
    const float* from = args.partials + tensor.partial + elem;
    float sum = 0.0f;
    SIMT_UNROLL_BY_4
    for (int group = slice; elem < tensor.elems && group < args.groups; group += kSlices) {
        sum += from[std::int64_t{group} * partial_elems];
    }
    slices[slice * kElems + in_block] = sum;
    __syncthreads();
    if (slice == 0 && elem < tensor.elems) {
        float total = 0.0f;
        SIMT_UNROLL
        for (int s = 0; s < kSlices; ++s) {
            total += slices[s * kElems + in_block];
        }
        args.grads[tensor.to + elem] = total;
        update(tensor.to + elem, total);
    }
}

template <typename Update>
__device__ __forceinline__ void reduce_factors(const ReduceProgram::Linear& linear,
                                               const ReduceArgs& args, int block,
                                               const Update& update, float (*x)[kTileColumns],
                                               float (*dy)[kTileRows]) {
    const int thread = static_cast<int>(threadIdx.x);
    const int tile_row = block / linear.column_tiles;
    const int first_row = tile_row * kTileRows;
    const int first_column = (block - tile_row * linear.column_tiles) * kTileColumns;
    const int row = thread / (kTileColumns / 4), column = thread % (kTileColumns / 4) * 4;
    float sum[4] = {};
    for (int first = 0; first < args.n; first += kImages) {
        const int images = min(kImages, args.n - first);
        // x [images][64 inputs], of which one more is 1; dy [images][16 outputs]
        for (int i = thread; i < images * kTileColumns; i += kPassBlock) {
            const int image = i / kTileColumns, at = first_column + i % kTileColumns;
            const float* from =
                args.factors + linear.x_factor + std::int64_t{first + image} * linear.in;
            x[image][i % kTileColumns] = at < linear.in ? from[at] : 1.0f;
        }
        for (int i = thread; i < images * kTileRows; i += kPassBlock) {
            const int image = i / kTileRows, at = first_row + i % kTileRows;
            const float* from =
                args.factors + linear.dy_factor + std::int64_t{first + image} * linear.out;
            dy[image][i % kTileRows] = at < linear.out ? from[at] : 0.0f;
        }
        __syncthreads();
        for (int image = 0; image < images; ++image) {
            float in[4];
            read4(x[image] + column, in);
            const float d = dy[image][row];
            SIMT_UNROLL
            for (int k = 0; k < 4; ++k) {
                sum[k] += d * in[k];
            }
        }
        if (first + kImages < args.n) {
            __syncthreads();  // before the next images take the place of these
        }
    }
    const int o = first_row + row;
    SIMT_UNROLL
    for (int k = 0; k < 4; ++k) {
        const int i = first_column + column + k;
        if (o < linear.out && i <= linear.in) {
            const std::int64_t to =
                i < linear.in ? linear.weight + std::int64_t{o} * linear.in + i : linear.bias + o;
            args.grads[to] = sum[k];
            update(to, sum[k]);
        }
    }
}

__device__ __forceinline__ void reduce_losses(const ReduceArgs& args) {
    double loss = 0.0, correct = 0.0;
    for (int b = static_cast<int>(threadIdx.x); b < args.groups; b += kPassBlock) {
        loss += args.losses[b];
        correct += args.losses[args.groups + b];
    }
    loss = block_sum(loss);
    correct = block_sum(correct);
    if (threadIdx.x == 0) {
        args.sums[0] = static_cast<float>(loss * static_cast<double>(args.scale));
        args.sums[1] = static_cast<float>(correct);
        if (args.place != nullptr) {
            args.place->step += 1;
        }
    }
}

template <typename Update>
__global__ void __launch_bounds__(kPassBlock)
    reduce_pass_kernel(SIMT_GRID_CONSTANT const ReduceProgram program,
                       SIMT_GRID_CONSTANT const ReduceArgs args, Update update) {
    SIMT_SHARED(float, x, [kImages][kTileColumns]);
    SIMT_SHARED(float, dy, [kImages][kTileRows]);
    static_assert(kElems * kSlices <= kImages * kTileColumns, "slices lie in x");
    const int block = static_cast<int>(blockIdx.x);
    int first = 0;
    for (int t = 0; t < program.tensors; ++t) {
        const ReduceProgram::Tensor& tensor = program.tensor[t];
        if (block < tensor.last_block) {
            return reduce_partials(tensor, program.partial_elems, args, block - first, update,
                                   x[0]);
        }
        first = tensor.last_block;
    }
    for (int l = 0; l < program.linears; ++l) {
        const ReduceProgram::Linear& linear = program.linear[l];
        if (block < linear.last_block) {
            return reduce_factors(linear, args, block - first, update, x, dy);
        }
        first = linear.last_block;
    }
    reduce_losses(args);
}

template <typename Update>
void start(const Context& context, const ReduceProgram& program, const ReduceArgs& args,
           const Update& update) {
    launch("training_pass_gradients", reduce_pass_kernel<Update>,
           dim3(static_cast<unsigned>(program.blocks)), dim3(kPassBlock), context.stream, program,
           args, update);
}

}  // namespace

void reduce_pass(const Context& context, const ReduceProgram& program, const ReduceArgs& args,
                 float* params, const PassUpdate* update) {
    if (update == nullptr) {
        start(context, program, args, KeepParams{});
    } else if (update->adam != nullptr) {
        start(context, program, args,
              UpdateAdam{adam_of(*update->adam), params, update->first, update->second});
    } else if (update->first != nullptr) {
        start(context, program, args, UpdateSgdMomentum{*update->sgd, params, update->first});
    } else {
        start(context, program, args, UpdateSgd{*update->sgd, params});
    }
}

}  // namespace gyre::SIMT_NAMESPACE
