#include "train/cli/program.hpp"

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
#include "train/cli/recipe.hpp"
#include "train/cli/setup.hpp"

namespace gyre::train {
namespace {

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

// The command line of the process, its ranks and what it does.
class Program {
 public:
    Program(int argc, char** argv);
    // The exit code; throws Error.
    int run();
    // Says what went wrong, ends the other ranks where they do not know of it, and returns the exit
    // code.
    int fail(const Error& error, bool on_all_ranks);

 private:
    void parse();
    void meet();
    void answer();
    std::vector<std::string> split_launch();

    std::vector<std::string> typed_;
    CLI::App app_{
        "gyre: a data-parallel trainer for convolutional nets. For several ranks, run it\n"
        "with gyre launch, mpirun, torchrun or srun, or give --init-method, --rank and\n"
        "--world-size.",
        "gyre"};
    TrainOptions train_options_;
    EvalOptions eval_options_;
    PlanOptions plan_options_;
    LaunchCommandOptions launch_options_;
    InfoOptions info_options_;
    PlotOptions plot_options_;
    PredictOptions predict_options_;
    ExportOptions export_options_;
    CLI::App *train_, *eval_, *plan_, *info_, *plot_, *predict_, *export_, *launch_;
    std::exception_ptr refusal_;  // of the flags
    bool answered_ = false;       // --help or --version
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
    app_.set_version_flag("--version", version_text());
    app_.require_subcommand(1);
    train_ = app_.add_subcommand("train", "Train a net");
    eval_ = app_.add_subcommand("eval", "Loss and accuracy of saved weights");
    plan_ = app_.add_subcommand("plan", "Predict a step on many ranks");
    info_ =
        app_.add_subcommand("info", "What this build and this machine have, or a net, or weights");
    predict_ = app_.add_subcommand("predict", "What saved weights take images for");
    add_predict_flags(*predict_, predict_options_);
    export_ = app_.add_subcommand("export", "Write saved weights, with their net, as ONNX");
    add_export_flags(*export_, export_options_);
    plot_ = app_.add_subcommand("plot", "Draw loss and accuracy of trainings");
    launch_ = app_.add_subcommand("launch", "Start ranks on this host, as torchrun does");
    add_launch_flags(*launch_, launch_options_);
    add_train_flags(*train_, train_options_);
    add_eval_flags(*eval_, eval_options_);
    add_plan_flags(*plan_, plan_options_);
    add_info_flags(*info_, info_options_);
    add_plot_flags(*plot_, plot_options_);
}

// What is wrong is kept: it is said after the ranks have met, if the environment tells where and
// they come soon.
void Program::parse() {
    try {
        std::vector<std::string> arguments = with_recipe(app_, translate_arguments(app_, typed_));
        std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
        app_.parse(std::move(arguments));
    } catch (...) {
        refusal_ = std::current_exception();
    }
}

// The flags say where.
void Program::meet() {
    const CommonOptions& common =
        train_->parsed() ? static_cast<const CommonOptions&>(train_options_) : eval_options_;
    LaunchOptions launch = refusal_ ? LaunchOptions{} : common.launch;
    launch.collective_timeout = common.timeout + 15.0;  // the watchdog's comes first
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

// Of `gyre launch FLAGS -- COMMAND`: what is behind the dashes is for the ranks.
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
    if (launches) {  // this process is no rank
        comm_ = make_single_communicator();
        answer();
        return answered_ ? 0 : run_launch(launch_options_, command);
    }
    meet();
    answer();
    // Before anything that depends on them: ranks that do different things do not meet.
    require_same_manifest(*comm_, command_manifest(app_, answered_));
    train_options_.flags = resumed_flags(*train_);
    // What has its own bounds, or none, from here on.
    if (answered_ || info_->parsed() || plot_->parsed() || predict_->parsed() ||
        export_->parsed() || plan_->parsed()) {
        alarm_->stop();
    }
    if (answered_) {
        return static_cast<int>(ExitCode::success);
    }
    if (info_->parsed()) {
        return static_cast<int>(comm_->is_root() ? run_info(info_options_) : ExitCode::success);
    }
    if (predict_->parsed()) {
        return static_cast<int>(comm_->is_root() ? run_predict(*comm_, predict_options_)
                                                 : ExitCode::success);
    }
    if (export_->parsed()) {
        return static_cast<int>(comm_->is_root() ? run_export(export_options_) : ExitCode::success);
    }
    if (plot_->parsed()) {
        return static_cast<int>(comm_->is_root() ? run_plot(plot_options_) : ExitCode::success);
    }
    if (plan_->parsed()) {
        return static_cast<int>(run_plan(*comm_, plan_options_));
    }
    const CommonOptions& common =
        train_->parsed() ? static_cast<const CommonOptions&>(train_options_) : eval_options_;
    comm_ = make_watched_communicator(
        std::move(comm_), {common.timeout, std::min(5.0, common.timeout / 2), common.flight_record,
                           common.launch.init_timeout + common.timeout, with_flag_names});
    alarm_->stop();
    return static_cast<int>(train_->parsed() ? run_train(*comm_, train_options_)
                                             : run_eval(*comm_, eval_options_));
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
    Program program(argc, argv);
    try {
        return program.run();
    } catch (const AgreedError& error) {
        return program.fail(error, true);
    } catch (const Error& error) {
        return program.fail(error, false);
    } catch (const std::exception& error) {
        return program.fail(Error(ExitCode::internal, error.what()), false);
    }
}

}  // namespace gyre::train
