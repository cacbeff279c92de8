#include "train/parameter_groups.hpp"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "base/error.hpp"
#include "train/setting.hpp"

namespace gyre::train {
namespace {

// A rule of a setting for the parameters whose names match a pattern.
struct Group {
    const char* setting;
    std::string pattern;
    float lr_scale;  // 0: frozen
    bool used = false;
};

// The rules of `lr-scale` and `freeze`; of several that match, the last counts.
std::vector<Group> groups_of(const OptimizerSpec& spec) {
    std::vector<Group> groups;
    std::istringstream scales(spec.lr_scale), frozen(spec.freeze);
    for (std::string text; std::getline(scales, text, ',');) {
        const std::size_t equals = std::min(text.rfind('='), text.size());
        const std::string number = text.substr(std::min(equals + 1, text.size()));
        float scale = 0.0f;
        if (!read_number(number, scale, {.least = 0.0f}).empty() || scale == 0.0f) {
            throw usage_error(fmt::format(
                "`lr-scale` {}: '{}' must be a pattern and a number above 0, such as conv*=0.1",
                spec.lr_scale, text));
        }
        groups.push_back({"lr-scale", text.substr(0, equals), scale});
    }
    for (std::string text; std::getline(frozen, text, ',');) {
        groups.push_back({"freeze", text, 0.0f});
    }
    return groups;
}

}  // namespace

std::vector<Trained> trained(const Net& net, const OptimizerSpec& spec) {
    std::vector<Group> groups = groups_of(spec);
    std::vector<Trained> ranges;
    std::string names;
    for (const Parameter& parameter : net.parameters()) {
        float scale = 1.0f;
        for (Group& group : groups) {
            if (fnmatch(group.pattern.c_str(), parameter.name.c_str(), 0) == 0) {
                scale = group.lr_scale;
                group.used = true;
            }
        }
        names += (names.empty() ? "" : ", ") + parameter.name;
        if (scale > 0.0f) {
            const std::int64_t begin = parameter.offset_elems;
            ranges.push_back({begin, begin + Net::padded(parameter.elems), scale});
        }
    }
    for (const Group& group : groups) {
        if (!group.used) {
            throw usage_error(fmt::format("`{}`: {} matches none of the parameters, which are {}",
                                          group.setting, group.pattern, names));
        }
    }
    if (ranges.empty()) {
        throw usage_error(fmt::format("`freeze` {}: no parameter is left to train", spec.freeze));
    }
    return ranges;
}

}  // namespace gyre::train
