// An example of a kernel that is not gyre's, with a planted race, on the emulator.
//   block_sums           prints the sum of each block
//   block_sums --race    leaves the barriers out: the checker reports the race, and the exit code
//   is 1
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "kernels/emulation/checker.hpp"
#include "kernels/emulation/simt.hpp"

using namespace simt;

constexpr unsigned kThreads = 256, kBlocks = 4;

// sums[b] = x[256 b] + ... + x[256 b + 255]
template <bool kRace>
__global__ void block_sums(const float* x, float* sums) {
    SIMT_SHARED(float, parts, [kThreads]);
    const unsigned i = threadIdx.x;
    parts[i] = x[blockIdx.x * kThreads + i];
    __syncthreads();
    for (unsigned half = kThreads / 2; half > 0; half /= 2) {
        if (i < half) {
            parts[i] += parts[i + half];
        }
        if constexpr (!kRace) {
            __syncthreads();
        }
    }
    if (i == 0) {
        sums[blockIdx.x] = parts[0];
    }
}

int main(int argc, char** argv) {
    const bool race = argc > 1 && std::strcmp(argv[1], "--race") == 0;
    enable_checker();
    try {
        const std::vector<float> x(kBlocks * kThreads, 1.0f);
        std::vector<float> sums(kBlocks);
        Stream stream;
        auto* const device_x = static_cast<float*>(allocate(x.size() * sizeof(float)));
        auto* const device_sums = static_cast<float*>(allocate(sums.size() * sizeof(float)));
        stream.upload(device_x, x.data(), x.size() * sizeof(float));
        launch("block_sums", race ? block_sums<true> : block_sums<false>, kBlocks, kThreads, stream,
               device_x, device_sums);
        stream.download(sums.data(), device_sums, sums.size() * sizeof(float));
        stream.synchronize();
        std::printf("%g %g %g %g\n", sums[0], sums[1], sums[2], sums[3]);
        release(device_x);
        release(device_sums);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
