#include "train/cli/save_flags.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "train/cli/flag_values.hpp"

namespace gyre::train {
namespace {

SaveEvery parse_save_every(const std::string& text) {
    SaveEvery every{.given = true};
    const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    const std::string unit = text.substr(digits);
    every.steps = unit == "steps" || unit == "step";
    if (!CLI::detail::lexical_cast(text.substr(0, digits), every.count) || every.count < 1 ||
        !(every.steps || unit.empty() || unit == "epochs" || unit == "epoch")) {
        throw CLI::ValidationError(
            "--save-every",
            fmt::format("'{}' must be a number of epochs, as 2, or of steps, as 500steps", text));
    }
    return every;
}

}  // namespace

void add_save_flags(CLI::App& app, TrainOptions& o) {
    path(app.add_option("--save", o.save,
                        "Write checkpoints to this folder: last.safetensors, at the end of epochs, "
                        "at Ctrl-C, SIGTERM and SIGUSR1, and best.safetensors, by test accuracy"),
         "DIR");
    app.add_option_function<std::string>(
           "--save-every", [&o](const std::string& text) { o.save_every = parse_save_every(text); },
           "Epochs between two checkpoints, or steps, as in 500steps")
        ->type_name("N[steps]")
        ->default_str("1");
    app.add_option("--keep", o.keep, "Keep so many checkpoints beside, as step-N.safetensors")
        ->capture_default_str()
        ->check(at_least(0));
    path(app.add_option("--resume", o.resume,
                        "Go on with the training that was saved here, to the last bit: the folder "
                        "of --save, or a file in it"),
         "DIR|FILE");
    app.add_flag("--overwrite", o.overwrite, "--save may write over another training's files");
}

}  // namespace gyre::train
