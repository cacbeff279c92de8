// The NCCL functions that gyre uses, as nccl.h declares them, in a library loaded with dlopen. So
// the program is built without CUDA's headers and starts without NCCL. If nccl.h is found when the
// tests are built, tests/comm/nccl_header_check.cpp compares the two.
#pragma once

#include <cstddef>
#include <string>

namespace gyre::comm::nccl {

struct Communicator;  // ncclComm
using Handle = Communicator*;
using Stream = void*;  // cudaStream_t

enum Result : int {
    success = 0,
    unhandled_cuda_error = 1,
    system_error = 2,
    internal_error = 3,
    invalid_argument = 4,
    invalid_usage = 5,
    remote_error = 6,
    in_progress = 7
};
enum Type : int { float16 = 6, float32 = 7, bfloat16 = 9 };
enum Operation : int { sum = 0 };

struct UniqueId {
    char internal[128];
};

// ncclConfig_t of NCCL 2.14; later versions recognise it by size and version.
struct Config {
    std::size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 0;
};

using GetVersion = Result(int* version);
using GetUniqueId = Result(UniqueId* id);
using CommInitRankConfig = Result(Handle* comm, int ranks, UniqueId id, int rank, Config* config);
using CommFinalize = Result(Handle comm);
using CommDestroy = Result(Handle comm);
using CommAbort = Result(Handle comm);
using CommGetAsyncError = Result(Handle comm, Result* state);
using GetErrorString = const char*(Result result);
using GetLastError = const char*(Handle comm);
using AllReduce = Result(const void* from, void* to, std::size_t elems, Type type,
                         Operation operation, Handle comm, Stream stream);
using AllGather = Result(const void* from, void* to, std::size_t elems_of_a_rank, Type type,
                         Handle comm, Stream stream);
using ReduceScatter = Result(const void* from, void* to, std::size_t elems_of_a_rank, Type type,
                             Operation operation, Handle comm, Stream stream);

class Library {
 public:
    // Throws Error(usage), which says what to install.
    Library();

    GetVersion* get_version;
    GetUniqueId* get_unique_id;
    CommInitRankConfig* comm_init_rank_config;
    CommFinalize* comm_finalize;
    CommDestroy* comm_destroy;
    CommAbort* comm_abort;
    CommGetAsyncError* comm_get_async_error;
    GetErrorString* get_error_string;
    GetLastError* get_last_error;
    AllReduce* all_reduce;
    AllGather* all_gather;
    ReduceScatter* reduce_scatter;
    // True if the library is the tests' stand-in (tests/comm/fake_nccl.cpp), whose device is the
    // emulated GPU.
    bool emulated;

    std::string version() const;
};

// Returns the version, or the reason why there is none, for `gyre info`.
std::string library_version();

}  // namespace gyre::comm::nccl
