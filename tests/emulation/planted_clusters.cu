// Bugs of clusters: two blocks of 64 threads each.
#include "kernels/emulation/simt.hpp"
#include "tests/emulation/planted_bugs.hpp"

namespace simt {
namespace {

__device__ __forceinline__ unsigned other_rank() {
    return 1 - cluster_rank();
}
__device__ __forceinline__ unsigned place() {
    return cluster_rank() * 64 + threadIdx.x;
}

// Reads what the other block wrote before a barrier of both.
template <bool kBug>
__global__ void cluster_race(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    const unsigned i = threadIdx.x;
    const float* const other = map_shared_rank(tile, other_rank());
    tile[i] = 0.0f;
    cluster_sync();
    tile[i] = x[place()];
    if constexpr (kBug) {
        __syncthreads();
    } else {
        cluster_sync();
    }
    y[place()] = i > 0 ? other[63 - i] : 0.0f;
    cluster_sync();
}

template <bool kBug>
__global__ void not_begun(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    if constexpr (!kBug) {
        cluster_sync();
    }
    map_shared_rank(tile, other_rank())[threadIdx.x] = x[place()];  // bug: not begun
    cluster_sync();
    y[place()] = tile[63 - threadIdx.x];
}

template <bool kBug>
__global__ void block_ended(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    tile[threadIdx.x] = x[place()];
    cluster_sync();
    y[place()] = map_shared_rank(tile, other_rank())[63 - threadIdx.x];  // bug: block ended
    if constexpr (!kBug) {
        cluster_sync();
    }
}

// A block overwrites what the other may still read; its own barrier is none for that.
template <bool kBug>
__global__ void remote_reader(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    const unsigned i = threadIdx.x;
    tile[i] = x[place()];
    cluster_sync();
    const float found = map_shared_rank(tile, other_rank())[63 - i];
    __syncthreads();
    if constexpr (!kBug) {
        cluster_sync();
    }
    tile[i] = found;
    cluster_sync();
    y[place()] = map_shared_rank(tile, other_rank())[i];
    cluster_sync();
}

// Both blocks write to the first one's memory.
template <bool kBug>
__global__ void both_write(const float* x, float* y) {
    SIMT_SHARED(float, tile, [128]);
    cluster_sync();
    map_shared_rank(tile, 0)[kBug ? threadIdx.x : place()] = x[place()];  // bug: both write
    cluster_sync();
    if (cluster_rank() == 0) {
        y[threadIdx.x] = tile[kBug ? threadIdx.x : 127 - threadIdx.x];
    }
}

// After its arrival a thread may touch what nobody else does, and no more.
template <bool kBug>
__global__ void before_wait(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    const unsigned i = threadIdx.x;
    tile[i] = 0.0f;
    cluster_sync();
    tile[i] = x[place()];
    cluster_arrive();
    const float own = tile[i];
    if constexpr (!kBug) {
        cluster_wait();
    }
    float found = tile[63 - i];
    if constexpr (kBug) {
        cluster_wait();
    }
    found += own + map_shared_rank(tile, other_rank())[i];
    cluster_sync();
    y[place()] = found;
}

// Writes after the arrival, for those who pass the next barrier.
template <bool kBug>
__global__ void after_arrival(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    const unsigned i = threadIdx.x;
    tile[i] = 0.0f;
    cluster_sync();
    if constexpr (!kBug) {
        tile[i] = x[place()];
    }
    cluster_arrive();
    if constexpr (kBug) {
        tile[i] = x[place()];
    }
    cluster_wait();
    y[place()] = map_shared_rank(tile, other_rank())[63 - i];
    cluster_sync();
}

// A block's barrier passes on what one of its threads has waited for.
template <bool kBug>
__global__ void passed_on(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    const unsigned i = threadIdx.x;
    tile[i] = 0.0f;
    cluster_sync();
    tile[i] = x[place()];
    cluster_arrive();
    if (i < 32) {
        cluster_wait();
    }
    if constexpr (!kBug) {
        __syncthreads();
    }
    y[place()] = map_shared_rank(tile, other_rank())[63 - i];
    if (i >= 32) {
        cluster_wait();
    }
    cluster_sync();
}

// The blocks of a cluster see each other's device memory after its barrier.
template <bool kBug>
__global__ void device_memory(float* x, float* y) {
    x[place()] = static_cast<float>(place());
    if constexpr (kBug) {
        __syncthreads();
    } else {
        cluster_sync();
    }
    y[place()] = x[127 - place()];
}

template <bool kBug>
__global__ void remote_unwritten(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    if (!kBug || cluster_rank() == 0) {
        tile[threadIdx.x] = x[place()];
    }
    cluster_sync();
    y[place()] = map_shared_rank(tile, other_rank())[threadIdx.x];  // bug: remote unwritten
    cluster_sync();
}

template <bool kBug>
__global__ void remote_bounds(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    tile[threadIdx.x] = x[place()];
    cluster_sync();
    y[place()] =
        map_shared_rank(tile, other_rank())[threadIdx.x + (kBug ? 1 : 0)];  // bug: remote bounds
    cluster_sync();
}

template <bool kBug>
__global__ void no_such_rank(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64]);
    tile[threadIdx.x] = x[place()];
    cluster_sync();
    y[place()] = *map_shared_rank(tile + threadIdx.x, cluster_blocks() - (kBug ? 0 : 1));
    cluster_sync();
}

template <bool kBug>
__global__ void remote_copy(const float* x, float* y) {
    SIMT_SHARED(float, tile, [64][4]);
    const unsigned i = threadIdx.x;
    cluster_sync();
    cp_async16(kBug ? map_shared_rank(tile[i], other_rank()) : tile[i], x + 4 * i, true);
    cp_async_commit();
    cp_async_wait<0>();
    cluster_sync();
    y[place()] = map_shared_rank(tile[i], other_rank())[cluster_rank()];
    cluster_sync();
}

template <bool kBug>
__global__ void some_arrive(const float* x, float* y) {
    if (!kBug || threadIdx.x < 32 || cluster_rank() == 0) {
        cluster_sync();  // bug: some arrive
    }
    y[place()] = x[place()];
}

template <bool kBug>
__global__ void arrives_twice(const float* x, float* y) {
    cluster_arrive();  // other: arrives twice
    if constexpr (!kBug) {
        cluster_wait();
    }
    y[place()] = x[place()];
    cluster_arrive();  // bug: arrives twice
    cluster_wait();
}

template <bool kBug>
__global__ void waits_alone(const float* x, float* y) {
    if constexpr (!kBug) {
        cluster_arrive();
    }
    y[place()] = x[place()];
    cluster_wait();  // bug: waits alone
}

template <bool kBug>
__global__ void cluster_not_waited(const float* x, float* y) {
    y[place()] = x[place()];
    cluster_arrive();  // bug: cluster not waited
    if constexpr (!kBug) {
        cluster_wait();
    }
}

template <bool kBug>
__global__ void cluster_divergent(const float* x, float* y) {
    if (kBug && cluster_rank() == 0) {
        cluster_sync();  // bug: cluster divergent
    } else {
        cluster_sync();  // other: cluster divergent
    }
    y[place()] = x[place()];
}

template <auto kernel_with, auto kernel_without>
void start(Stream& stream, bool bug, float* x, float* y) {
    launch("planted", bug ? kernel_with : kernel_without, dim3(2), dim3(64), SharedBytes{},
           ClusterBlocks{2}, stream, x, y);
}

template <bool kBug>
__global__ void uneven(const float* x, float* y) {
    y[blockIdx.x * 64 + threadIdx.x] = x[cluster_rank()];
}
void start_uneven(Stream& stream, bool bug, float* x, float* y) {
    launch("planted", uneven<true>, dim3(bug ? 5 : 6), dim3(64), SharedBytes{}, ClusterBlocks{2},
           stream, x, y);
}

}  // namespace

std::vector<PlantedBug> planted_cluster_bugs() {
    using enum Finder;
    return {
        {"cluster race",
         checker,
         {"race: ", "of the cluster's block", "no barrier of the cluster between"},
         start<cluster_race<true>, cluster_race<false>>},
        {"not begun",
         checker,
         {"another block's shared memory", "has begun"},
         start<not_begun<true>, not_begun<false>>},
        {"block ended",
         checker,
         {"another block's shared memory", "end"},
         start<block_ended<true>, block_ended<false>>},
        {"remote reader",
         checker,
         {"race: ", "of the cluster's block"},
         start<remote_reader<true>, remote_reader<false>>},
        {"both write",
         checker,
         {"race: ", "wrote them", "of the cluster's block"},
         start<both_write<true>, both_write<false>>},
        {"before wait",
         checker,
         {"race: ", "of the same block"},
         start<before_wait<true>, before_wait<false>>},
        {"after arrival",
         checker,
         {"race: ", "of the cluster's block"},
         start<after_arrival<true>, after_arrival<false>>},
        {"passed on",
         checker,
         {"race: ", "of the cluster's block"},
         start<passed_on<true>, passed_on<false>>},
        {"device memory",
         checker,
         {"race: ", "of the cluster's block"},
         start<device_memory<true>, device_memory<false>>},
        {"remote unwritten",
         checker,
         {"uninitialised: "},
         start<remote_unwritten<true>, remote_unwritten<false>>},
        {"remote bounds",
         address_sanitizer,
         {"out of bounds: ", "0 bytes behind the end"},
         start<remote_bounds<true>, remote_bounds<false>>},
        {"no such rank",
         emulator,
         {"rank 2 of a cluster of 2"},
         start<no_such_rank<true>, no_such_rank<false>>},
        {"remote copy",
         emulator,
         {"cp.async", "another block's shared memory"},
         start<remote_copy<true>, remote_copy<false>>},
        {"some arrive",
         emulator,
         {"the kernel", "cluster"},
         start<some_arrive<true>, some_arrive<false>>},
        {"arrives twice",
         emulator,
         {"has not waited"},
         start<arrives_twice<true>, arrives_twice<false>>},
        {"waits alone",
         emulator,
         {"has not arrived"},
         start<waits_alone<true>, waits_alone<false>>},
        {"cluster not waited",
         emulator,
         {"without a wait"},
         start<cluster_not_waited<true>, cluster_not_waited<false>>},
        {"cluster divergent",
         emulator,
         {"divergent cluster barrier"},
         start<cluster_divergent<true>, cluster_divergent<false>>},
        {"cluster size", emulator, {"clusters of 2", "divide the grid"}, start_uneven},
    };
}

}  // namespace simt
