// Which launcher started this process, where its ranks meet, and the communicator that follows.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "comm/communicator.hpp"
#include "comm/launch/local_ranks.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/nccl/nccl_communicator.hpp"
#include "comm/shared/shared_communicator.hpp"

namespace gyre::comm {
namespace {

// The names under which a launcher tells its ranks who they are.
struct Launcher {
    const char* marker;  // is set by this launcher only
    std::string_view name;
    const char *rank, *size, *local_rank, *local_size;  // local ones: nullptr where unknown
    bool mpi;                                           // its ranks are MPI's
    const char* remedy;
};

constexpr std::string_view kByHand = "the environment";
constexpr std::string_view kGyreLaunch = "gyre launch";
constexpr const char* kTorchrunRemedy =
    "run `mpirun -np N gyre train ...`, or unset RANK and WORLD_SIZE for a single rank";

// The first that is set counts: mpirun inside a Slurm allocation is mpirun, and so is torchrun.
constexpr Launcher kLaunchers[] = {
    {kLaunchFolder, kGyreLaunch, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", false,
     "unset GYRE_LAUNCH_DIR, which is gyre launch's own"},
    {"TORCHELASTIC_RUN_ID", "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     false, kTorchrunRemedy},
    {"OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", true,
     "run it with the mpirun of the MPI that gyre was built with (see `gyre info`)"},
    {"PMI_SIZE", "MPICH's or Intel MPI's mpiexec", "PMI_RANK", "PMI_SIZE", nullptr, nullptr, true,
     "run it with the mpiexec of the library in GYRE_MPI_LIBRARY (see `gyre info`), or with Open "
     "MPI's mpirun, or give each rank `init-method`, `rank` and `world-size`"},
    {"RANK", kByHand, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", false,
     kTorchrunRemedy},
    {"SLURM_STEP_NUM_TASKS", "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
     nullptr, false,
     "use `SLURM_PMIX_FENCE=ring srun --mpi=pmix`, or `mpirun gyre train ...` "
     "inside the allocation"},
    {"WORLD_SIZE", kByHand, "RANK", "WORLD_SIZE", nullptr, nullptr, false, kTorchrunRemedy},
};

// torchrun's own store listens on MASTER_PORT; its ranks try this many ports after it.
constexpr int kPortsAfterTorchruns = 8;

Error launch_error(const std::string& message) {
    return {ExitCode::communication, message};
}

std::string environment(const char* name) {
    const char* text = name == nullptr ? nullptr : std::getenv(name);
    return text == nullptr ? std::string{} : text;
}

std::optional<int> parse_int(const std::string& text) {
    int value = 0;
    const char* end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    return result.ec == std::errc{} && result.ptr == end ? std::optional(value) : std::nullopt;
}

std::optional<int> environment_int(const char* name) {
    return parse_int(environment(name));
}

const Launcher* find_launcher() {
    for (const Launcher& launcher : kLaunchers) {
        if (!environment(launcher.marker).empty()) {
            return &launcher;
        }
    }
    return nullptr;
}

int parse_port(const std::string& text, const std::string& where) {
    const std::optional<int> port = parse_int(text);
    if (!port || *port < 1 || *port > 65535) {
        throw usage_error(fmt::format("{}: '{}' is not a port (1 to 65535)", where, text));
    }
    return *port;
}

// The first host of a list such as "node[03-07,12],other".
std::string first_host(const std::string& list) {
    const std::size_t bracket = list.find_first_of("[,");
    if (bracket == std::string::npos || list[bracket] == ',') {
        return list.substr(0, bracket);
    }
    const std::size_t number_end = list.find_first_of("-,]", bracket);
    const std::size_t close = std::min(list.find(']', bracket), list.size() - 1);
    return list.substr(0, bracket) + list.substr(bracket + 1, number_end - bracket - 1) +
           list.substr(close + 1, list.find(',', close) - close - 1);
}

void meet_over_tcp(StartUp& start_up, const std::string& address) {
    start_up.method = StartUp::Method::tcp;
    const std::string flag = "`init-method` tcp://" + address;
    const std::size_t colon = address.rfind(':');
    if (colon == std::string::npos || colon == 0) {
        throw usage_error(
            fmt::format("{}: give the address of rank 0's host and a free port there, as in "
                        "tcp://192.0.2.1:22225, tcp://[::1]:22225 or tcp://node1:22225",
                        flag));
    }
    start_up.host = address.substr(0, colon);
    if (start_up.host.front() == '[' && start_up.host.back() == ']') {
        start_up.host = start_up.host.substr(1, start_up.host.size() - 2);
    } else if (start_up.host.find(':') != std::string::npos) {
        throw usage_error(
            fmt::format("{}: put the IPv6 address into brackets, as in "
                        "tcp://[::1]:22225",
                        flag));
    }
    start_up.ports = {parse_port(address.substr(colon + 1), flag)};
}

// Where the environment says that rank 0 listens.
void meet_by_environment(StartUp& start_up) {
    start_up.method = StartUp::Method::tcp;
    start_up.host = environment("MASTER_ADDR");
    std::string port = environment("MASTER_PORT");
    const std::string slurm_step = environment("SLURM_STEP_ID");
    if (start_up.launcher == "srun") {
        const int job = environment_int("SLURM_JOB_ID").value_or(0);
        const int step = parse_int(slurm_step).value_or(0);
        if (start_up.host.empty()) {
            start_up.host = first_host(environment("SLURM_STEP_NODELIST"));
        }
        if (port.empty()) {  // another one for each job and step, below the ephemeral ports
            port = std::to_string(20000 + (job % 1000 * 10 + step % 10));
        }
        start_up.job_id = fmt::format("Slurm job {}.{}", job, step);
    }
    if (start_up.host.empty() || port.empty()) {
        throw launch_error(fmt::format(
            "{} started {} ranks, but {} is not set, so they cannot find each other; set "
            "MASTER_ADDR and MASTER_PORT to the address of rank 0's host and a free port there, "
            "or use `init-method` tcp://HOST:PORT{}{}",
            start_up.launcher, start_up.world_size,
            start_up.host.empty() ? "MASTER_ADDR" : "MASTER_PORT",
            start_up.launcher_remedy.empty() ? "" : ", or ", start_up.launcher_remedy));
    }
    const bool one_host =
        start_up.local_size == start_up.world_size ||
        (start_up.launcher == "srun" && environment_int("SLURM_STEP_NUM_NODES") == 1);
    if (one_host && !start_up.secret.known() && !start_up.insecure &&
        start_up.host != "localhost" && start_up.host != "::1" &&
        !start_up.host.starts_with("127.")) {
        start_up.host = "127.0.0.1";  // nobody else needs to reach them
    }
    const int first = parse_port(port, "MASTER_PORT");
    start_up.ports = {first};
    if (start_up.launcher == "torchrun") {
        start_up.job_id =
            fmt::format("torchrun {} at port {}", environment("TORCHELASTIC_RUN_ID"), first);
        if (environment("TORCHELASTIC_USE_AGENT_STORE") == "True") {
            start_up.ports.clear();
            for (int i = 1; i <= kPortsAfterTorchruns && first + i <= 65535; ++i) {
                start_up.ports.push_back(first + i);
            }
            if (start_up.ports.empty()) {
                throw launch_error(fmt::format(
                    "MASTER_PORT {}: torchrun itself listens there, and gyre's ranks meet on one "
                    "of the ports after it, of which there is none; give torchrun a lower "
                    "--master-port",
                    first));
            }
        }
    }
}

std::unique_ptr<Communicator> make_launched_mpi_communicator(const StartUp& start_up,
                                                             StartAlarm& alarm) {
    alarm.watch(start_up.rank, 0.0, false, mpi_start_news(start_up.rank));
    auto comm = make_mpi_communicator();
    if (!start_up.launcher.empty() && comm->size() != start_up.world_size) {
        alarm.stop();
        throw launch_error(fmt::format(
            "{} started {} ranks, but MPI sees {}, so each rank would "
            "train alone; {}",
            start_up.launcher, start_up.world_size, comm->size(), start_up.launcher_remedy));
    }
    return comm;
}

// A launcher's variables, of which a part is missing or no number, would have each rank train
// alone.
void require_usable(const Launcher& launcher, std::optional<int> size, std::optional<int> rank) {
    const auto shown = [](const char* name) {
        return std::getenv(name) == nullptr ? fmt::format("{} is not set", name)
                                            : fmt::format("{} is '{}'", name, environment(name));
    };
    const bool alone =
        size == 1 && rank.value_or(0) == 0 && (rank || environment(launcher.rank).empty());
    const bool several = size.value_or(0) > 1 &&
                         (launcher.mpi || (rank && *rank >= 0 && *rank < *size));  // MPI knows it
    if (!alone && !several) {
        throw launch_error(fmt::format(
            "{} does not tell this process its rank and the number of ranks: {}, {}; set both ({} "
            "from 0 to {} - 1), or give `rank` R and `world-size` N, or {}",
            launcher.name, shown(launcher.rank), shown(launcher.size), launcher.rank, launcher.size,
            launcher.remedy));
    }
}

// True if the flags ask for MPI.
bool wants_mpi(const LaunchSpec& options) {
    return options.init_method == "mpi" || options.comm == "mpi";
}
bool by_flags(const LaunchSpec& options) {
    return options.rank || options.world_size ||
           (!options.init_method.empty() && options.init_method != "mpi");
}

void require_consistent(const LaunchSpec& options) {
    const bool mpi = wants_mpi(options);
    if (mpi && (options.comm == "gloo" ||
                !(options.init_method.empty() || options.init_method == "mpi"))) {
        throw usage_error(
            fmt::format("`comm` {} does not go with `init-method` {}: MPI finds its "
                        "ranks itself, Gloo by env://, tcp:// or file://",
                        options.comm, options.init_method));
    }
    if (mpi && (options.rank || options.world_size)) {
        throw usage_error("`rank` and `world-size` do not go with MPI, which numbers its ranks");
    }
}

// This process's rank and the number of ranks, as the launcher says it unless flags do. True: and
// that is all, as the process is alone or MPI does the rest.
bool identify_by_launcher(StartUp& start_up, const LaunchSpec& options, const Launcher& launcher) {
    const std::optional<int> size = environment_int(launcher.size);
    const std::optional<int> rank = environment_int(launcher.rank);
    if (!by_flags(options)) {
        require_usable(launcher, size, rank);
        if (*size == 1) {
            return true;
        }
    }
    start_up.own_terminal = launcher.name == kByHand;
    start_up.launcher = start_up.own_terminal ? fmt::format("{} (WORLD_SIZE={})", launcher.name,
                                                            environment("WORLD_SIZE"))
                                              : fmt::format("{}", launcher.name);
    start_up.launcher_remedy = launcher.remedy;
    start_up.world_size = options.world_size.value_or(size.value_or(0));
    start_up.rank = options.rank.value_or(rank.value_or(-1));
    if (!options.rank && !options.world_size) {
        start_up.local_rank = environment_int(launcher.local_rank);
        start_up.local_size = environment_int(launcher.local_size);
    }
    // Slurm's own tasks are MPI's where srun was told so.
    const bool pmix = launcher.name == "srun" && !environment("PMIX_RANK").empty();
    if (wants_mpi(options) ||
        (!by_flags(options) && options.comm != "gloo" && (launcher.mpi || pmix))) {
        start_up.method = StartUp::Method::mpi;
        return true;
    }
    return false;
}

// The same, with or without a launcher.
bool identify(StartUp& start_up, const LaunchSpec& options) {
    const Launcher* launcher = find_launcher();
    if (launcher != nullptr && !(options.rank && options.world_size)) {
        return identify_by_launcher(start_up, options, *launcher);
    }
    if (!by_flags(options)) {
        start_up.method = wants_mpi(options) ? StartUp::Method::mpi : StartUp::Method::single;
        return true;
    }
    start_up.launcher = "`world-size`";
    start_up.own_terminal = true;
    start_up.world_size = options.world_size.value_or(0);
    start_up.rank = options.rank.value_or(-1);
    return false;
}

void require_identified(const StartUp& start_up, const LaunchSpec& options) {
    if (start_up.world_size < 1 || start_up.rank < 0) {
        const bool no_size = start_up.world_size < 1;
        throw Error(
            by_flags(options) ? ExitCode::usage : ExitCode::communication,
            fmt::format("this process does not know {}: give `rank` R and `world-size` N "
                        "({}), or start it with a launcher that says it (torchrun, srun, "
                        "mpirun){}{}",
                        no_size ? "the number of ranks" : "its rank",
                        no_size ? "or WORLD_SIZE" : "or RANK",
                        start_up.launcher_remedy.empty() ? "" : "; ", start_up.launcher_remedy));
    }
    if (start_up.rank >= start_up.world_size) {
        throw usage_error(fmt::format("rank {} of {} ranks: ranks count from 0 to {}",
                                      start_up.rank, start_up.world_size, start_up.world_size - 1));
    }
}

void meet_by_file(StartUp& start_up, const std::string& path) {
    start_up.method = StartUp::Method::file;
    start_up.path = std::filesystem::path(path).lexically_normal();
    if (!start_up.path.is_absolute()) {
        throw usage_error(
            fmt::format("`init-method` file://{}: give a full path that all ranks see, "
                        "as in file:///tmp/job1",
                        path));
    }
}

}  // namespace

StartUp find_start_up(const LaunchSpec& options) {
    require_consistent(options);
    StartUp start_up;
    if (identify(start_up, options)) {
        return start_up;
    }
    require_identified(start_up, options);
    start_up.secret = Secret::of_environment();
    start_up.insecure = options.insecure;
    const std::string& method = options.init_method;
    if (method.starts_with("tcp://")) {
        meet_over_tcp(start_up, method.substr(6));
    } else if (method.starts_with("file://")) {
        meet_by_file(start_up, method.substr(7));
    } else if (start_up.launcher == kGyreLaunch && method.empty() &&
               environment_int(kLaunchNodes).value_or(1) == 1) {
        meet_by_file(start_up, environment(kLaunchFolder));
    } else {
        meet_by_environment(start_up);
    }
    if (!options.job_id.empty()) {
        start_up.job_id = options.job_id;
    }
    return start_up;
}

namespace {

std::unique_ptr<Communicator> make_host_communicator(const LaunchSpec& options, StartAlarm& alarm) {
    const StartUp start_up = find_start_up(options);
    switch (start_up.method) {
        case StartUp::Method::single:
            return make_single_communicator();
        case StartUp::Method::mpi:
            return make_launched_mpi_communicator(start_up, alarm);
        default:
            break;
    }
    if (start_up.world_size == 1) {
        return make_single_communicator();
    }
    if (!gloo_available()) {
        throw launch_error(fmt::format(
            "{} asks for {} ranks without MPI, which needs Gloo, and this gyre was built without "
            "it; install libgloo-dev and build again{}{}",
            start_up.launcher, start_up.world_size, start_up.launcher_remedy.empty() ? "" : ", or ",
            start_up.launcher_remedy));
    }
    return make_gloo_communicator(start_up, options, alarm);
}

}  // namespace

std::unique_ptr<Communicator> make_communicator(const LaunchSpec& options, StartAlarm& alarm) {
    auto host = share_memory(make_host_communicator(options, alarm), options.comm == "auto",
                             options.collective_timeout());
    const bool required = options.comm == "nccl";
    if (host->size() == 1 || !(required || options.comm == "auto")) {
        return host;
    }
    return make_nccl_communicator(
        std::move(host),
        {required, options.share_gpu, options.init_timeout, options.collective_timeout()});
}

int most_ranks() {
    return environment(kLaunchFolder).empty() ? 1 : environment_int(kMostRanks).value_or(1);
}

std::unique_ptr<Communicator> make_communicator(const LaunchSpec& options) {
    StartAlarm alarm(options.init_timeout);
    return make_communicator(options, alarm);
}

std::unique_ptr<Communicator> make_communicator() {
    return make_communicator(LaunchSpec{});
}

}  // namespace gyre::comm
