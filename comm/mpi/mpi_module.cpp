// Loads the communicator over MPI, and with it MPI's library, when it is asked for. gyre itself is
// not linked with MPI, so it starts on a machine that has none.
#include <dlfcn.h>
#include <fmt/format.h>

#include "base/host_name.hpp"
#include "comm/communicator.hpp"

namespace gyre::comm {
namespace {

// For good, and for all to see: Open MPI loads modules of its own, which take its names from there.
struct Module {
    void* const handle = dlopen("libgyre_mpi.so", RTLD_NOW | RTLD_GLOBAL);
    const std::string error = handle == nullptr ? dlerror() : "";
};

template <typename Function>
Function* find(const char* name) {
    static const Module module;
    void* const found = module.handle == nullptr ? nullptr : dlsym(module.handle, name);
    if (found == nullptr) {
        throw Error(ExitCode::communication,
                    fmt::format("MPI could not be loaded on {}: {}; install Open MPI 4 or 5 (on "
                                "Debian openmpi-bin), with which gyre must have been built, or "
                                "start the ranks with `gyre launch` or torchrun, which need none",
                                host_name(), module.error));
    }
    return reinterpret_cast<Function*>(found);
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator() {
    return std::unique_ptr<Communicator>(find<Communicator*()>("gyre_make_mpi_communicator")());
}

std::string mpi_library_version() {
    std::string version;
    try {
        find<void(std::string&)>("gyre_mpi_version")(version);
    } catch (const Error& error) {
        version = fmt::format("not found: {}", error.what());
    }
    return version;
}

}  // namespace gyre::comm
