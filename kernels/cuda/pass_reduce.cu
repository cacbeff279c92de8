// Computes gradients into the flat buffer from the pass kernel's results; on request also updates.
//   convolutions  g[e] = sum over the pass kernel's blocks of partial[block][e]
//   linear        dw[o][i] = sum over images of dy[image][o] x[image][i]; db likewise with x = 1
//   sums          scale * sum of losses, number of correct images
//
//   Block: 256 threads. Grid: one block per 32 elements of a convolution's tensor, whose 8 warps
//   each take every eighth partial and are then added in order; one block per 16 x 32 elements of a
//   linear layer's gradient, whose 8 warps each take every eighth image, 4 x 4 elements per lane,
//   and are then added in order, with images staged in shared memory, 128 at a time; one block for
//   the sums. Bytes: 4 (blocks elems + images (in + out)) from the L2 cache, 4 written per element,
//   with the update as in optimizers.cu. FLOPs: blocks + the update per element of a convolution,
//   2 images per element of a linear layer. The orders of sums depend only on the number of images.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/optimizers.cuh"
#include "kernels/cuda/pass_program.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kElems = kReduceElems, kSlices = kPassBlock / kElems;
constexpr int kTileRows = kReduceRows, kTileColumns = kReduceColumns, kImages = 128;
static_assert(kTileRows * kTileColumns == 16 * 32, "a warp has 4 x 4 sums per lane");
constexpr int kTile = kTileRows * kTileColumns;

// The action on a gradient besides storing it: nothing, or an Update.
struct KeepParams {
    __device__ __forceinline__ void operator()(std::int64_t, float) const {}
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

// x [images][columns], plus one column of ones; dy [images][rows]. The warps' sums overwrite x.
template <typename Update>
__device__ __forceinline__ void reduce_factors(const ReduceProgram::Linear& linear,
                                               const ReduceArgs& args, int block,
                                               const Update& update, float (*x)[kTileColumns],
                                               float (*dy)[kTileRows]) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int tile_row = block / linear.column_tiles;
    const int first_row = tile_row * kTileRows;
    const int first_column = (block - tile_row * linear.column_tiles) * kTileColumns;
    const int row = lane / (kTileColumns / 4) * 4, column = lane % (kTileColumns / 4) * 4;
    float sum[4][4] = {};
    for (int first = 0; first < args.n; first += kImages) {
        const int images = min(kImages, args.n - first);
        SIMT_UNROLL_BY_4
        for (int i = thread; i < images * kTileColumns; i += kPassBlock) {
            const int image = i / kTileColumns, at = first_column + i % kTileColumns;
            const float* from =
                args.factors + linear.x_factor + std::int64_t{first + image} * linear.in;
            x[image][i % kTileColumns] = at < linear.in ? from[at] : 1.0f;
        }
        SIMT_UNROLL_BY_4
        for (int i = thread; i < images * kTileRows; i += kPassBlock) {
            const int image = i / kTileRows, at = first_row + i % kTileRows;
            const float* from =
                args.factors + linear.dy_factor + std::int64_t{first + image} * linear.out;
            dy[image][i % kTileRows] = at < linear.out ? from[at] : 0.0f;
        }
        __syncthreads();
        for (int image = warp; image < images; image += kPassWarps) {
            float in[4], d[4];
            read4(x[image] + column, in);
            read4(dy[image] + row, d);
            SIMT_UNROLL
            for (int r = 0; r < 4; ++r) {
                SIMT_UNROLL
                for (int k = 0; k < 4; ++k) {
                    sum[r][k] += d[r] * in[k];
                }
            }
        }
        __syncthreads();  // before the next images, or the sums, overwrite these
    }
    float* const sums = x[0];
    SIMT_UNROLL
    for (int r = 0; r < 4; ++r) {
        store4(sums + (warp * kTileRows + row + r) * kTileColumns + column,
               make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
    }
    __syncthreads();
    for (int i = thread; i < kTile; i += kPassBlock) {
        const int o = first_row + i / kTileColumns, at = first_column + i % kTileColumns;
        float total = 0.0f;
        SIMT_UNROLL
        for (int w = 0; w < kPassWarps; ++w) {
            total += sums[w * kTile + i];
        }
        if (o < linear.out && at <= linear.in) {
            const std::int64_t to =
                at < linear.in ? linear.weight + std::int64_t{o} * linear.in + at : linear.bias + o;
            args.grads[to] = total;
            update(to, total);
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
    static_assert(kElems * kSlices <= kImages * kTileColumns, "slices are stored in x");
    static_assert(kPassWarps * kTile <= kImages * kTileColumns, "so are the warps' sums");
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
                 float* params, const UpdateArgs* update) {
    if (update == nullptr) {
        return start(context, program, args, KeepParams{});
    }
    with_update(*update, params, 0, [&](const auto& rule) { start(context, program, args, rule); });
}

}  // namespace gyre::SIMT_NAMESPACE
