#include "model/spec.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>

#include "base/error.hpp"
#include "model/layers.hpp"
#include "model/whole_file.hpp"

namespace gyre::model {
namespace {

struct Builtin {
    const char* name;
    const char* text;
};

constexpr Builtin kBuiltins[] = {
    {"net",
     "conv 10 k5\n"
     "maxpool 2\n"
     "relu\n"
     "conv 20 k5\n"
     "dropout2d 0.5\n"
     "maxpool 2\n"
     "relu\n"
     "linear 50\n"
     "relu\n"
     "dropout 0.5\n"
     "linear classes\n"
     "log-softmax\n"},
    {"wide",
     "conv 64 k3 p1\n"
     "relu\n"
     "conv 128 k3 p1\n"
     "relu\n"
     "maxpool 2\n"
     "linear 1024\n"
     "relu\n"
     "dropout 0.5\n"
     "linear classes\n"},
    // ResNet-9, half as wide; He et al., CVPR 2016, in the form of DAWNBench's entries.
    {"resnet",
     "conv 32 k3 p1\n"
     "batchnorm\n"
     "relu\n"
     "conv 64 k3 p1\n"
     "batchnorm\n"
     "relu\n"
     "maxpool 2\n"
     "as a\n"
     "conv 64 k3 p1\n"
     "batchnorm\n"
     "relu\n"
     "conv 64 k3 p1\n"
     "batchnorm\n"
     "relu\n"
     "add a\n"
     "conv 128 k3 p1\n"
     "batchnorm\n"
     "relu\n"
     "maxpool 2\n"
     "as b\n"
     "conv 128 k3 p1\n"
     "batchnorm\n"
     "relu\n"
     "conv 128 k3 p1\n"
     "batchnorm\n"
     "relu\n"
     "add b\n"
     "avgpool global\n"
     "linear classes\n"},
    // K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024.
    {"airbench",
     "conv 24 k2\n"
     "gelu\n"
     "conv 64 k3 p1 nobias\n"
     "maxpool 2\n"
     "batchnorm eps 1e-12 momentum 0.4\n"
     "gelu\n"
     "conv 64 k3 p1 nobias\n"
     "batchnorm eps 1e-12 momentum 0.4\n"
     "gelu\n"
     "conv 256 k3 p1 nobias\n"
     "maxpool 2\n"
     "batchnorm eps 1e-12 momentum 0.4\n"
     "gelu\n"
     "conv 256 k3 p1 nobias\n"
     "batchnorm eps 1e-12 momentum 0.4\n"
     "gelu\n"
     "conv 256 k3 p1 nobias\n"
     "maxpool 2\n"
     "batchnorm eps 1e-12 momentum 0.4\n"
     "gelu\n"
     "conv 256 k3 p1 nobias\n"
     "batchnorm eps 1e-12 momentum 0.4\n"
     "gelu\n"
     "maxpool 3\n"
     "linear classes\n"},
};

const LayerType& type_of(const std::string& word, const std::string& where) {
    std::vector<std::string> usages;
    for (const LayerType& type : layer_types()) {
        if (word == type.word) {
            return type;
        }
        usages.emplace_back(type.usage);
    }
    throw input_error(fmt::format("{}: there is no layer '{}'; the layers are: {}", where, word,
                                  fmt::join(usages, " · ")));
}

LayerSpec parse_layer(const std::string& line, const std::string& where) {
    LayerSpec layer;
    layer.type = &type_of(line.substr(0, line.find_first_of(" \t\r")), where);
    Words words(line, where, layer.type->usage);
    layer.type->parse(words, layer);
    return layer;
}

}  // namespace

ModelSpec parse_model(std::string_view text, const std::string& name) {
    ModelSpec model{name, std::string(text), {}};
    std::istringstream lines(model.source);
    std::string line;
    for (int number_of_line = 1; std::getline(lines, line); ++number_of_line) {
        line = line.substr(0, line.find('#'));
        const auto first = line.find_first_not_of(" \t\r");
        if (first == std::string::npos) {
            continue;
        }
        line = line.substr(first, line.find_last_not_of(" \t\r") + 1 - first);
        const std::string where = fmt::format("model {}, line {}", name, number_of_line);
        if (!model.layers.empty() && model.layers.back().type->last) {
            throw input_error(fmt::format("{}: nothing may follow {}, which belongs to the loss",
                                          where, model.layers.back().type->word));
        }
        LayerSpec layer = parse_layer(line, where);
        layer.text = line;
        layer.line = number_of_line;
        model.layers.push_back(std::move(layer));
    }
    if (model.layers.empty()) {
        throw input_error(fmt::format("model {}: it has no layers", name));
    }
    return model;
}

ModelSpec load_model(const std::string& name_or_path) {
    for (const Builtin& builtin : kBuiltins) {
        if (name_or_path == builtin.name) {
            return parse_model(builtin.text, builtin.name);
        }
    }
    std::string why;
    const auto text = read_text(name_or_path, why);
    if (!text) {
        throw input_error(fmt::format(
            "model '{}' is neither built in ({}) nor a file that can be read: {}; give `model` one "
            "of these names or the path of a model file",
            name_or_path, fmt::join(builtin_models(), ", "), why));
    }
    return parse_model(*text, name_or_path);
}

std::vector<std::string> builtin_models() {
    std::vector<std::string> names;
    for (const Builtin& builtin : kBuiltins) {
        names.emplace_back(builtin.name);
    }
    return names;
}

}  // namespace gyre::model
