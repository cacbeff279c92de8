// The program `gyre`: picks the subcommand, and turns errors into a message and an exit code.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>

#include "comm/communicator.hpp"
#include "comm/launch/start_alarm.hpp"
#include "comm/watch/watchdog.hpp"
#include "kernels/base/printable.hpp"
#include "train/cli/command_line.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/flags.hpp"
#include "train/cli/help.hpp"
#include "train/cli/setup.hpp"

namespace {

using namespace gyre;
using namespace gyre::train;

// What all ranks must have been asked for alike.
std::vector<ManifestEntry> command_manifest(const CLI::App& app, bool answered) {
    const auto commands = app.get_subcommands();
    std::vector<ManifestEntry> entries = {
        {"the version of gyre", version_text()},
        {"the subcommand", commands.empty() ? "none" : commands[0]->get_name()},
        {"--help or --version", answered ? "given" : "not given"}};
    if (!commands.empty()) {
        const auto flags = flag_manifest(*commands[0]);
        entries.insert(entries.end(), flags.begin(), flags.end());
    }
    return entries;
}

int fail(Communicator* comm, const std::string& message, ExitCode code, bool on_all_ranks) {
    const bool several = comm != nullptr && comm->size() > 1;
    if (!on_all_ranks || comm == nullptr || comm->is_root() || comm->own_terminal()) {
        fmt::print(stderr, "gyre: {}{}\n",
                   several && !on_all_ranks ? fmt::format("rank {}: ", comm->rank()) : "",
                   printable(message, true));
    }
    if (several && !on_all_ranks) {
        comm->abort(static_cast<int>(code));  // or the others would wait for this rank for ever
    }
    return static_cast<int>(code);
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app(
        "gyre: a data-parallel trainer for convolutional nets. For several ranks, run it\n"
        "under mpirun, torchrun or srun, or give --init-method, --rank and --world-size.",
        "gyre");
    app.formatter(std::make_shared<HelpFormatter>());  // of the subcommands, too
    app.footer(
        "Examples:\n"
        "  gyre train --data mnist --epochs 3\n"
        "  mpirun -np 4 gyre train --data mnist --save best.safetensors");
    app.set_version_flag("--version", version_text());
    app.require_subcommand(1);
    TrainOptions train_options;
    EvalOptions eval_options;
    PlanOptions plan_options;
    CLI::App* train = app.add_subcommand("train", "Train a net");
    CLI::App* eval = app.add_subcommand("eval", "Loss and accuracy of saved weights");
    CLI::App* plan = app.add_subcommand("plan", "Predict a step on many ranks");
    CLI::App* info = app.add_subcommand("info", "What this build and this machine have");
    add_train_flags(*train, train_options);
    add_eval_flags(*eval, eval_options);
    add_plan_flags(*plan, plan_options);
    const std::vector<std::string> typed(argv + 1, argv + argc);
    std::unique_ptr<Communicator> comm;
    std::optional<StartAlarm> alarm;
    const auto explain = [&](const Error& error) {
        return error.code() == ExitCode::communication && alarm ? alarm->explain(error.what())
                                                                : std::string(error.what());
    };
    try {
        // The flags say where the ranks meet, so they are read first. What is wrong with them is
        // said after the ranks have met, if the environment tells where and they come soon.
        std::exception_ptr refusal;
        try {
            std::vector<std::string> arguments = translate_arguments(app, typed);
            std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
            app.parse(std::move(arguments));
        } catch (...) {
            refusal = std::current_exception();
        }
        const CommonOptions& common =
            train->parsed() ? static_cast<const CommonOptions&>(train_options) : eval_options;
        LaunchOptions launch = refusal ? LaunchOptions{} : common.launch;
        launch.collective_timeout = common.timeout + 15.0;  // the watchdog's comes first
        alarm.emplace(launch.init_timeout);
        if (refusal) {
            launch.init_timeout = 5.0;
        }
        try {
            comm = make_communicator(launch, *alarm);
        } catch (const Error&) {
            if (!refusal) {
                throw;
            }
            comm = make_single_communicator();
        }
        bool answered = false;  // --help or --version
        // Together, so that no rank ends, and is seen to end by the launcher, before rank 0 has
        // said why.
        agree(*comm, [&] {
            try {
                if (refusal) {
                    std::rethrow_exception(refusal);
                }
            } catch (const CLI::Success& request) {
                answered = true;
                if (comm->is_root()) {
                    app.exit(request);
                }
            } catch (const CLI::ExtrasError&) {
                throw usage_error(fmt::format(
                    "'{}' belongs to no flag; values follow flags, as in --epochs 10 ({})",
                    fmt::join(app.get_subcommands().at(0)->remaining(), " "),
                    help_hint(app, typed)));
            } catch (const CLI::ParseError& error) {
                throw usage_error(fmt::format("{} ({})", error.what(), help_hint(app, typed)));
            }
        });
        // Before anything that depends on them: ranks that do different things do not meet.
        require_same_manifest(*comm, command_manifest(app, answered));
        // What has its own bounds, or none, from here on.
        if (answered || info->parsed() || plan->parsed()) {
            alarm->stop();
        }
        if (answered) {
            return static_cast<int>(ExitCode::success);
        }
        if (info->parsed()) {
            return static_cast<int>(comm->is_root() ? run_info() : ExitCode::success);
        }
        if (plan->parsed()) {
            return static_cast<int>(run_plan(*comm, plan_options));
        }
        comm = make_watched_communicator(
            std::move(comm), {common.timeout, std::min(5.0, common.timeout / 2),
                              common.flight_record, launch.init_timeout + common.timeout});
        alarm->stop();
        return static_cast<int>(train->parsed() ? run_train(*comm, train_options)
                                                : run_eval(*comm, eval_options));
    } catch (const AgreedError& error) {
        return fail(comm.get(), error.what(), error.code(), true);
    } catch (const Error& error) {
        return fail(comm.get(), explain(error), error.code(), false);
    } catch (const std::exception& error) {
        return fail(comm.get(), error.what(), ExitCode::internal, false);
    }
}
