// The flags of what shows something: gyre train --trace, gyre info, gyre predict, gyre plot;
// and of gyre export.
#include "train/cli/flag_values.hpp"
#include "train/cli/flags.hpp"

namespace gyre::train {

void add_trace_flags(CLI::App& app, TrainOptions& o) {
    path(app.add_option("--trace", o.trace,
                        "Write what each rank computes, sends and waits for in a few steps to this "
                        "JSON file, for ui.perfetto.dev"));
    app.add_option_function<std::string>(
           "--trace-steps",
           [&o](const std::string& text) {
               char end = 0;
               TraceSteps& s = o.trace_steps;
               const int read = std::sscanf(text.c_str(), "%ld-%ld%c", &s.first, &s.last, &end);
               s.last = read == 1 ? s.first : s.last;
               if (read < 1 || read > 2 || s.first < 1 || s.last < s.first ||
                   s.last - s.first >= 1000 || text.find_first_not_of("0123456789-") != text.npos) {
                   throw CLI::ValidationError(
                       "--trace-steps",
                       fmt::format("'{}' must be a step or at most 1000 of them, from 1, as 11-14",
                                   text));
               }
           },
           "Which steps, counted over all epochs")
        ->type_name("FIRST-LAST")
        ->default_str("11-14");
}

void add_info_flags(CLI::App& app, InfoOptions& o) {
    auto* model = path(app.add_option("--model", o.model,
                                      "Show this net layer by layer: a built-in one (net, wide, "
                                      "resnet) or a model file"),
                       "NAME|FILE");
    add_image(app, o.image);
    app.add_option("--classes", o.classes, "Number of classes")
        ->capture_default_str()
        ->check(at_least(2));
    path(app.add_option("--weights,--checkpoint", o.weights,
                        "Show what is in this safetensors file, also where a training is to go on"))
        ->excludes(model);
}

void add_predict_flags(CLI::App& app, PredictOptions& o) {
    path(app.add_option("--weights", o.weights, "Weights that gyre train --save has written")
             ->required());
    path(app.add_option("image", o.images, "PNG and JPEG files, and IDX files of images")
             ->required());
    app.add_option("--top", o.top, "Classes to name for each image, the likeliest first")
        ->capture_default_str()
        ->check(at_least(1));
    app.add_flag("--csv", o.csv, "Print rows of image, place, class, name and probability");
    add_device_flag(app, o.device, "Where to compute");
    add_precision_flag(app, o);
    add_threads_flag(app, o.threads);
    app.footer("Example:\n  gyre predict --weights run/best.safetensors cat.jpg dog.png");
}

void add_export_flags(CLI::App& app, ExportOptions& o) {
    path(app.add_option("--weights", o.weights, "Weights that gyre train --save has written")
             ->required());
    path(app.add_option("--onnx", o.onnx, "The ONNX model to write: the net as it evaluates")
             ->required());
    app.footer("Example:\n  gyre export --weights run/best.safetensors --onnx net.onnx");
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
