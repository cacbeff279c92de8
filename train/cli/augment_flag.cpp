#include "train/cli/augment_flag.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <set>
#include <sstream>
#include <vector>

#include "train/cli/nearest.hpp"

namespace gyre::train {
namespace {

struct Transform {
    const char* name;
    int AugmentSpec::*amount;
    int most;
    const char* unit;
};
constexpr Transform kTransforms[] = {{"rotate", &AugmentSpec::rotate, 180, "degrees"},
                                     {"shift", &AugmentSpec::shift, 1 << 14, "pixels"},
                                     {"crop", &AugmentSpec::crop, 1 << 14, "pixels"},
                                     {"cutout", &AugmentSpec::cutout, 1 << 14, "pixels"}};

[[noreturn]] void fail(const std::string& what) {
    throw CLI::ValidationError("--augment", what);
}

void parse_one(const std::string& item, AugmentSpec& spec) {
    const std::size_t digits = item.find_first_of("0123456789");
    const std::string name = item.substr(0, digits);
    const std::string number = digits == item.npos ? "" : item.substr(digits);
    if (name == "hflip") {
        if (!number.empty()) {
            fail(fmt::format("'{}': hflip takes no number", item));
        }
        spec.hflip = true;
        return;
    }
    const auto found = std::find_if(std::begin(kTransforms), std::end(kTransforms),
                                    [&](const Transform& t) { return name == t.name; });
    if (found == std::end(kTransforms)) {
        const std::vector<std::string> words = {"rotate", "shift", "crop", "hflip", "cutout"};
        fail(fmt::format("'{}' must be one of shiftN, cropN, rotateN, cutoutN, hflip{}", item,
                         did_you_mean(name, words)));
    }
    int amount = 0;
    if (number.empty() || !CLI::detail::lexical_cast(number, amount) || amount < 1 ||
        amount > found->most) {
        fail(fmt::format("'{}': {} needs a number of {} from 1 to {}, such as {}4", item, name,
                         found->unit, found->most, name));
    }
    spec.*found->amount = amount;
}

}  // namespace

AugmentSpec parse_augment(const std::string& text) {
    AugmentSpec spec;
    if (text == "none") {
        return spec;
    }
    std::set<std::string> seen;
    std::istringstream in(text + ",");
    for (std::string item; std::getline(in, item, ',');) {
        parse_one(item, spec);
        if (!seen.insert(item.substr(0, item.find_first_of("0123456789"))).second) {
            fail(fmt::format("'{}' stands there twice", item));
        }
    }
    return spec;
}

}  // namespace gyre::train
