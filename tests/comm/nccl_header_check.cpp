// Checks that nccl_library.hpp agrees with nccl.h; built only if nccl.h is found.
#include <nccl.h>

#include <type_traits>

#include "comm/nccl/nccl_library.hpp"

namespace gyre::comm::nccl {
namespace {

static_assert(int{success} == int{ncclSuccess} && int{in_progress} == int{ncclInProgress});
static_assert(int{unhandled_cuda_error} == int{ncclUnhandledCudaError} &&
              int{system_error} == int{ncclSystemError} &&
              int{internal_error} == int{ncclInternalError} &&
              int{invalid_argument} == int{ncclInvalidArgument} &&
              int{invalid_usage} == int{ncclInvalidUsage} &&
              int{remote_error} == int{ncclRemoteError});
static_assert(sizeof(Result) == sizeof(ncclResult_t) && sizeof(Type) == sizeof(ncclDataType_t) &&
              sizeof(Operation) == sizeof(ncclRedOp_t));
static_assert(int{float16} == int{ncclFloat16} && int{float32} == int{ncclFloat32} &&
              int{bfloat16} == int{ncclBfloat16} && int{sum} == int{ncclSum});
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == 1);
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size) &&
              offsetof(Config, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(Config, version) == offsetof(ncclConfig_t, version) &&
              offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking) &&
              sizeof(Config) <= sizeof(ncclConfig_t));
constexpr ncclConfig_t kInitial = NCCL_CONFIG_INITIALIZER;
static_assert(Config{}.magic == kInitial.magic && Config{}.version <= kInitial.version);
static_assert(std::is_pointer_v<cudaStream_t> && std::is_pointer_v<ncclComm_t>);

// Maps a function's type with nccl.h's types to the same type with ours.
template <typename T>
struct Ours : std::type_identity<T> {};
template <>
struct Ours<ncclComm_t> : std::type_identity<Handle> {};
template <>
struct Ours<ncclComm_t*> : std::type_identity<Handle*> {};
template <>
struct Ours<ncclResult_t> : std::type_identity<Result> {};
template <>
struct Ours<ncclResult_t*> : std::type_identity<Result*> {};
template <>
struct Ours<ncclUniqueId> : std::type_identity<UniqueId> {};
template <>
struct Ours<ncclUniqueId*> : std::type_identity<UniqueId*> {};
template <>
struct Ours<ncclConfig_t*> : std::type_identity<Config*> {};
template <>
struct Ours<ncclDataType_t> : std::type_identity<Type> {};
template <>
struct Ours<ncclRedOp_t> : std::type_identity<Operation> {};
template <>
struct Ours<cudaStream_t> : std::type_identity<Stream> {};
template <typename Value, typename... Arguments>
struct Ours<Value(Arguments...)> {
    using type = typename Ours<Value>::type(typename Ours<Arguments>::type...);
};
template <auto& function, typename Expected>
constexpr bool same =
    std::is_same_v<typename Ours<std::remove_reference_t<decltype(function)>>::type, Expected>;

static_assert(same<ncclGetVersion, GetVersion> && same<ncclGetUniqueId, GetUniqueId>);
static_assert(same<ncclCommInitRankConfig, CommInitRankConfig>);
static_assert(same<ncclCommFinalize, CommFinalize> && same<ncclCommDestroy, CommDestroy>);
static_assert(same<ncclCommAbort, CommAbort> && same<ncclCommGetAsyncError, CommGetAsyncError>);
static_assert(same<ncclGetErrorString, GetErrorString> && same<ncclGetLastError, GetLastError>);
static_assert(same<ncclAllReduce, AllReduce> && same<ncclAllGather, AllGather>);
static_assert(same<ncclReduceScatter, ReduceScatter>);

}  // namespace
}  // namespace gyre::comm::nccl
