#include "train/cli/stored.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.hpp"
#include "base/printable.hpp"
#include "data/resize.hpp"
#include "train/checkpoint.hpp"
#include "train/run_spec.hpp"

namespace gyre::train {
namespace {

// Parses numbers separated by commas; empty for anything else.
std::vector<float> list(const std::string& text) {
    std::vector<float> values;
    std::istringstream in(text);
    for (std::string item; std::getline(in, item, ',');) {
        float value = 0.0f;
        const char* end = item.data() + item.size();
        const auto result = std::from_chars(item.data(), end, value);
        if (result.ec != std::errc{} || result.ptr != end) {
            return {};
        }
        values.push_back(value);
    }
    return values;
}

}  // namespace

std::string Stored::text(const std::string& key) const {
    const auto entry = weights_.metadata.find(key);
    return entry == weights_.metadata.end() ? std::string{} : entry->second;
}

std::optional<Normalisation> Stored::normalisation(const std::string& prefix) const {
    Normalisation result{list(text(prefix + "mean")), list(text(prefix + "std"))};
    const auto finite = [](float value) { return std::isfinite(value); };
    if (result.mean.empty() || result.mean.size() != result.stddev.size() ||
        !std::all_of(result.mean.begin(), result.mean.end(), finite) ||
        !std::all_of(result.stddev.begin(), result.stddev.end(),
                     [&](float value) { return finite(value) && value > 0.0f; })) {
        return std::nullopt;
    }
    return result;
}

std::optional<int> Stored::classes() const {
    const std::string value = text("gyre.classes");
    if (value.empty()) {
        return std::nullopt;
    }
    constexpr int kMostUnseen = 65536;  // one wrong digit must not make a layer of gigabytes
    int classes = 0;
    const char* end = value.data() + value.size();
    const auto result = std::from_chars(value.data(), end, classes);
    if (result.ec != std::errc{} || result.ptr != end || classes < 2 ||
        (classes > kMostUnseen &&
         std::none_of(weights_.tensors.begin(), weights_.tensors.end(), [&](const HostTensor& t) {
             return !t.shape.empty() && t.shape[0] == classes;
         }))) {
        refuse("gyre.classes", "the number of classes that its last layer has; give --classes");
    }
    return classes;
}

std::optional<Shape> Stored::shape() const {
    Shape shape;
    char end = 0;
    return std::sscanf(text("gyre.shape").c_str(), "%dx%dx%d%c", &shape.channels, &shape.height,
                       &shape.width, &end) == 3
               ? std::optional(shape)
               : std::nullopt;
}

std::optional<Resize> Stored::resize() const {
    const std::string value = text("gyre.resize");
    if (value.empty()) {
        return std::nullopt;
    }
    Resize to;
    const auto size = shape();
    if (!read_resize(value, to).empty() ||
        (size && (to.height != size->height || to.width != size->width))) {
        refuse("gyre.resize", "what --resize takes, for the size in gyre.shape; give --resize");
    }
    return to;
}

int Stored::shards() const {
    try {
        return virtual_ranks(parse_identity(text(kSettingsKey)));
    } catch (const std::exception&) {  // a file of weights alone, or of another version
        return 0;
    }
}

std::vector<std::string> Stored::class_names() const {
    const auto names = nlohmann::json::parse(text("gyre.class_names"), nullptr, false);
    std::vector<std::string> result;
    for (const auto& name : names.is_array() ? names : nlohmann::json::array()) {
        if (!name.is_string()) {
            return {};
        }
        result.push_back(name);
    }
    return result;
}

Stored::Trained Stored::trained() const {
    const auto image = shape();
    const auto count = classes();
    const auto pixels = normalisation("gyre.");
    const std::string model = text("gyre.model");
    if (!image || !count || !pixels || model.empty()) {
        throw input_error(
            fmt::format("{}: its metadata do not say what images the net was trained on; take "
                        "weights that gyre train --save has written",
                        path_));
    }
    return {model, *image, *count, *pixels, resize().value_or(Resize{image->height, image->width})};
}

void Stored::refuse(const std::string& key, const std::string& expected) const {
    throw input_error(fmt::format("{}: its metadata say {} '{}'; expected {}", path_, key,
                                  printable(text(key).substr(0, 60)), expected));
}

}  // namespace gyre::train
