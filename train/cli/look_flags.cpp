// The flags of the subcommands that show something: gyre info, gyre plot.
#include "train/cli/flag_values.hpp"
#include "train/cli/flags.hpp"

namespace gyre::train {

void add_info_flags(CLI::App& app, InfoOptions& o) {
    auto* model = path(app.add_option("--model", o.model,
                                      "Show this net layer by layer: a built-in one (net, wide, "
                                      "resnet) or a model file"),
                       "NAME|FILE");
    add_image(app, o.image);
    app.add_option("--classes", o.classes, "Number of classes")
        ->capture_default_str()
        ->check(at_least(2));
    path(app.add_option("--weights", o.weights, "Show what is in this safetensors file"))
        ->excludes(model);
}

void add_plot_flags(CLI::App& app, PlotOptions& o) {
    path(app.add_option("run", o.runs, "Files of gyre train --metrics")->required());
    path(app.add_option("-o,--output", o.output, "The picture, by the file's ending")
             ->required()
             ->check(CLI::Validator(
                 [](const std::string& file) {
                     return file.ends_with(".svg") || file.ends_with(".png")
                                ? std::string{}
                                : fmt::format("'{}' must end in .svg or .png", file);
                 },
                 "")),
         "FILE.svg|FILE.png");
    app.footer("Example:\n  gyre plot a.jsonl b.csv -o loss.svg");
}

}  // namespace gyre::train
