#include "model/spec.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>

#include "kernels/base/error.hpp"

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
};

struct Grammar {
    const char* word;
    LayerKind kind;
    const char* usage;
};

constexpr Grammar kGrammar[] = {
    {"conv", LayerKind::conv, "conv OUT kK [sS] [pP]"},
    {"maxpool", LayerKind::maxpool, "maxpool K [sS]"},
    {"relu", LayerKind::relu, "relu"},
    {"dropout", LayerKind::dropout, "dropout P"},
    {"dropout2d", LayerKind::dropout2d, "dropout2d P"},
    {"flatten", LayerKind::flatten, "flatten"},
    {"linear", LayerKind::linear, "linear OUT|classes"},
    {"log-softmax", LayerKind::log_softmax, "log-softmax"},
};

template <typename Number>
std::optional<Number> number(std::string_view text) {
    Number value{};
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    return result.ec == std::errc{} && result.ptr == text.data() + text.size()
               ? std::optional(value)
               : std::nullopt;
}

constexpr int kMostExtent = 1 << 24;  // keeps every product of extents inside 64 bits

// The words of one line, taken from the front.
class Words {
 public:
    Words(std::string_view line, std::string where, const char* usage)
        : in_(std::string(line)), where_(std::move(where)), usage_(usage) {
        in_ >> first_;
    }
    int integer(const char* what, int least, bool classes_allowed = false) {
        const std::string word = next(what);
        if (classes_allowed && word == "classes") {
            return 0;
        }
        return checked_integer(word, word, what, least);
    }
    float probability() {
        const std::string word = next("a probability");
        const auto value = number<float>(word);
        if (!value || !(*value >= 0.0f && *value <= 1.0f)) {
            fail(fmt::format("'{}' is no probability between 0 and 1", word));
        }
        return *value;
    }
    // The remaining words, each a letter and a number, such as k5.
    void options(std::string_view letters, LayerSpec& layer) {
        std::string word, seen;
        while (in_ >> word) {
            const char letter = word[0];
            if (letters.find(letter) == std::string_view::npos ||
                seen.find(letter) != std::string::npos) {
                fail(fmt::format("'{}' was not expected", word));
            }
            seen += letter;
            const int value =
                checked_integer(word.substr(1), word, "an option", letter == 'p' ? 0 : 1);
            (letter == 'k' ? layer.kernel : letter == 's' ? layer.stride : layer.padding) = value;
        }
        if (letters.find('k') != std::string_view::npos && seen.find('k') == std::string::npos) {
            fail("the window kK is missing");
        }
    }
    [[noreturn]] void fail(const std::string& what) const {
        throw input_error(fmt::format("{}: {}; expected: {}", where_, what, usage_));
    }

 private:
    std::string next(const char* what) {
        std::string word;
        if (!(in_ >> word)) {
            fail(fmt::format("{} is missing", what));
        }
        return word;
    }
    int checked_integer(const std::string& digits, const std::string& word, const char* what,
                        int least) const {
        const auto value = number<int>(digits);
        if (!value || *value < least || *value > kMostExtent) {
            fail(fmt::format("'{}' as {} must be a number from {} to {}", word, what, least,
                             kMostExtent));
        }
        return *value;
    }

    std::istringstream in_;
    std::string where_, first_;
    const char* usage_;
};

LayerSpec parse_layer(const std::string& line, const std::string& where) {
    std::istringstream in(line);
    std::string word;
    in >> word;
    const Grammar* grammar = nullptr;
    for (const Grammar& candidate : kGrammar) {
        if (word == candidate.word) {
            grammar = &candidate;
        }
    }
    if (grammar == nullptr) {
        std::vector<std::string> usages;
        for (const Grammar& candidate : kGrammar) {
            usages.emplace_back(candidate.usage);
        }
        throw input_error(fmt::format("{}: there is no layer '{}'; the layers are: {}", where, word,
                                      fmt::join(usages, " · ")));
    }
    LayerSpec layer;
    layer.kind = grammar->kind;
    Words words(line, where, grammar->usage);
    switch (layer.kind) {
        case LayerKind::conv:
            layer.out = words.integer("the number of output channels", 1);
            words.options("ksp", layer);
            break;
        case LayerKind::maxpool:
            layer.kernel = words.integer("the window", 1);
            layer.stride = layer.kernel;
            words.options("s", layer);
            break;
        case LayerKind::linear:
            layer.out = words.integer("the number of features", 1, true);
            words.options("", layer);
            break;
        case LayerKind::dropout:
        case LayerKind::dropout2d:
            layer.probability = words.probability();
            words.options("", layer);
            break;
        case LayerKind::relu:
        case LayerKind::flatten:
        case LayerKind::log_softmax:
            words.options("", layer);
            break;
    }
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
        if (!model.layers.empty() && model.layers.back().kind == LayerKind::log_softmax) {
            throw input_error(where +
                              ": nothing may follow log-softmax, which belongs to the loss");
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
    std::ifstream file(name_or_path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    if (!file) {
        throw input_error(fmt::format(
            "model '{}' is neither built in ({}) nor a file that can be read; give --model one of "
            "these names or the path of a model file",
            name_or_path, fmt::join(builtin_models(), ", ")));
    }
    return parse_model(text.str(), name_or_path);
}

std::vector<std::string> builtin_models() {
    std::vector<std::string> names;
    for (const Builtin& builtin : kBuiltins) {
        names.emplace_back(builtin.name);
    }
    return names;
}

}  // namespace gyre::model
