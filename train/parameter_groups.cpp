#include "train/parameter_groups.hpp"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "base/error.hpp"
#include "train/setting.hpp"

namespace gyre::train {

ParameterRules::ParameterRules(const char* setting, const std::string& text, float least)
    : setting_(setting) {
    std::istringstream rules(text);
    for (std::string rule; std::getline(rules, rule, ',');) {
        const std::size_t equals = std::min(rule.rfind('='), rule.size());
        const std::string number = rule.substr(std::min(equals + 1, rule.size()));
        float factor = 0.0f;
        if (!read_number(number, factor, {.least = least}).empty()) {
            throw usage_error(
                fmt::format("`{}` {}: '{}' must be a pattern and a number{}, such as conv*=0.1",
                            setting, text, rule, least > 0.0f ? " above 0" : ""));
        }
        rules_.push_back({rule.substr(0, equals), factor});
    }
}

ParameterRules::ParameterRules(const char* setting, const std::string& patterns)
    : setting_(setting) {
    std::istringstream all(patterns);
    for (std::string pattern; std::getline(all, pattern, ',');) {
        rules_.push_back({pattern, 0.0f});
    }
}

float ParameterRules::factor_of(const std::string& parameter) {
    names_ += (names_.empty() ? "" : ", ") + parameter;
    float factor = 1.0f;
    for (Rule& rule : rules_) {
        if (fnmatch(rule.pattern.c_str(), parameter.c_str(), 0) == 0) {
            factor = rule.factor;
            rule.used = true;
        }
    }
    return factor;
}

void ParameterRules::require_used() const {
    for (const Rule& rule : rules_) {
        if (!rule.used) {
            throw usage_error(fmt::format("`{}`: {} matches none of the parameters, which are {}",
                                          setting_, rule.pattern, names_));
        }
    }
}

std::vector<TrainedRange> trained_ranges(const Net& net, const OptimizerSpec& spec) {
    ParameterRules rates("lr-scale", spec.lr_scale, std::numeric_limits<float>::min());
    ParameterRules decays("weight-decay-scale", spec.decay_scale, 0.0f);
    ParameterRules frozen("freeze", spec.freeze);
    std::vector<TrainedRange> ranges;
    for (const Parameter& parameter : net.parameters()) {
        const Scales scales{rates.factor_of(parameter.name), decays.factor_of(parameter.name)};
        if (frozen.factor_of(parameter.name) > 0.0f) {
            const std::int64_t begin = parameter.offset_elems;
            ranges.push_back({begin, begin + Net::padded(parameter.elems), scales});
        }
    }
    for (const ParameterRules* const rules : {&rates, &decays, &frozen}) {
        rules->require_used();
    }
    if (ranges.empty()) {
        throw usage_error(fmt::format("`freeze` {}: no parameter is left to train", spec.freeze));
    }
    return ranges;
}

}  // namespace gyre::train
