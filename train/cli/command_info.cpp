// gyre info: what this build and this machine have.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <variant>

#include "base/printable.hpp"
#include "comm/bucket_plan.hpp"
#include "data/dataset_files.hpp"
#include "kernels/choose_cpu_kernels.hpp"
#include "model/graph.hpp"
#include "model/net.hpp"
#include "model/spec.hpp"
#include "train/checkpoint.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/setup.hpp"
#include "train/cli/version.hpp"

namespace gyre::train {

namespace {

// Convolutions and linear layers: multiply-adds x 2 of the forward pass; what others do is little.
std::int64_t flop_per_image(const OpSpec& spec) {
    return std::visit(
        [](const auto& each) -> std::int64_t {
            if constexpr (requires { each.shape.flop_per_image(); }) {
                return each.shape.flop_per_image();
            } else {
                return 0;
            }
        },
        spec);
}

void print_model(const InfoOptions& options) {
    const model::Graph graph =
        model::build_graph(model::load_model(options.model), options.image, options.classes, true);
    std::vector<std::int64_t> begins;  // as a net places them
    std::int64_t elems = 0;
    for (const model::Node& node : graph.nodes) {
        if (!node.parameters.empty()) {
            begins.push_back(elems);
        }
        for (const model::Parameter& parameter : node.parameters) {
            elems += model::Net::padded(parameter.elems);
        }
    }
    const std::int64_t with_stats = elems + model::Net::kStatsElems;
    const std::vector<Bucket> buckets =
        plan_buckets(begins, with_stats, auto_bucket_bytes(with_stats, false));
    fmt::print("{:<12} {:>16} {:>12} {:>14} {:>12}  {}\n", "layer", "output", "parameters", "FLOPs",
               "bytes", "bucket");
    std::int64_t parameters = 0, flop = 0, bytes = 0;
    std::size_t layer = 0;
    for (const model::Node& node : graph.nodes) {
        std::int64_t own = 0;
        for (const model::Parameter& parameter : node.parameters) {
            own += parameter.fixed ? 0 : parameter.elems;
        }
        std::string bucket;
        if (!node.parameters.empty()) {
            const std::int64_t begin = begins[layer++];
            for (std::size_t b = 0; b < buckets.size(); ++b) {
                if (buckets[b].begin <= begin && begin < buckets[b].end) {
                    bucket = fmt::format("{}", b);
                }
            }
        }
        const std::int64_t out_bytes = node.out.elems() * std::int64_t{sizeof(float)};
        fmt::print("{:<12} {:>16} {:>12} {:>14} {:>12}  {}\n", node.name, model::text_of(node.out),
                   own, flop_per_image(node.spec), out_bytes, bucket);
        parameters += own;
        flop += flop_per_image(node.spec);
        bytes += out_bytes;
    }
    fmt::print("{:<12} {:>16} {:>12} {:>14} {:>12}\n\n", "all", "", parameters, flop, bytes);
    fmt::print(
        "FLOPs: of one image's forward pass, 2 x weights x positions of each convolution and "
        "linear\n"
        "layer; a backward pass has twice as many. bytes: of one image's output in fp32. bucket:\n"
        "where the layer's first gradient travels between CPU ranks, with --bucket-kib auto.\n");
}

void print_line(const std::string& key, std::string text) {
    constexpr std::size_t kMostText = 60;
    std::replace(text.begin(), text.end(), '\n', ';');
    fmt::print("{:<18} {}{}\n", printable(key), printable(text.substr(0, kMostText)),
               text.size() > kMostText ? "..." : "");
}

void print_identity(const Identity& identity) {
    for (const auto& [name, value] : identity.settings) {
        print_line("--" + name, value);
    }
    for (const auto& [key, fact] : identity.facts) {
        print_line(kFacts.contains(key) ? kFacts.at(key) : key, fact);
    }
}

void print_weights(const std::string& path) {
    const model::TensorFile file = read_undamaged(path);
    for (const auto& [key, value] : file.metadata) {
        const auto json = nlohmann::json::parse(value, nullptr, false);
        if (!json.is_object()) {
            print_line(key, value);
            continue;
        }
        if (key == kSettingsKey) {
            try {
                print_identity(parse_identity(value));
                continue;
            } catch (const std::exception&) {  // of another program, or a later version
            }
        }
        for (const auto& [name, part] : json.items()) {  // of a checkpoint's cursor
            print_line(fmt::format("{}.{}", key, name),
                       part.is_string() ? part.get<std::string>() : part.dump());
        }
    }
    std::size_t elems = 0;
    for (const model::HostTensor& tensor : file.tensors) {
        fmt::print("{:<18} {:<4} [{}]\n", printable(tensor.name), tensor.dtype,
                   fmt::join(tensor.shape, ", "));
        elems += tensor.values.size();
    }
    fmt::print("{:<18} {} in {} tensors\n", "values", elems, file.tensors.size());
}

// The manual page, the completions and docs/cli.md are made from this (scripts/reference.py).
void print_commands() {
    Options options;  // with the defaults
    nlohmann::ordered_json all;
    for (const Command& command : commands(options)) {
        nlohmann::ordered_json rows = nlohmann::ordered_json::array();
        for (const Setting& row : command.flags) {
            rows.push_back({{"name", row.name},
                            {"letter", row.letter},
                            {"type", row.type},
                            {"default", row.type.empty() ? "" : row.value()},
                            {"help", with_flag_names(row.help)},
                            {"heading", row.heading},
                            {"required", row.required},
                            {"positional", row.positional},
                            {"excludes", row.excludes},
                            {"all_ranks", row.compared()},
                            {"stands_for", row.short_for},
                            {"may_change_on_resume", !row.must_match_on_resume()}});
        }
        all.push_back({{"name", command.name},
                       {"about", command.about},
                       {"examples", command.examples},
                       {"options", std::move(rows)}});
    }
    fmt::print("{}\n", all.dump(1));
}

}  // namespace

ExitCode run_info(const InfoOptions& options) {
    if (!options.model.empty()) {
        print_model(options);
        return ExitCode::success;
    }
    if (!options.checkpoint.empty()) {
        read_checkpoint(options.checkpoint);
        print_weights(options.checkpoint);
        return ExitCode::success;
    }
    if (!options.weights.empty()) {
        print_weights(options.weights);
        return ExitCode::success;
    }
    if (options.commands) {
        print_commands();
        return ExitCode::success;
    }
    fmt::print("{}\n", about_text());
    for (const std::string& name : builtin_models()) {
        fmt::print("{:<18} {}\n", "built-in net", name);
    }
    for (const FoundDataset& found : find_datasets()) {
        fmt::print("{:<18} {} in {}\n", "data set", found.name, found.directory.string());
    }
    std::string places;
    for (const auto& place : dataset_search_path()) {
        places.append(places.empty() ? "" : ":").append(place.string());
    }
    fmt::print("{:<18} {}\n", "data search path", places);
    fmt::print(
        "{:<18} of results depend on the vectors in use (here {}), the kind of device and its "
        "libraries, --kernels, --precision and --virtual-ranks, without which on the number of "
        "ranks; not on the number of threads\n",
        "the last bits", chosen_cpu_kernels().title);
    return ExitCode::success;
}

}  // namespace gyre::train
