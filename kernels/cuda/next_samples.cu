// Chooses the images of the next step: samples[i] = order(step * step_images + first + i); then
// increments step.
//
// Latency-bound: 24 sequential rounds of about 10 instructions per image, and a launch. One block,
// since all threads must read the step before one of them advances it; each thread takes one image
// or several. Six threads compute the keys of the rounds for all.
#include <algorithm>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kMostThreads = 256;

__global__ void next_samples_kernel(NextSamplesArgs args, int n, std::int32_t* samples) {
    SIMT_SHARED(std::uint32_t, keys, [EpochOrder::kRounds]);
    const int thread = static_cast<int>(threadIdx.x);
    const EpochPlace place = *args.place;
    if (thread < EpochOrder::kKeyGroups) {
        args.order.write_keys(place.epoch, thread, keys);
    }
    __syncthreads();
    if (thread == 0) {
        args.place->step = place.step + 1;
    }
    const std::int64_t first = place.step * args.step_images + args.first;
    for (int i = thread; i < n; i += static_cast<int>(blockDim.x)) {
        samples[i] = static_cast<std::int32_t>(
            args.order.image(place.epoch, keys, static_cast<std::uint32_t>(first + i)));
    }
}

}  // namespace

void next_samples(const Context& context, const NextSamplesArgs& args, int n,
                  std::int32_t* samples) {
    const int threads = std::clamp((n + 31) / 32 * 32, 32, kMostThreads);
    launch("next_samples", next_samples_kernel, dim3(1), dim3(static_cast<unsigned>(threads)),
           context.stream, args, n, samples);
}

}  // namespace gyre::SIMT_NAMESPACE
