#include "comm/nccl/nccl_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

#include "base/error.hpp"
#include "base/host_name.hpp"

namespace gyre::comm::nccl {
namespace {

constexpr const char* kPathVariable = "GYRE_NCCL_LIBRARY";

std::string file_name() {
    const char* path = std::getenv(kPathVariable);
    return path == nullptr || *path == '\0' ? "libnccl.so.2" : path;
}

// Loads the library for good: its threads still run at the program's end.
void* load(const std::string& file) {
    void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        throw usage_error(
            fmt::format("NCCL could not be loaded on {}: {}; install libnccl2 from NVIDIA's "
                        "package repository, or set {} to the path of a libnccl.so.2, such as "
                        "PyTorch's in site-packages/nvidia/nccl/lib, or use `comm` mpi or gloo",
                        host_name(), dlerror(), kPathVariable));
    }
    return handle;
}

template <typename Function>
void find(void* handle, const std::string& file, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (function == nullptr) {
        throw usage_error(
            fmt::format("{} on {} lacks the function {}: it is older than NCCL 2.14; install a "
                        "newer version, or use `comm` mpi or gloo",
                        file, host_name(), name));
    }
}

std::string version_text(int code) {
    return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100);
}

}  // namespace

Library::Library() {
    const std::string file = file_name();
    void* const handle = load(file);
    find(handle, file, "ncclGetVersion", get_version);
    find(handle, file, "ncclGetUniqueId", get_unique_id);
    find(handle, file, "ncclCommInitRankConfig", comm_init_rank_config);
    find(handle, file, "ncclCommFinalize", comm_finalize);
    find(handle, file, "ncclCommDestroy", comm_destroy);
    find(handle, file, "ncclCommAbort", comm_abort);
    find(handle, file, "ncclCommGetAsyncError", comm_get_async_error);
    find(handle, file, "ncclGetErrorString", get_error_string);
    find(handle, file, "ncclGetLastError", get_last_error);
    find(handle, file, "ncclAllReduce", all_reduce);
    find(handle, file, "ncclAllGather", all_gather);
    find(handle, file, "ncclReduceScatter", reduce_scatter);
    emulated = dlsym(handle, "gyre_fake_nccl") != nullptr;
}

std::string Library::version() const {
    int code = 0;
    const std::string text = get_version(&code) == success ? version_text(code) : "?";
    return emulated ? text + " (the tests' stand-in for NCCL)" : text;
}

std::string library_version() {
    try {
        const Library library;
        return fmt::format("{} ({})", library.version(), file_name());
    } catch (const Error& error) {
        return fmt::format("not found: {}", error.what());
    }
}

}  // namespace gyre::comm::nccl
