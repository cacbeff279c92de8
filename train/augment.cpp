#include "train/augment.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "train/nearest.hpp"
#include "train/setting.hpp"

namespace gyre::train {
namespace {

struct Transform {
    const char* name;
    int AugmentSpec::*amount;
    int most;
    const char* unit;
};
constexpr Transform kTransforms[] = {
    {"randomresizedcrop", &AugmentSpec::resized_crop, 100,
     "percent (the least part of the area, 8 in torchvision; `resize` sets the size)"},
    {"rotate", &AugmentSpec::rotate, 180, "degrees"},
    {"shift", &AugmentSpec::shift, 1 << 14, "pixels"},
    {"crop", &AugmentSpec::crop, 1 << 14, "pixels"},
    {"cutout", &AugmentSpec::cutout, 1 << 14, "pixels"},
    {"randomerasing", &AugmentSpec::erasing, 100, "percent (the probability)"}};

std::string read_one(const std::string& item, AugmentSpec& spec) {
    const std::size_t digits = item.find_first_of("0123456789");
    const std::string name = item.substr(0, digits);
    const std::string number = digits == item.npos ? "" : item.substr(digits);
    if (name == "hflip") {
        if (!number.empty()) {
            return fmt::format("'{}': hflip takes no number", item);
        }
        spec.hflip = true;
        return {};
    }
    const auto found = std::find_if(std::begin(kTransforms), std::end(kTransforms),
                                    [&](const Transform& t) { return name == t.name; });
    if (found == std::end(kTransforms)) {
        std::vector<std::string> words = {"hflip"};
        std::string list = "hflip";
        for (const Transform& transform : kTransforms) {
            words.emplace_back(transform.name);
            list += fmt::format(", {}N", transform.name);
        }
        return fmt::format("'{}' must be one of {}{}", item, list, did_you_mean(name, words));
    }
    int amount = 0;
    if (!read_number(number, amount, {1, found->most}).empty()) {
        return fmt::format("'{}': {} needs a number of {} from 1 to {}, such as {}4", item, name,
                           found->unit, found->most, name);
    }
    spec.*found->amount = amount;
    return {};
}

}  // namespace

std::string read_augment(const std::string& text, AugmentSpec& spec) {
    AugmentSpec read;
    std::set<std::string> seen;
    std::istringstream in(text == "none" ? "" : text + ",");
    for (std::string item; std::getline(in, item, ',');) {
        if (std::string problem = read_one(item, read); !problem.empty()) {
            return problem;
        }
        if (!seen.insert(item.substr(0, item.find_first_of("0123456789"))).second) {
            return fmt::format("'{}' is there twice", item);
        }
    }
    spec = read;
    return {};
}

std::string augment_text(const AugmentSpec& spec) {
    std::string text = spec.hflip ? "hflip" : "";
    for (const Transform& transform : kTransforms) {
        if (const int amount = spec.*transform.amount; amount > 0) {
            text += fmt::format("{}{}{}", text.empty() ? "" : ",", transform.name, amount);
        }
    }
    return text.empty() ? "none" : text;
}

void check(const AugmentSpec& spec, const Shape& shape) {
    constexpr std::int64_t kMostPixels = 1 << 28;  // the draws are in 64 bits
    if ((spec.resized_crop > 0 || spec.erasing > 0) && shape.plane_elems() > kMostPixels) {
        throw usage_error(
            fmt::format("`augment`: randomresizedcrop and randomerasing take images "
                        "of up to {} pixels, these have {}x{} (height x width)",
                        kMostPixels, shape.height, shape.width));
    }
    const int side = std::min(shape.height, shape.width);
    for (const auto& [name, pixels] :
         {std::pair{"shift", spec.shift}, {"crop", spec.crop}, {"cutout", spec.cutout}}) {
        if (pixels >= side) {
            throw usage_error(
                fmt::format("`augment` {}{}: images have {}x{} pixels (height x width); give fewer "
                            "than {}",
                            name, pixels, shape.height, shape.width, side));
        }
    }
}

}  // namespace gyre::train
