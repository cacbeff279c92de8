// Loads the communicator over MPI, and with it MPI's library, when it is asked for. gyre itself is
// not linked with MPI, so it starts on a machine that has none. There are two modules of the same
// source: libgyre_mpi.so is linked with the MPI of the build (Open MPI), libgyre_mpi_abi.so takes
// any library that has MPI 5.0's standard binary interface.
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

#include "base/host_name.hpp"
#include "comm/communicator.hpp"

namespace gyre::comm {
namespace {

constexpr const char* kLibraryVariable = "GYRE_MPI_LIBRARY";
constexpr const char* kStandardLibrary = "libmpi_abi.so.1";  // the name in the standard

struct Module {
    void* handle = nullptr;  // none: error says why
    std::string error;
};

// For good, and for all to see: Open MPI loads modules of its own, which take their names from
// there, and so does the second of ours.
Module load(const char* file) {
    void* const handle = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    return {handle, handle == nullptr ? dlerror() : ""};
}

Module load_standard() {
    const char* const file = std::getenv(kLibraryVariable);
    Module library = load(file == nullptr ? kStandardLibrary : file);
    if (library.handle == nullptr) {
        return library;
    }
    // Other libraries lack this function, or it says -1.
    int major = -1, minor = 0;
    if (void* const found = dlsym(library.handle, "MPI_Abi_get_version")) {
        reinterpret_cast<int (*)(int*, int*)>(found)(&major, &minor);
    }
    if (major != 1) {
        return {nullptr, fmt::format("{} does not have the standard binary interface of MPI 5.0",
                                     file == nullptr ? kStandardLibrary : file)};
    }
    return load("libgyre_mpi_abi.so");
}

// One for the process, as two libraries of MPI have functions of the same names.
Module choose() {
    // MPICH's mpiexec and Intel MPI's set the former.
    const bool hydra =
        std::getenv("PMI_SIZE") != nullptr && std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
    if (hydra || std::getenv(kLibraryVariable) != nullptr) {
        return load_standard();
    }
    Module found = load("libgyre_mpi.so");
    if (found.handle == nullptr) {
        Module standard = load_standard();
        standard.error = fmt::format("{}; {}", found.error, standard.error);
        return standard;
    }
    return found;
}

template <typename Function>
Function* find(const char* name) {
    static const Module module = choose();
    void* const found = module.handle == nullptr ? nullptr : dlsym(module.handle, name);
    if (found == nullptr) {
        throw Error(
            ExitCode::communication,
            fmt::format(
                "MPI could not be loaded on {}: {}; install Open MPI 4 or 5 (on Debian "
                "openmpi-bin), with which gyre must have been built, or take the mpiexec of "
                "another MPI with the standard binary interface of MPI 5.0, such as MPICH 5, and "
                "name its {} in {}; or start the ranks with `gyre launch` or torchrun, which need "
                "none",
                host_name(), module.error, kStandardLibrary, kLibraryVariable));
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
