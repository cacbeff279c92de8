#include "tests/emulation/planted_bugs.hpp"

#include "kernels/emulation/simt.hpp"

namespace simt {
namespace {

constexpr int kDynamicFloats = 20000;

template <bool kBug>
__global__ void dropped_barrier(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    const unsigned i = threadIdx.x;
    tile[i] = x[i];
    __syncthreads();
    const float mirrored = tile[63 - i];  // other: dropped barrier
    if constexpr (!kBug) {
        __syncthreads();
    }
    tile[i] = 2.0f * mirrored;  // bug: dropped barrier
    __syncthreads();
    y[i] = tile[i / 2];
}

template <bool kBug>
__global__ void no_fence(const float* x, float* y) {
    SIMT_SHARED(float, tile, [2][32]);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int round = 0; round < 3; ++round) {
        tile[warp][lane] = x[lane];  // other: no fence
        if constexpr (!kBug) {
            __syncwarp();
        }
        const float sum = warp_sum(x[lane]);
        y[threadIdx.x] = sum + tile[warp][lane ^ 1];  // bug: no fence
        __syncwarp();
    }
}

template <bool kBug>
__global__ void lost_update(const float* x, float* y) {
    if constexpr (kBug) {
        y[0] += x[threadIdx.x];  // bug: lost update
    } else if (threadIdx.x == 0) {
        for (int i = 0; i < 64; ++i) {
            y[0] += x[i];
        }
    }
}

// The first lane overwrites what the others have read; nobody reads it later.
template <bool kBug>
__global__ void overwritten(const float* x, float* y) {
    SIMT_SHARED(float, tile, [32]);
    const unsigned lane = threadIdx.x;
    if (lane < 32) {
        tile[lane] = x[lane];
        __syncwarp();
        const float sum = warp_sum(tile[0]);
        if constexpr (!kBug) {
            __syncwarp();
        }
        if (lane == 0) {
            tile[0] += sum;  // bug: overwritten
            y[0] = tile[0];
        }
    }
}

template <bool kBug>
__global__ void shared_byte(const float* x, float* y) {
    SIMT_SHARED(unsigned char, bytes, [64]);
    const unsigned i = threadIdx.x;
    bytes[i] = static_cast<unsigned char>(i);
    bytes[i] = static_cast<unsigned char>(bytes[i] + 1);
    __syncthreads();
    if (i % 2 == 0) {
        y[i] = x[i] + bytes[i];  // other: shared byte
    } else {
        bytes[kBug ? i - 1 : i] = 3;  // bug: shared byte
    }
}

template <bool kBug>
__global__ void block_writes(const float* x, float* y) {
    const unsigned i = kBug ? threadIdx.x : blockIdx.x * 64 + threadIdx.x;
    y[i] = x[i];  // bug: block writes
}

// A block overwrites what its neighbour has still to read, or has read.
template <bool kBug>
__global__ void in_place(float* x, float* y) {
    const unsigned i = blockIdx.x * 64 + threadIdx.x;
    const float sum = x[i] + x[i + 1];
    __syncthreads();
    float* to = kBug ? x : y;
    to[i] = sum;  // bug: in place
}

template <bool kBug>
__global__ void shared_bounds(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    const unsigned i = threadIdx.x;
    tile[kBug ? i + 1 : i] = x[i];  // bug: shared bounds
    __syncthreads();
    y[i] = tile[i == 0 ? 1 : i];
}

template <bool kBug>
__global__ void global_bounds(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x + (kBug ? kPlantedFloats - 32 : 0)];  // bug: global bounds
}

template <bool kBug>
__global__ void shared_unwritten(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    const unsigned i = threadIdx.x;
    // The second block finds what the first one wrote; it must not be of use.
    if (!kBug || blockIdx.x == 0 || i != 5) {
        tile[i] = x[i];
    }
    __syncthreads();
    y[blockIdx.x * 64 + i] = tile[63 - i];  // bug: shared unwritten
}

__global__ void global_unwritten(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x];  // bug: global unwritten
}

__global__ void released(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x];  // bug: released
}

template <bool kBug>
__global__ void misaligned(const float* x, float* y) {
    const float* at = x + 4 * threadIdx.x + (kBug ? 1 : 0);
    const float4 v = *reinterpret_cast<const float4*>(at);  // bug: misaligned
    y[threadIdx.x] = v.x + v.y + v.z + v.w;
}

template <bool kBug>
__global__ void divergent(float* x, float* y) {
    const unsigned i = threadIdx.x;
    x[i] += 1.0f;
    if (kBug && i % 32 < 16) {
        __syncthreads();  // bug: divergent
    } else {
        __syncthreads();  // other: divergent
    }
    y[i] = x[63 - i];
}

template <bool kBug>
__global__ void leaves(float* x, float* y) {
    const unsigned i = threadIdx.x;
    if (kBug && i == 40) {
        return;
    }
    x[i] += 1.0f;
    __syncthreads();  // bug: leaves
    y[i] = x[63 - i];
}

template <unsigned kFloats>
__global__ void shared_size(const float* x, float* y) {
    SIMT_SHARED(float, large, [kFloats]);
    large[kFloats - 1 - threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = large[kFloats - 1 - threadIdx.x];
}

template <bool kBug>
__global__ void dynamic_bounds(const float* x, float* y) {
    SIMT_DYNAMIC_SHARED(float, tile);
    const unsigned i = threadIdx.x;
    tile[kDynamicFloats - (kBug ? 0 : 1) - i] = x[i];  // bug: dynamic bounds
    __syncthreads();
    y[i] = tile[kDynamicFloats - (i == 63 ? 1 : 2) - i];
}

// Shared memory of 64 x 4 floats, of which thread i asks for those at 4 i.
template <bool kBug>
__global__ void forgotten_wait(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64][4]);
    const unsigned i = threadIdx.x;
    cp_async16(tile[i], x + 4 * i, true);
    cp_async_commit();
    if constexpr (!kBug) {
        cp_async_wait<0>();
    }
    __syncthreads();
    y[i] = tile[63 - i][i % 4];  // bug: forgotten wait
    cp_async_wait<0>();
}

template <bool kBug>
__global__ void wait_count(const float* x, float* y) {
    SIMT_SHARED(float, tile, [2][64][4]);
    const unsigned i = threadIdx.x;
    for (int stage = 0; stage < 2; ++stage) {
        cp_async16(tile[stage][i], x + 4 * i + 128 * stage, i % 8 != 0);
        cp_async_commit();
    }
    cp_async_wait<1>();
    __syncthreads();
    float sum = tile[0][63 - i][0];
    cp_async_wait<kBug ? 1 : 0>();
    __syncthreads();
    sum += tile[1][63 - i][1];  // bug: wait count
    y[i] = sum;
    cp_async_wait<0>();
}

template <bool kBug>
__global__ void wait_alone(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64][4]);
    const unsigned i = threadIdx.x;
    for (int at = 0; at < 4; ++at) {
        tile[i][at] = 0.0f;
    }
    __syncthreads();
    cp_async16(tile[i], x + 4 * i, true);
    cp_async_commit();
    cp_async_wait<0>();
    if constexpr (!kBug) {
        __syncthreads();
    }
    y[i] = tile[63 - i][2];
}

template <bool kBug>
__global__ void copy_over(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64][4]);
    const unsigned i = threadIdx.x;
    for (int at = 0; at < 4; ++at) {
        tile[i][at] = x[i + at];
    }
    __syncthreads();
    const float before = tile[63 - i][0];  // other: copy over
    if constexpr (!kBug) {
        __syncthreads();
    }
    cp_async16(tile[i], x + 4 * i, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    y[i] = before + tile[63 - i][1];
}

template <bool kBug>
__global__ void never_waited(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64][4]);
    const unsigned i = threadIdx.x;
    cp_async16(tile[i], x + 4 * i, true);
    cp_async_commit();
    y[i] = x[i];
    cp_async_wait<kBug ? 1 : 0>();
}

// Word i % 4 of row i / 4, in each of the matrices.
template <bool kBug>
__global__ void load_rows(const float* x, float* y) {
    SIMT_SHARED(float, rows, [33][4]);
    const unsigned i = threadIdx.x, lane = i % 32;
    if (i < 33) {
        for (int at = 0; at < 4; ++at) {
            rows[i][at] = x[4 * i + at];
        }
    }
    __syncthreads();
    std::uint32_t words[4];
    ldmatrix_x4(words, &rows[lane][kBug ? 2 : 0]);
    for (int j = 0; j < 4; ++j) {
        memcpy(&y[4 * i + j], &words[j], sizeof words[j]);
    }
}

// The block that is last adds what all have written. Here it is another one that does.
template <bool kBug>
__global__ void other_last(const float* x, float* y) {
    SIMT_SHARED(int, last, [1]);
    const unsigned i = threadIdx.x;
    y[64 * blockIdx.x + i] = x[i];  // other: other is last
    __syncthreads();
    if (i == 0) {
        auto* const count = reinterpret_cast<std::uint32_t*>(y + kPlantedFloats - 1);
        last[0] = arrives_last(count, gridDim.x, blockIdx.x);
    }
    __syncthreads();
    if ((last[0] != 0) != kBug) {
        y[256 + i] = y[i] + y[64 + i];  // bug: other is last
    }
}

// The same; here not all of a block's stores come before its arrival.
template <bool kBug>
__global__ void early_arrival(const float* x, float* y) {
    SIMT_SHARED(int, last, [1]);
    const unsigned i = threadIdx.x;
    y[64 * blockIdx.x + i] = x[i];  // other: early arrival
    if (!kBug) {
        __syncthreads();
    }
    if (i == 0) {
        auto* const count = reinterpret_cast<std::uint32_t*>(y + kPlantedFloats - 1);
        last[0] = arrives_last(count, gridDim.x, blockIdx.x);
    }
    __syncthreads();
    if (last[0] != 0) {
        y[256 + i] = y[i] + y[64 + i];  // bug: early arrival
    }
}

__global__ void copy(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x];
}

__global__ void scale(float factor, const float* x, float* y) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = factor * x[i];
}

template <auto kernel_with, auto kernel_without, unsigned kBlocks = 1>
void start(Stream& stream, bool bug, float* x, float* y) {
    launch("planted", bug ? kernel_with : kernel_without, dim3(kBlocks), dim3(64), stream, x, y);
}

template <auto kernel_with, auto kernel_without>
void start_dynamic(Stream& stream, bool bug, float* x, float* y) {
    launch("planted", bug ? kernel_with : kernel_without, dim3(1), dim3(64),
           SharedBytes{kDynamicFloats * sizeof(float)}, stream, x, y);
}

// A kernel without its memory; or with all there is.
void start_dynamic_size(Stream& stream, bool bug, float* x, float* y) {
    launch("planted", dynamic_bounds<false>, dim3(1), dim3(64),
           SharedBytes{bug ? 0 : kMostSharedBytes}, stream, x, y);
}

void start_released(Stream& stream, bool bug, float*, float* y) {
    auto* memory = static_cast<float*>(allocate(256));
    stream.fill_zero(memory, 256);
    stream.synchronize();
    launch("planted", released, dim3(1), dim3(64), stream, memory, y);
    if (!bug) {
        stream.synchronize();
    }
    release(memory);
}

void start_unwritten(Stream& stream, bool bug, float*, float* y) {
    auto* memory = static_cast<float*>(allocate(256));
    if (!bug) {
        stream.fill_zero(memory, 256);
    }
    launch("planted", global_unwritten, dim3(1), dim3(64), stream, memory, y);
    try {
        stream.synchronize();
    } catch (...) {
        release(memory);
        throw;
    }
    release(memory);
}

void start_block_size(Stream& stream, bool bug, float* x, float* y) {
    launch("planted", copy, dim3(1), dim3(bug ? 48 : 64), stream, x, y);
}

std::vector<PlantedBug> all_bugs() {
    using enum Finder;
    std::vector<PlantedBug> bugs = {
        {"dropped barrier",
         checker,
         {"race: ", " with no barrier"},
         start<dropped_barrier<true>, dropped_barrier<false>>},
        {"no fence", checker, {"race: ", "__syncwarp"}, start<no_fence<true>, no_fence<false>>},
        {"lost update",
         checker,
         {"race: ", "4 bytes"},
         start<lost_update<true>, lost_update<false>>},
        {"overwritten",
         checker,
         {"race: ", "__syncwarp"},
         start<overwritten<true>, overwritten<false>>},
        {"shared byte",
         checker,
         {"race: ", "1 byte at"},
         start<shared_byte<true>, shared_byte<false>>},
        {"block writes",
         checker,
         {"race between blocks: "},
         start<block_writes<true>, block_writes<false>, 2>},
        {"in place", checker, {"race between blocks: "}, start<in_place<true>, in_place<false>, 2>},
        {"other is last",
         checker,
         {"race between blocks: "},
         start<other_last<true>, other_last<false>, 2>},
        {"early arrival",
         checker,
         {"race between blocks: "},
         start<early_arrival<true>, early_arrival<false>, 2>},
        {"shared bounds",
         address_sanitizer,
         {"out of bounds: ", "0 bytes behind the end", "256"},
         start<shared_bounds<true>, shared_bounds<false>>},
        {"global bounds",
         address_sanitizer,
         {"out of bounds: ", "behind the end", "2048 bytes"},
         start<global_bounds<true>, global_bounds<false>>},
        {"shared unwritten",
         checker,
         {"uninitialised: ", "offset 20 of a shared variable"},
         start<shared_unwritten<true>, shared_unwritten<false>, 2>},
        {"global unwritten", checker, {"uninitialised: ", "of 256 bytes"}, start_unwritten},
        {"released",
         address_sanitizer,
         {"out of bounds: ", "released device memory of 256"},
         start_released},
        {"misaligned",
         address_sanitizer,
         {"misaligned: ", "multiple of 16"},
         start<misaligned<true>, misaligned<false>>},
        {"divergent", emulator, {"divergent barrier"}, start<divergent<true>, divergent<false>>},
        {"leaves", emulator, {"the kernel"}, start<leaves<true>, leaves<false>>},
        {"shared size",
         emulator,
         {"'large'", "52000 bytes", "49152"},
         start<shared_size<13000>, shared_size<12000>>},
        {"dynamic bounds",
         address_sanitizer,
         {"out of bounds: ", "0 bytes behind the end", "80000"},
         start_dynamic<dynamic_bounds<true>, dynamic_bounds<false>>},
        {"dynamic size", emulator, {"dynamic shared memory"}, start_dynamic_size},
        {"block size", emulator, {"multiple of 32"}, start_block_size},
        {"forgotten wait",
         checker,
         {"uninitialised: ", "asynchronous copy"},
         start<forgotten_wait<true>, forgotten_wait<false>>},
        {"wait count",
         checker,
         {"uninitialised: ", "asynchronous copy"},
         start<wait_count<true>, wait_count<false>>},
        {"wait alone", checker, {"race: "}, start<wait_alone<true>, wait_alone<false>>},
        {"copy over", checker, {"race: "}, start<copy_over<true>, copy_over<false>>},
        {"never waited",
         emulator,
         {"1 asynchronous copies", "not waited for"},
         start<never_waited<true>, never_waited<false>>},
        {"load rows",
         emulator,
         {"misaligned: ", "ldmatrix"},
         start<load_rows<true>, load_rows<false>>},
    };
    for (PlantedBug& each : planted_cluster_bugs()) {
        bugs.push_back(std::move(each));
    }
    return bugs;
}

}  // namespace

const std::vector<PlantedBug>& planted_bugs() {
    static const std::vector<PlantedBug> bugs = all_bugs();
    return bugs;
}

float touch_from_host(const float* x) {
    return x[1];  // bug: host
}

void start_scale(Stream& stream, float factor, const float* x, float* y) {
    launch("scale", scale, dim3(kPlantedFloats / 64), dim3(64), stream, factor, x, y);
}

}  // namespace simt
