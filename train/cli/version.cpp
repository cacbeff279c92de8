#include "train/cli/version.hpp"

#include <fmt/format.h>

#include <vector>

#include "comm/communicator.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/nccl/nccl_library.hpp"
#include "kernels/device_info.hpp"
#include "train/cli/commit.hpp"

namespace gyre::train {

std::string version_text() {
    return "gyre " GYRE_VERSION " (commit " GYRE_COMMIT ", " GYRE_BUILD ")";
}

std::string about_text() {
    std::vector<InfoLine> lines = device_info();
    lines.push_back({"MPI", comm::mpi_library_version()});
    lines.push_back({"NCCL", comm::nccl::library_version()});
    lines.push_back({"Gloo", comm::gloo_available() ? "compiled in" : "none in this build"});
    std::string text = version_text();
    for (const InfoLine& line : lines) {
        text += fmt::format("\n{:<18} {}", line.name, line.value);
    }
    return text;
}

}  // namespace gyre::train
