// Settings for the parameters whose names match a pattern: which are trained, at which rate and
// with which decay (`freeze`, `lr-scale`, `weight-decay-scale`).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/net.hpp"
#include "train/optimizer_spec.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// A setting's factors of parameters, by patterns as fnmatch() has them.
class ParameterRules {
 public:
    // text: PATTERN=F,..., F >= least. Throws Error(usage) if it is something else.
    ParameterRules(const char* setting, const std::string& text, float least);
    // PATTERN,..., whose factor is 0.
    ParameterRules(const char* setting, const std::string& patterns);

    // Of the last pattern that matches; 1 if none does.
    float factor_of(const std::string& parameter);
    // Throws Error(usage) unless each pattern has matched one of the parameters.
    void require_used() const;

 private:
    struct Rule {
        std::string pattern;
        float factor;
        bool used = false;
    };
    const char* setting_;
    std::vector<Rule> rules_;
    std::string names_;  // of the parameters so far
};

// What parameters have of the learning rate and of the weight decay. The latter is a part of a step
// of the former, as in torch.optim: twice the rate is twice the decay in a step.
struct Scales {
    float lr = 1.0f;
    float decay = 1.0f;
    bool operator==(const Scales&) const = default;
};
// A parameter's elements in the flat buffer, with their padding.
struct TrainedRange {
    std::int64_t begin, end;
    Scales scales;
};
// All that no pattern freezes, ascending. Throws Error(usage) if a pattern is malformed or matches
// no parameter, or if none is left to train.
std::vector<TrainedRange> trained_ranges(const Net& net, const OptimizerSpec& spec);

}  // namespace gyre::train
