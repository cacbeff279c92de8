// gyre info: what this build and this machine have.
#include <fmt/format.h>

#include "comm/communicator.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/nccl/nccl_library.hpp"
#include "data/dataset_files.hpp"
#include "kernels/cpu_kernels.hpp"
#include "kernels/device_info.hpp"
#include "model/spec.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/setup.hpp"

namespace gyre::train {

ExitCode run_info() {
    fmt::print("{}\n", version_text());
    for (const InfoLine& line : device_info()) {
        fmt::print("{:<18} {}\n", line.name, line.value);
    }
    fmt::print(
        "{:<18} {}; the kind of device (cpu, emulated, the GPU's model) and its libraries; "
        "--shards; without it the number of ranks\n",
        "bits depend on", chosen_cpu_kernels().title);
    fmt::print("{:<18} compiled in: {}, found: {}\n", "MPI", mpi_compiled_version(),
               mpi_library_version());
    fmt::print("{:<18} {}\n", "NCCL", nccl::library_version());
    fmt::print("{:<18} {}\n", "Gloo", gloo_available() ? "compiled in" : "none in this build");
    for (const std::string& name : builtin_models()) {
        fmt::print("{:<18} {}\n", "built-in net", name);
    }
    for (const FoundDataset& found : find_datasets()) {
        fmt::print("{:<18} {} in {}\n", "data set", found.name, found.directory.string());
    }
    std::string places;
    for (const auto& place : dataset_search_path()) {
        places.append(places.empty() ? "" : ":").append(place.string());
    }
    fmt::print("{:<18} {}\n", "data search path", places);
    return ExitCode::success;
}

}  // namespace gyre::train
