// The language of kernels on the emulator: names of CUDA C++, for a compiler without CUDA support.
// Rules and meanings are those of kernels/cuda/simt.hpp, which has the same names for a GPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <source_location>
#include <tuple>
#include <type_traits>

#include "base/data_type.hpp"
#include "kernels/emulation/emulator.hpp"
#include "kernels/emulation/runtime.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SIMT_GRID_CONSTANT
#define SIMT_UNROLL
#define SIMT_NO_UNROLL
#define SIMT_UNROLL_BY_4

#define threadIdx (::simt::emulator::thread->index)
#define blockIdx (::simt::emulator::thread->block)
#define blockDim (::simt::emulator::block_extent)
#define gridDim (::simt::emulator::grid_extent)

// A reference into the block's shared memory, the same for all threads of a block. The key
// identifies the declaration and the template instance.
#define SIMT_SHARED(type, name, extents)                                            \
    using name##_in_shared = type extents;                                          \
    static const char name##_key = 0;                                               \
    auto& name = *static_cast<name##_in_shared*>(::simt::emulator::shared_variable( \
        &name##_key, #name, sizeof(name##_in_shared), alignof(name##_in_shared)))

#define SIMT_DYNAMIC_SHARED(type, name) \
    type* const name = static_cast<type*>(::simt::emulator::dynamic_shared())

namespace simt {

struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(4) uchar4 {
    unsigned char x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
// Makes one access of 4, 8 or 16 bytes, where the compiler would split the struct into several.
template <std::size_t kBytes>
struct VectorWords {
    using Type [[gnu::may_alias]] = std::uint32_t;
};
template <>
struct VectorWords<8> {
    using Type [[gnu::may_alias]] = std::uint64_t;
};
template <>
struct VectorWords<16> {
    using Type [[gnu::may_alias, gnu::vector_size(16)]] = float;
};
template <typename T>
using VectorWord = typename VectorWords<sizeof(T)>::Type;
template <typename T>
T load_vector(const void* at) {
    return std::bit_cast<T>(*static_cast<const volatile VectorWord<T>*>(at));
}
template <typename T>
void store_vector(void* at, const T& value) {
    *static_cast<volatile VectorWord<T>*>(at) = std::bit_cast<VectorWord<T>>(value);
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

inline int min(int a, int b) {
    return a < b ? a : b;
}
inline int max(int a, int b) {
    return a < b ? b : a;
}

using Place = std::source_location;

inline void __syncthreads(Place place = Place::current()) {
    emulator::sync_block(place);
}
inline void __syncwarp(Place place = Place::current()) {
    emulator::sync_warp(place);
}
inline unsigned cluster_rank() {
    return emulator::thread->rank;
}
inline unsigned cluster_blocks() {
    return emulator::cluster_blocks;
}
inline void cluster_arrive(Place place = Place::current()) {
    emulator::arrive_at_cluster(place);
}
inline void cluster_wait(Place place = Place::current()) {
    emulator::wait_for_cluster(place);
}
inline void cluster_sync(Place place = Place::current()) {
    emulator::arrive_at_cluster(place);
    emulator::wait_for_cluster(place);
}
template <typename T>
T* map_shared_rank(T* at, unsigned rank) {
    return static_cast<T*>(
        emulator::map_shared_rank(const_cast<std::remove_const_t<T>*>(at), rank));
}
inline float warp_sum(float value, Place place = Place::current()) {
    emulator::warp_operation(emulator::WarpOperation::sum_float, &value, place);
    return value;
}
inline double warp_sum(double value, Place place = Place::current()) {
    emulator::warp_operation(emulator::WarpOperation::sum_double, &value, place);
    return value;
}
inline void warp_argmax(float& value, int& index, Place place = Place::current()) {
    emulator::ArgMax operand{value, index};
    emulator::warp_operation(emulator::WarpOperation::argmax, &operand, place);
    value = operand.value;
    index = operand.index;
}
inline void atomic_max(std::int32_t* at, std::int32_t value) {
    emulator::atomic_max(at, value);
}
inline void atomic_add(std::uint32_t* at, std::uint32_t value) {
    emulator::atomic_add(at, value);
}
inline void atomic_add(std::int64_t* at, std::int64_t value) {
    emulator::atomic_add(at, value);
}
inline bool arrives_last(std::uint32_t* count, std::uint32_t blocks, std::uint32_t index) {
    return emulator::arrives_last(count, blocks, index);
}
inline std::uint32_t to_tf32(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    // Infinities and NaN are returned unchanged.
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}
inline std::uint32_t pack_bf16(float low, float high) {
    return std::uint32_t{gyre::narrow::to_bfloat16(high)} << 16 | gyre::narrow::to_bfloat16(low);
}
inline std::uint32_t pack_f16(float low, float high) {
    return std::uint32_t{gyre::narrow::to_float16(high)} << 16 | gyre::narrow::to_float16(low);
}
inline float f16_value(std::uint16_t bits) {
    return gyre::narrow::from_float16(bits);
}
inline void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                     Place place = Place::current()) {
    emulator::Mma operand{d, a, b};
    emulator::warp_operation(emulator::WarpOperation::mma_tf32, &operand, place);
}
inline void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                     Place place = Place::current()) {
    emulator::Mma operand{d, a, b};
    emulator::warp_operation(emulator::WarpOperation::mma_bf16, &operand, place);
}
inline void mma_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                    Place place = Place::current()) {
    emulator::Mma operand{d, a, b};
    emulator::warp_operation(emulator::WarpOperation::mma_f16, &operand, place);
}

// Reads a lane's row for its warp. Inline in the kernel, so that the checker sees the access.
inline void load_matrices(emulator::WarpOperation operation, std::uint32_t (&result)[4],
                          const void* row, const Place& place) {
    emulator::check_address(row, true, "ldmatrix");
    const auto words = load_vector<uint4>(row);
    const std::uint32_t values[4] = {words.x, words.y, words.z, words.w};
    emulator::LoadMatrices operand{values, result};
    emulator::warp_operation(operation, &operand, place);
}
inline void ldmatrix_x4(std::uint32_t (&result)[4], const void* row,
                        Place place = Place::current()) {
    load_matrices(emulator::WarpOperation::load_matrices, result, row, place);
}
inline void ldmatrix_x4_transposed(std::uint32_t (&result)[4], const void* row,
                                   Place place = Place::current()) {
    load_matrices(emulator::WarpOperation::load_matrices_transposed, result, row, place);
}

// The source is read when the copy lands; also when it is issued, so that reports name this place.
inline void cp_async16(void* to, const void* from, bool valid) {
    emulator::check_address(to, true, "cp.async to");
    if (valid) {
        emulator::check_address(from, false, "cp.async from");
        static_cast<void>(load_vector<uint4>(from));
    }
    constexpr unsigned kNan = 0x7fffffff;
    store_vector(to, uint4{kNan, kNan, kNan, kNan});
    emulator::issue_copy({to, valid ? from : nullptr});
}
inline void cp_async_commit() {
    emulator::thread->copies.commit();
}
template <int kPending>
inline void cp_async_wait() {
    emulator::thread->landing = true;
    while (const emulator::AsyncCopy* copy = emulator::thread->copies.land(kPending)) {
        store_vector(copy->to,
                     copy->from == nullptr ? uint4{0, 0, 0, 0} : load_vector<uint4>(copy->from));
    }
    emulator::thread->landing = false;
}

// Unknown before a kernel runs; the emulator counts it then. kSystemSharedBytes leaves room for it.
template <typename... P>
std::size_t declared_shared_bytes(const char*, void (*)(P...)) {
    return 0;
}

template <typename... P, typename... A>
void launch(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, SharedBytes shared,
            ClusterBlocks cluster, Stream& stream, A&&... arguments) {
    emulator::submit(stream, [=, values = std::tuple<P...>(std::forward<A>(arguments)...)] {
        std::apply(
            [&](const P&... each) {
                const emulator::Argument given[] = {{&each, sizeof each}..., {nullptr, 0}};
                emulator::run_grid({name,
                                    reinterpret_cast<const void*>(kernel),
                                    grid,
                                    block,
                                    shared.count,
                                    cluster.count,
                                    {given, sizeof...(each)}},
                                   [&] { kernel(each...); });
            },
            values);
    });
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

}  // namespace simt
