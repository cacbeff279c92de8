// The primitives that gyre's kernels are written with, on a GPU and under the emulator.
//
// The rules for kernel sources (docs/kernels.md explains them):
//   - shared memory is declared with SIMT_SHARED, kernels are started with launch();
//   - blocks have a multiple of 32 threads, and no thread leaves a kernel before a barrier or
//     a warp operation that the others still reach;
//   - warp operations are those below, and all 32 lanes take part in each;
//   - no float atomics: sums have a fixed order, so that every run gives the same results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/runtime.hpp"

#if defined(GYRE_EMULATED)
#include "kernels/emulation/simt.hpp"
#else

#include <cuda_runtime.h>

#include <tuple>

#include "kernels/cuda/check.hpp"
#include "kernels/cuda/native.hpp"

// A shared variable of the block, aligned to 16 bytes: SIMT_SHARED(float, tile, [16][20]).
#define SIMT_SHARED(type, name, extents) __shared__ __align__(16) type name extents
// The block's dynamic shared memory (SharedBytes of launch()) as a pointer, aligned to 128 bytes
// and, like SIMT_SHARED, not initialised: SIMT_DYNAMIC_SHARED(float, tile). Once per kernel.
#define SIMT_DYNAMIC_SHARED(type, name)                                   \
    extern __shared__ __align__(128) unsigned char simt_dynamic_shared[]; \
    type* const name = reinterpret_cast<type*>(simt_dynamic_shared)
// Precedes a kernel parameter, const and by value, that is read from the argument space instead of
// being copied to each thread.
#define SIMT_GRID_CONSTANT __grid_constant__
// Precedes a loop with a known trip count, so that arrays indexed by it are kept in registers.
#define SIMT_UNROLL _Pragma("unroll")
// Precedes a loop that rarely iterates more than once, so that it is not unrolled.
#define SIMT_NO_UNROLL _Pragma("unroll 1")
// Precedes a loop without stores, so that the loads of four iterations overlap.
#define SIMT_UNROLL_BY_4 _Pragma("unroll 4")

namespace gyre::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// Loads a float4, float2, uint4, uint2 or uchar4, aligned to its size, in one access.
template <typename T>
__device__ __forceinline__ T load_vector(const void* at) {
    return *static_cast<const T*>(at);
}
template <typename T>
__device__ __forceinline__ void store_vector(void* at, const T& value) {
    *static_cast<T*>(at) = value;
}

// cluster_rank() is the block's rank in its cluster, cluster_blocks() the number of its blocks.
// cluster_sync() is a barrier of all threads of the cluster, for all memory; cluster_arrive() is
// its first half, after which a thread may only touch its own data until cluster_wait().
// map_shared_rank(at, rank) maps `at` in shared memory to that of another block, which barriers
// must keep alive. Only for kernels launched with ClusterBlocks, on sm_90.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
__device__ __forceinline__ unsigned cluster_blocks() {
    unsigned count = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
#endif
    return count;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
template <typename T>
__device__ __forceinline__ T* map_shared_rank(T* at, unsigned rank) {
#if __CUDA_ARCH__ >= 900
    std::uint64_t mapped;
    asm("mapa.u64 %0, %1, %2;"
        : "=l"(mapped)
        : "l"(reinterpret_cast<std::uint64_t>(at)), "r"(rank));
    return reinterpret_cast<T*>(mapped);
#else
    return at;
#endif
}

// Sum over the warp, on every lane, in butterfly order (distance 16, 8, 4, 2, 1).
__device__ __forceinline__ float warp_sum(float value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullWarp, value, distance);
    }
    return value;
}
__device__ __forceinline__ double warp_sum(double value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullWarp, value, distance);
    }
    return value;
}

// Maximum over the warp and its index, on every lane; the lowest index of equal values.
__device__ __forceinline__ void warp_argmax(float& value, int& index) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(kFullWarp, value, distance);
        const int other_index = __shfl_xor_sync(kFullWarp, index, distance);
        if (other > value || (other == value && other_index < index)) {
            value = other;
            index = other_index;
        }
    }
}

// *at = max(*at, value), by any number of threads concurrently; the result does not depend on their
// order.
__device__ __forceinline__ void atomic_max(std::int32_t* at, std::int32_t value) {
    atomicMax(at, value);
}
// *at += value, likewise; at: in shared or device memory.
__device__ __forceinline__ void atomic_add(std::uint32_t* at, std::uint32_t value) {
    atomicAdd(at, value);
}
__device__ __forceinline__ void atomic_add(std::int64_t* at, std::int64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}

// Counts a block's arrival at *count, which is 0 before and after; returns true for the last of
// `blocks`. Called by one thread of each block, number `index` among them. The last block sees all
// writes that a block made before a barrier preceding the call, in all of its threads after another
// barrier.
__device__ __forceinline__ bool arrives_last(std::uint32_t* count, std::uint32_t blocks,
                                             std::uint32_t /*index*/) {
    __threadfence();
    const bool last = atomicInc(count, blocks - 1) == blocks - 1;
    __threadfence();
    return last;
}

// Rounds to the nearest TF32 number (8 bits of exponent, 10 of mantissa), ties away from zero.
__device__ __forceinline__ std::uint32_t to_tf32(float value) {
    std::uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
}
// Rounds both to the nearest 16-bit number, ties to even; `low` goes to the lower half.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
    std::uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ std::uint32_t pack_f16(float low, float high) {
    std::uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ float f16_value(std::uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// d[16][8] += a[16][8] b[8][8] on tensor cores, by a whole warp. With group = lane / 4 and
// at = lane % 4, a lane holds (PTX ISA, "Matrix fragments for mma.m16n8k8", .tf32)
//   a[0] (group, at)  a[1] (group + 8, at)  a[2] (group, at + 4)  a[3] (group + 8, at + 4)
//   b[0] (at, group)  b[1] (at + 4, group)
//   d[0] (group, 2 at)  d[1] (group, 2 at + 1)  d[2] (group + 8, 2 at)  d[3] (group + 8, 2 at + 1)
__device__ __forceinline__ void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d[16][8] += a[16][16] b[16][8] in bfloat16 or float16, with sums in float32. A register holds two
// neighbours along k, the first in the lower half. A lane holds (PTX ISA, "Matrix fragments for
// mma.m16n8k16")
//   a[0] (group, 2 at)  a[1] (group + 8, 2 at)  a[2] (group, 2 at + 8)  a[3] (group + 8, 2 at + 8)
//   b[0] (2 at, group)  b[1] (2 at + 8, group)  and d as above
__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Loads four matrices of 8 rows of 16 bytes, by a whole warp: lane i gives the shared address, a
// multiple of 16 bytes, of row i % 8 of matrix i / 8. result[j]: word lane % 4 of row lane / 4 of
// matrix j; transposed, 16-bit elements: rows 2 (lane % 4) and the next of column lane / 4.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&result)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_transposed(std::uint32_t (&result)[4],
                                                       const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts copying 16 bytes from global to shared memory, or zeros if not valid (`from` is then not
// read). The copies that a thread started since its last commit form a group; cp_async_wait waits
// until at most its kPending latest groups are in flight. Other threads see a thread's copies after
// its wait and a barrier.
__device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The shared memory that a kernel declares statically, which reduces the limit for its launches.
// `name` is for messages.
template <typename... P>
std::size_t declared_shared_bytes(const char* name, void (*kernel)(P...)) {
    cudaFuncAttributes attributes{};
    check_launch(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), name);
    return attributes.sharedSizeBytes;
}

// Launches kernel<<<grid, block, shared>>>(arguments...) in the stream, in clusters if they have
// more than one block. `name` is for messages. Dynamic shared memory beyond 48 KiB must be
// requested for each kernel, and so must the largest shared-memory share of a multiprocessor, so
// that as many such blocks as fit run at a time.
template <typename... P, typename... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, SharedBytes shared,
            ClusterBlocks cluster, Stream& stream, A&&... arguments) {
    const auto* const entry = reinterpret_cast<const void*>(kernel);
    if (shared.count > kSharedBytesUnasked) {
        check_launch(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared.count)),
                     name);
        check_launch(cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout,
                                          cudaSharedmemCarveoutMaxShared),
                     name);
    }
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster.count, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared.count;
    config.stream = native(stream);
    config.attrs = &attribute;
    config.numAttrs = cluster.count > 1 ? 1 : 0;
    std::tuple<P...> values(std::forward<A>(arguments)...);
    std::apply(
        [&](auto&... each) {
            void* pointers[] = {static_cast<void*>(&each)...};
            check_launch(cudaLaunchKernelExC(&config, entry, pointers), name);
        },
        values);
}
template <typename... P, typename... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, SharedBytes shared,
            Stream& stream, A&&... arguments) {
    launch(name, kernel, grid, block, shared, ClusterBlocks{}, stream,
           std::forward<A>(arguments)...);
}
template <typename... P, typename... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, Stream& stream,
            A&&... arguments) {
    launch(name, kernel, grid, block, SharedBytes{}, stream, std::forward<A>(arguments)...);
}

}  // namespace gyre::cuda
#endif
