#include "train/augment.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
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
    double most;
    const char* unit;
    int parts = 1;  // of the unit, in which the amount is stored
};
constexpr int kMostPixels = 1 << 14;
constexpr Transform kTransforms[] = {
    {"randomresizedcrop", &AugmentSpec::resized_crop, 100,
     "a number of percent (the least part of the area, 8 in torchvision; `resize` sets the size)"},
    {"rotate", &AugmentSpec::rotate, 180, "a number of degrees"},
    {"shift", &AugmentSpec::shift, kMostPixels, "a number of pixels"},
    {"crop", &AugmentSpec::crop, kMostPixels, "a number of pixels"},
    {"cutout", &AugmentSpec::cutout, kMostPixels, "a number of pixels"},
    {"randomerasing", &AugmentSpec::erasing, 100, "a number of percent (the probability)"},
    {"mixup", &AugmentSpec::mixup, 1, "an alpha, of up to three decimals,", 1000},
    {"cutmix", &AugmentSpec::cutmix, 1, "an alpha, of up to three decimals,", 1000}};

constexpr std::pair<const char*, Flip> kFlips[] = {{"hflip", Flip::random},
                                                   {"altflip", Flip::alternating}};

std::string read_one(const std::string& item, AugmentSpec& spec) {
    const std::size_t digits = item.find_first_of("0123456789");
    const std::string name = item.substr(0, digits);
    const std::string number = digits == item.npos ? "" : item.substr(digits);
    for (const auto& [flip_name, flip] : kFlips) {
        if (name != flip_name) {
            continue;
        }
        if (!number.empty()) {
            return fmt::format("'{}': {} takes no number", item, name);
        }
        if (spec.flip != Flip::never && spec.flip != flip) {
            return fmt::format("'{}': hflip and altflip exclude each other; give one of them",
                               item);
        }
        spec.flip = flip;
        return {};
    }
    const auto found = std::find_if(std::begin(kTransforms), std::end(kTransforms),
                                    [&](const Transform& t) { return name == t.name; });
    if (found == std::end(kTransforms)) {
        std::vector<std::string> words, list;
        for (const auto& [flip_name, flip] : kFlips) {
            words.emplace_back(flip_name);
            list.emplace_back(flip_name);
        }
        for (const Transform& transform : kTransforms) {
            words.emplace_back(transform.name);
            list.push_back(words.back() + "N");
        }
        return fmt::format("'{}' must be one of {}{}", item, fmt::join(list, ", "),
                           did_you_mean(name, words));
    }
    double amount = 0.0;
    if (!read_number(number, amount, {1.0 / found->parts, found->most}).empty() ||
        std::abs(std::round(amount * found->parts) - amount * found->parts) > 1e-9) {
        return fmt::format("'{}': {} needs {} from {:g} to {:g}, such as {}{}", item, name,
                           found->unit, 1.0 / found->parts, found->most, name,
                           found->parts == 1 ? "4" : "0.2");
    }
    spec.*found->amount = static_cast<int>(std::lround(amount * found->parts));
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
    std::string text;
    for (const auto& [name, flip] : kFlips) {
        text += spec.flip == flip ? name : "";
    }
    for (const Transform& transform : kTransforms) {
        if (const int amount = spec.*transform.amount; amount > 0) {
            text += fmt::format("{}{}{:g}", text.empty() ? "" : ",", transform.name,
                                static_cast<double>(amount) / transform.parts);
        }
    }
    return text.empty() ? "none" : text;
}

void check(const AugmentSpec& spec, const Shape& shape) {
    if ((spec.resized_crop > 0 || spec.erasing > 0 || spec.cutmix > 0) &&
        std::max(shape.height, shape.width) > kMostPixels) {  // the draws are in 64 bits
        throw usage_error(fmt::format(
            "`augment`: randomresizedcrop, randomerasing and cutmix take images of up to {} pixels "
            "on each side, these have {}x{} (height x width)",
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
