// The user's choice of updates: the rule, its hyperparameters and the learning rate.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/ops/loss_scale.hpp"
#include "kernels/ops/update_rules.hpp"
#include "train/schedule.hpp"

namespace gyre::train {

enum class UpdateRule { sgd, adam, adamw, lion, rmsprop };

// The facts of a rule besides its formula.
struct UpdateRuleFacts {
    std::string name;                        // of --optimizer
    Formula formula;                         // sgd's with momentum is sgd_momentum
    std::array<const char*, 2> states;       // by torch.optim's names, as far as there are any
    std::vector<std::string_view> settings;  // that only some rules have
    // Defaults.
    float learning_rate = 0.01f, weight_decay = 0.0f;
    std::array<float, 2> betas = {0.9f, 0.999f};
    bool decoupled = false;  // the decay shrinks parameters, and is not part of the gradient
};
// In the order of UpdateRule.
inline const std::vector<UpdateRuleFacts> kUpdateRules = {
    {.name = "sgd",
     .formula = Formula::sgd,
     .states = {"momentum_buffer"},
     .settings = {"momentum"}},
    {.name = "adam",
     .formula = Formula::adam,
     .states = {"exp_avg", "exp_avg_sq"},
     .settings = {"betas", "eps"},
     .learning_rate = 0.001f},
    {.name = "adamw",
     .formula = Formula::adam,
     .states = {"exp_avg", "exp_avg_sq"},
     .settings = {"betas", "eps"},
     .learning_rate = 0.001f,
     .weight_decay = 0.01f,
     .decoupled = true},
    {.name = "lion",
     .formula = Formula::lion,
     .states = {"exp_avg"},
     .settings = {"betas"},
     .learning_rate = 0.0001f,
     .betas = {0.9f, 0.99f},
     .decoupled = true},
    {.name = "rmsprop",
     .formula = Formula::rmsprop,
     .states = {"square_avg"},
     .settings = {"alpha", "eps"}},
};
inline const UpdateRuleFacts& facts(UpdateRule rule) {
    return kUpdateRules[static_cast<std::size_t>(rule)];
}

// The arguments of torch.optim's classes, and of Lion.
struct OptimizerSpec {
    UpdateRule rule = UpdateRule::sgd;
    std::optional<float> learning_rate = {};  // if empty, the rule's default, as the next ones
    std::optional<float> weight_decay = {};
    float momentum = 0.5f;  // sgd's, in [0, 1)
    bool nesterov = false;  // sgd's
    std::optional<std::array<float, 2>> betas = {};
    float alpha = 0.99f;  // rmsprop's
    float epsilon = 1e-8f;
    std::optional<float> max_grad_norm = {};  // empty: gradients are not clipped
    std::string freeze = {};    // patterns of parameters that are not updated, separated by commas
    std::string lr_scale = {};  // PATTERN=F,...: of parameters whose learning rate is F times it
    std::string decay_scale = {};   // the same of the weight decay
    std::optional<float> ema = {};  // decay of the weights' moving average; empty: none is kept
    ScheduleSpec schedule = {};     // of the learning rate
    std::optional<LossScaling> loss_scaling = {};  // in fp16 never empty (resolved_optimizer())
};

}  // namespace gyre::train
