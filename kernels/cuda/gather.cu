// Gathers the batch: x[i][c][h][w] = pixels[samples[i]][c][h][w] * scale[c] + shift[c],
// y[i] = labels[samples[i]]; x is float32 or rounded to 16 bits. The samples are given, or are
// computed for the next step (base/epoch_order.hpp); then they are stored and the step is advanced.
// Augmented images (ops/augment.hpp, mix.hpp) read each pixel from elsewhere in its plane, or from
// two images, once a kernel has drawn their moves.
//
// Memory-bound: 5 or 3 bytes per element (a byte read, a value written), 2 FLOPs. Grid (n, parts of
// an image), up to 256 threads per block, each with up to 4 times 4 elements of a plane (4 bytes
// in, 16 or 8 out); if the plane size is not a multiple of 4, element by element. An image has
// fewer than 2^31 elements. Each block computes its image's index itself; the last block to have
// read the step advances it.
#include <algorithm>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/tensor_math.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kRounds = 4;  // per thread

struct Gather {
    GatherArgs args = {};
    NextSamplesArgs next = {};        // used if args.samples is null
    std::int32_t* samples = nullptr;  // overwritten in that case
    std::uint32_t image_elems = 0, plane_elems = 0, part_elems = 0;
};

// The index of this block's image in the data set.
__device__ __forceinline__ std::int32_t sample_of_block(const Gather& gather) {
    const auto image = static_cast<int>(blockIdx.x);
    if (gather.args.samples != nullptr) {
        return gather.args.samples[image];
    }
    SIMT_SHARED(std::uint32_t, keys, [EpochOrder::kRounds]);
    SIMT_SHARED(std::int32_t, sample, [1]);
    const EpochOrder& order = gather.next.order;
    const EpochPlace place = *gather.next.place;
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < EpochOrder::kKeyGroups) {
        order.write_keys(place.epoch, thread, keys);
    }
    __syncthreads();
    if (thread == 0) {
        const std::int64_t at =
            place.step * gather.next.step_images + gather.next.first + std::int64_t{image};
        sample[0] = static_cast<std::int32_t>(
            order.image(place.epoch, keys, static_cast<std::uint32_t>(at)));
        if (blockIdx.y == 0) {
            gather.samples[image] = sample[0];
        }
        if (arrives_last(&gather.next.place->arrived, gridDim.x * gridDim.y,
                         blockIdx.y * gridDim.x + blockIdx.x)) {
            gather.next.place->step = place.step + 1;
        }
    }
    __syncthreads();
    return sample[0];
}

template <typename Math, bool kQuads>
__global__ void gather_kernel(SIMT_GRID_CONSTANT const Gather gather, typename Math::Elem* x,
                              std::int32_t* y) {
    constexpr std::uint32_t kEach = kQuads ? 4 : 1;
    const std::int32_t sample = sample_of_block(gather);
    if (blockIdx.y == 0 && threadIdx.x == 0) {
        y[blockIdx.x] = gather.args.labels[sample];
    }
    const std::uint8_t* const pixels =
        gather.args.pixels + std::int64_t{sample} * gather.image_elems;
    auto* const to = x + std::int64_t{blockIdx.x} * gather.image_elems;
    const std::uint32_t first = blockIdx.y * gather.part_elems;
    const std::uint32_t rest = gather.image_elems - first;
    const std::uint32_t elems = rest < gather.part_elems ? rest : gather.part_elems;
    for (std::uint32_t i = threadIdx.x * kEach; i < elems; i += blockDim.x * kEach) {
        const std::uint32_t at = first + i, channel = at / gather.plane_elems;
        const float scale = gather.args.scale[channel], shift = gather.args.shift[channel];
        if constexpr (kQuads) {
            const uchar4 p = load_vector<uchar4>(pixels + at);
            Math::store4(to + at, make_float4(p.x * scale + shift, p.y * scale + shift,
                                              p.z * scale + shift, p.w * scale + shift));
        } else {
            to[at] = Math::value(pixels[at] * scale + shift);
        }
    }
}

// The random moves of an image, and of the one that it is mixed with.
struct DrawnImage {
    DrawnAugment own, others;
    DrawnMix mix;
};

// One thread per image, which also has its labels.
__global__ void gather_draw_kernel(SIMT_GRID_CONSTANT const GatherArgs args, int n,
                                   DrawnImage* drawn, std::int32_t* y) {
    const auto image = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (image >= n) {
        return;
    }
    const std::int32_t sample = args.samples[image];
    y[image] = args.labels[sample];
    DrawnImage& to = drawn[image];
    to.own = draw_augment(args.augment, args.shape, static_cast<std::uint32_t>(sample));
    if (args.augment.spec.mixes()) {
        const DrawnMix mix = draw_mix(args.augment, args.shape, static_cast<std::uint32_t>(sample));
        to.mix = mix;
        to.others = draw_augment(args.augment, args.shape, static_cast<std::uint32_t>(mix.partner));
        y[n + image] = args.labels[mix.partner];
        y[2 * std::int64_t{n} + image] = mix.share;
    }
}

// The grid of gather_kernel, one element per thread at a time.
template <typename Math, bool kMixes>
__global__ void augmented_kernel(SIMT_GRID_CONSTANT const Gather gather, const DrawnImage* drawn,
                                 typename Math::Elem* x) {
    const GatherArgs& args = gather.args;
    const DrawnImage& mine = drawn[blockIdx.x];
    const DrawnAugment own = mine.own;
    const std::uint8_t* const pixels =
        args.pixels + std::int64_t{args.samples[blockIdx.x]} * gather.image_elems;
    auto* const to = x + std::int64_t{blockIdx.x} * gather.image_elems;
    const std::uint32_t first = blockIdx.y * gather.part_elems;
    const std::uint32_t rest = gather.image_elems - first;
    const std::uint32_t elems = rest < gather.part_elems ? rest : gather.part_elems;
    for (std::uint32_t i = threadIdx.x; i < elems; i += blockDim.x) {
        const std::uint32_t at = first + i, channel = at / gather.plane_elems;
        const auto place = static_cast<int>(at - channel * gather.plane_elems);
        const int row = place / args.shape.width, column = place - row * args.shape.width;
        const std::uint32_t plane = channel * gather.plane_elems;
        const float scale = args.scale[channel], shift = args.shift[channel];
        float value = augmented_value(own, pixels + plane, row, column, scale, shift);
        if constexpr (kMixes) {
            const std::uint8_t* const partner =
                args.pixels + std::int64_t{mine.mix.partner} * gather.image_elems;
            value = mixed_value(
                mine.mix, row, column, value,
                augmented_value(mine.others, partner + plane, row, column, scale, shift));
        }
        to[at] = Math::value(value);
    }
}

bool aligned(const void* at, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
}

template <typename Math>
void run(const Context& context, Gather gather, int n, const Tensor& x, std::int32_t* y) {
    using Elem = typename Math::Elem;
    const Shape& shape = gather.args.shape;
    gather.image_elems = static_cast<std::uint32_t>(shape.elems());
    gather.plane_elems = static_cast<std::uint32_t>(shape.plane_elems());
    const bool augmented = gather.args.augment.epoch != nullptr;
    const bool quads = !augmented && gather.plane_elems % 4 == 0 &&
                       aligned(gather.args.pixels, 4) && aligned(x.data, 4 * sizeof(Elem));
    const std::uint32_t each = quads ? 4 : 1, items = gather.image_elems / each;
    const std::uint32_t threads = std::clamp((items + 31) / 32 * 32, 32u, kElementwiseBlock);
    gather.part_elems = threads * each * kRounds;
    const std::uint32_t parts = (gather.image_elems + gather.part_elems - 1) / gather.part_elems;
    const dim3 grid(static_cast<unsigned>(n), parts);
    if (augmented) {
        auto* const drawn = static_cast<DrawnImage*>(
            context.workspace.bytes(static_cast<std::size_t>(n) * sizeof(DrawnImage)));
        constexpr unsigned kDraws = 32;  // per block: they take long and are few
        launch("gather_draw", gather_draw_kernel,
               dim3((static_cast<unsigned>(n) + kDraws - 1) / kDraws), dim3(kDraws), context.stream,
               gather.args, n, drawn, y);
        launch("gather",
               gather.args.augment.spec.mixes() ? augmented_kernel<Math, true>
                                                : augmented_kernel<Math, false>,
               grid, dim3(threads), context.stream, gather, static_cast<const DrawnImage*>(drawn),
               static_cast<Elem*>(x.data));
        return;
    }
    launch("gather", quads ? gather_kernel<Math, true> : gather_kernel<Math, false>, grid,
           dim3(threads), context.stream, gather, static_cast<Elem*>(x.data), y);
}

void run_for(const Context& context, const Gather& gather, int n, const Tensor& x,
             std::int32_t* y) {
    const auto of_type = x.type == DataType::float32    ? run<Tf32Math>
                         : x.type == DataType::bfloat16 ? run<Bf16Math>
                                                        : run<F16Math>;
    of_type(context, gather, n, x, y);
}

}  // namespace

void gather(const Context& context, const GatherArgs& args, int n, const Tensor& x,
            std::int32_t* y) {
    run_for(context, {.args = args}, n, x, y);
}

void gather_next(const Context& context, const NextSamplesArgs& next, const GatherArgs& args, int n,
                 std::int32_t* samples, const Tensor& x, std::int32_t* y) {
    if (args.augment.epoch != nullptr) {  // the draws are in a kernel of their own
        next_samples(context, next, n, samples);
        GatherArgs of_step = args;
        of_step.samples = samples;
        return run_for(context, {.args = of_step}, n, x, y);
    }
    Gather gather{.args = args, .next = next, .samples = samples};
    gather.args.samples = nullptr;
    run_for(context, gather, n, x, y);
}

}  // namespace gyre::SIMT_NAMESPACE
