// gyre export: saved weights, with their net, in another format.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "kernels/choose_cpu_kernels.hpp"
#include "kernels/make_backend.hpp"
#include "model/net.hpp"
#include "model/onnx.hpp"
#include "model/whole_file.hpp"
#include "train/checkpoint.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/stored.hpp"

namespace gyre::train {
namespace {

// The file that links lead to, so that they stay and it is written. What is not a file stays the
// path, as /dev/stdout does.
std::filesystem::path without_links(std::filesystem::path path) {
    constexpr int kMostLinks = 40;  // Linux follows as many
    std::error_code error;
    if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error)) {
        return path;
    }
    for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(path, error); ++i) {
        path = path.parent_path() / std::filesystem::read_symlink(path, error);
    }
    return path;
}

}  // namespace

ExitCode run_export(const ExportOptions& options) {
    const TensorFile weights = read_weights(options.weights);
    const Stored::Trained trained = Stored(weights, options.weights).trained();
    const ModelSpec model = parse_model(trained.model, options.weights);
    const auto backend = make_cpu_backend(1);
    Net net(*backend, model, trained.shape, trained.classes,
            {.train_batch = 0, .eval_batch = 1, .spec = {.dropout = false}});
    net.import_parameters(weights.tensors, options.weights);
    const Graph graph = build_graph(model, trained.shape, trained.classes, false);
    std::map<std::string, std::string> metadata;
    for (const char* key : {"gyre.version", "gyre.model", "gyre.mean", "gyre.std", "gyre.resize",
                            "gyre.class_names"}) {
        if (const auto found = weights.metadata.find(key); found != weights.metadata.end()) {
            metadata.insert(*found);
        }
    }
    const std::string file = onnx_model(graph, trained.shape, net.export_parameters(), metadata);
    write_whole_file({without_links(options.onnx)}, {file}, "the ONNX model");
    fmt::print(
        "{}: {} nodes, {} parameters; input [N, {}, {}, {}], pixels of 0 to 1 less mean {}, "
        "divided "
        "by {}; logits [N, {}]\n",
        options.onnx, graph.nodes.size(), net.parameter_count(), trained.shape.channels,
        trained.shape.height, trained.shape.width, fmt::join(trained.normalisation.mean, " "),
        fmt::join(trained.normalisation.stddev, " "), trained.classes);
    return ExitCode::success;
}

}  // namespace gyre::train
