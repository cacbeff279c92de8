// Which launcher started this process, and whether MPI agrees with it.
#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "comm/communicator.hpp"

namespace gyre {
namespace {

struct Launcher {
    const char* variable;  // holds the number of ranks
    const char* name;
    const char* remedy;
};

// The first that is set counts: mpirun inside a Slurm allocation is mpirun.
constexpr Launcher kLaunchers[] = {
    {"OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun",
     "run it with the mpirun of the MPI that gyre was built with (see `gyre info`)"},
    {"PMI_SIZE", "MPICH's or Intel MPI's mpiexec",
     "gyre was built with Open MPI: run it with Open MPI's mpirun"},
    {"SLURM_STEP_NUM_TASKS", "srun",
     "use `srun --mpi=pmix`, or `mpirun gyre train ...` inside the allocation"},
    {"WORLD_SIZE", "torchrun",
     "run `mpirun -np N gyre train ...`, or unset WORLD_SIZE for a single rank"},
};

std::optional<int> environment_int(const char* name) {
    const char* text = std::getenv(name);
    if (text == nullptr) {
        return std::nullopt;
    }
    int value = 0;
    const char* end = text + std::strlen(text);
    const auto result = std::from_chars(text, end, value);
    return result.ec == std::errc{} && result.ptr == end ? std::optional(value) : std::nullopt;
}

}  // namespace

std::unique_ptr<Communicator> make_communicator() {
    for (const Launcher& launcher : kLaunchers) {
        const std::optional<int> expected = environment_int(launcher.variable);
        if (!expected) {
            continue;
        }
        if (*expected <= 1) {
            break;
        }
        auto comm = make_mpi_communicator();
        if (comm->size() != *expected) {
            throw Error(ExitCode::communication,
                        fmt::format("{} started {} ranks ({}={}), but MPI sees {}, so each rank "
                                    "would train alone; {}",
                                    launcher.name, *expected, launcher.variable, *expected,
                                    comm->size(), launcher.remedy));
        }
        return comm;
    }
    return make_single_communicator();
}

}  // namespace gyre
