// The batch: x[i][c][h][w] = pixels[samples[i]][c][h][w] * scale[c] + shift[c], y[i] =
// labels[samples[i]].
//
// Memory-bound: 5 bytes an element (a byte read, a float written), 2 FLOPs. One thread to 4
// elements of a plane (4 bytes in, 16 out), 256 threads a block; planes that are no multiple of 4
// go element by element. An image has fewer than 2^31 elements.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

struct Gather {
    GatherArgs args;
    std::uint32_t image_elems, plane_elems;
};

// Where an element of the batch comes from.
struct Source {
    const std::uint8_t* pixels;
    float scale, shift;
};

__device__ __forceinline__ Source source_of(const Gather& gather, std::int64_t i) {
    // Unsigned, as nvcc's 64-bit division takes the 32-bit one where that suffices at run time.
    const std::uint64_t image = static_cast<std::uint64_t>(i) / gather.image_elems;
    const auto at =
        static_cast<std::uint32_t>(static_cast<std::uint64_t>(i) - image * gather.image_elems);
    const std::uint32_t channel = at / gather.plane_elems;
    const std::int64_t sample = gather.args.samples[image];
    return {gather.args.pixels + sample * gather.image_elems + at, gather.args.scale[channel],
            gather.args.shift[channel]};
}

// The first n threads have a label each as well.
template <bool kQuads>
__global__ void gather_kernel(std::int64_t elems, Gather gather, int n, float* x, std::int32_t* y) {
    const std::int64_t thread = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (thread < n) {
        y[thread] = gather.args.labels[gather.args.samples[thread]];
    }
    const std::int64_t i = kQuads ? thread * 4 : thread;
    if (i >= elems) {
        return;
    }
    const Source from = source_of(gather, i);
    if constexpr (kQuads) {
        const uchar4 p = load_vector<uchar4>(from.pixels);
        store4(x + i, make_float4(p.x * from.scale + from.shift, p.y * from.scale + from.shift,
                                  p.z * from.scale + from.shift, p.w * from.scale + from.shift));
    } else {
        x[i] = *from.pixels * from.scale + from.shift;
    }
}

bool aligned(const void* at, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
}

}  // namespace

void gather(const Context& context, const GatherArgs& args, int n, float* x, std::int32_t* y) {
    const Gather gather{args, static_cast<std::uint32_t>(args.shape.elems()),
                        static_cast<std::uint32_t>(args.shape.plane_elems())};
    const bool quads =
        gather.plane_elems % 4 == 0 && aligned(args.pixels, 4) && aligned(x, sizeof(float4));
    const std::int64_t elems = args.shape.elems() * n;
    const std::int64_t threads = quads ? elems / 4 : elems;
    launch("gather", quads ? gather_kernel<true> : gather_kernel<false>,
           dim3(static_cast<unsigned>((threads + kElementwiseBlock - 1) / kElementwiseBlock)),
           dim3(kElementwiseBlock), context.stream, elems, gather, n, x, y);
}

}  // namespace gyre::SIMT_NAMESPACE
