#include "train/cli/program.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>

#include "base/printable.hpp"
#include "comm/communicator.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/launch/start_alarm.hpp"
#include "comm/watch/watchdog.hpp"
#include "train/cli/command_line.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/config.hpp"
#include "train/cli/flags.hpp"
#include "train/cli/help.hpp"
#include "train/cli/setup.hpp"
#include "train/cli/version.hpp"
#include "train/interrupt.hpp"

namespace gyre::train {
namespace {

// The command line of the process, its ranks and what it does.
class Program {
 public:
    Program(int argc, char** argv);
    // The exit code; throws Error.
    int run();
    // Says what went wrong, ends the other ranks if they do not know of it, and returns the exit
    // code.
    int fail(const Error& error, bool on_all_ranks);

 private:
    void parse();
    void meet();
    void answer();
    std::vector<ManifestEntry> manifest() const;
    std::vector<std::string> split_launch();

    std::vector<std::string> typed_;
    CLI::App app_{
        "gyre: a data-parallel trainer for convolutional nets. For several ranks, run it\n"
        "with gyre launch, mpirun, torchrun or srun, or give --init-method, --rank and\n"
        "--world-size.",
        "gyre"};
    Options options_;
    const std::vector<Command> commands_ = commands(options_);
    const Command* command_ = nullptr;  // that was given; null: none, or the flags are refused
    std::exception_ptr refusal_;        // of the flags
    bool answered_ = false;             // --help or --version
    std::unique_ptr<Communicator> comm_;
    std::optional<StartAlarm> alarm_;
};

Program::Program(int argc, char** argv) : typed_(argv + 1, argv + argc) {
    app_.formatter(std::make_shared<HelpFormatter>());  // of the subcommands, too
    app_.footer(
        "Examples:\n"
        "  gyre train --data mnist --epochs 3\n"
        "  gyre launch -n 4 -- train --data mnist\n"
        "  mpirun -np 4 gyre train --data mnist --save run");
    app_.set_version_flag("--version", about_text);
    app_.require_subcommand(1);
    for (const Command& command : commands_) {
        CLI::App* const added = app_.add_subcommand(command.name, command.about);
        added->footer(command.examples);
        add_flags(*added, command.flags);
    }
}

// Errors are kept and reported after the ranks have met, if the environment tells where and
// they come soon.
void Program::parse() {
    try {
        std::vector<std::string> arguments = with_config(app_, translate_arguments(app_, typed_));
        std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
        app_.parse(std::move(arguments));
    } catch (...) {
        refusal_ = std::current_exception();
    }
    for (const Command& command : commands_) {
        command_ = app_.got_subcommand(command.name) ? &command : command_;
    }
}

// The flags say where.
void Program::meet() {
    LaunchSpec launch;
    if (!refusal_ && command_ != nullptr && command_->launch != nullptr) {
        launch = *command_->launch;
    }
    alarm_.emplace(launch.init_timeout, with_flag_names);
    if (refusal_) {
        launch.init_timeout = 5.0;
    }
    try {
        comm_ = make_communicator(launch, *alarm_);
    } catch (const Error&) {
        if (!refusal_) {
            throw;
        }
        comm_ = make_single_communicator();
    }
}

// The settings that all ranks must share.
std::vector<ManifestEntry> Program::manifest() const {
    std::vector<ManifestEntry> entries = {
        {"the version of gyre", version_text()},
        {"the subcommand", command_ == nullptr ? "none" : command_->name},
        {"--help or --version", answered_ ? "given" : "not given"}};
    if (command_ != nullptr) {
        const auto flags = manifest_of(command_->flags);
        entries.insert(entries.end(), flags.begin(), flags.end());
    }
    return entries;
}

// --help, --version, or what is wrong with the flags. Together, so that no rank ends, and is seen
// to end by the launcher, before rank 0 has said why.
void Program::answer() {
    agree(*comm_, [&] {
        try {
            if (refusal_) {
                std::rethrow_exception(refusal_);
            }
        } catch (const CLI::Success& request) {
            answered_ = true;
            if (comm_->is_root()) {
                app_.exit(request);
            }
        } catch (const CLI::ExtrasError&) {
            throw usage_error(
                fmt::format("'{}' belongs to no flag; values follow flags, as in --epochs 10 ({})",
                            fmt::join(app_.get_subcommands().at(0)->remaining(), " "),
                            help_hint(app_, typed_)));
        } catch (const CLI::ParseError& error) {
            throw usage_error(fmt::format("{} ({})", error.what(), help_hint(app_, typed_)));
        }
    });
}

// Splits `gyre launch FLAGS -- COMMAND`; what is behind the dashes is for the ranks.
std::vector<std::string> Program::split_launch() {
    const auto end = std::find(typed_.begin(), typed_.end(), "--");
    std::vector<std::string> command(end == typed_.end() ? end : end + 1, typed_.end());
    typed_.erase(end, typed_.end());
    return command;
}

int Program::run() {
    const bool launches = !typed_.empty() && typed_.front() == "launch";
    const std::vector<std::string> command = launches ? split_launch() : std::vector<std::string>{};
    parse();
    if (launches) {  // this process is not a rank
        comm_ = make_single_communicator();
        answer();
        return answered_ ? 0 : run_launch(options_.launch, command);
    }
    meet();
    answer();
    // Before anything that depends on them: ranks that do different things do not meet.
    require_same_manifest(*comm_, manifest());
    const LaunchSpec* const launch = answered_ ? nullptr : command_->launch;
    if (launch == nullptr) {  // what has its own bounds, or none, from here on
        alarm_->stop();
        const bool runs = !answered_ && (command_->collective || comm_->is_root());
        return static_cast<int>(runs ? command_->run(*comm_) : ExitCode::success);
    }
    comm_ = make_watched_communicator(
        std::move(comm_),
        {launch->timeout, std::min(5.0, launch->timeout / 2), launch->flight_record,
         launch->init_timeout + launch->timeout, with_flag_names});
    alarm_->stop();
    return static_cast<int>(command_->run(*comm_));
}

int Program::fail(const Error& error, bool on_all_ranks) {
    const bool starting = error.code() == ExitCode::communication && alarm_ && !on_all_ranks;
    const std::string message =
        with_flag_names(starting ? alarm_->explain(error.what()) : error.what());
    const bool several = comm_ != nullptr && comm_->size() > 1;
    if (!on_all_ranks || comm_ == nullptr || comm_->is_root() || comm_->own_terminal()) {
        fmt::print(stderr, "gyre: {}{}\n",
                   several && !on_all_ranks ? fmt::format("rank {}: ", comm_->rank()) : "",
                   printable(message, true));
    }
    const int code = static_cast<int>(error.code());
    if (several && !on_all_ranks) {
        comm_->abort(code);  // or the others would wait for this rank for ever
    }
    return code;
}

}  // namespace

int run_program(int argc, char** argv) {
    install_save_request_handler();
    Program program(argc, argv);
    try {
        return program.run();
    } catch (const AgreedError& error) {
        return program.fail(error, true);
    } catch (const Error& error) {
        return program.fail(error, false);
    } catch (const std::exception& error) {
        return program.fail(internal_error(error), false);
    }
}

}  // namespace gyre::train
