// The user's choice of updates: the rule, its hyperparameters and the learning rate.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/loss_scale.hpp"
#include "train/schedule.hpp"

namespace gyre::train {

enum class UpdateRule { sgd, adam, adamw };
inline const std::vector<std::pair<std::string, UpdateRule>> kUpdateRules = {
    {"sgd", UpdateRule::sgd}, {"adam", UpdateRule::adam}, {"adamw", UpdateRule::adamw}};

// The arguments of torch.optim.SGD, Adam and AdamW.
struct OptimizerSpec {
    UpdateRule rule = UpdateRule::sgd;
    std::optional<float> learning_rate = {};  // sgd 0.01, adam and adamw 0.001
    std::optional<float> weight_decay = {};   // sgd and adam 0, adamw 0.01
    float momentum = 0.5f;                    // sgd's, in [0, 1)
    bool nesterov = false;                    // sgd's
    std::array<float, 2> betas = {0.9f, 0.999f};
    float epsilon = 1e-8f;
    std::optional<float> max_grad_norm = {};       // empty: gradients are not clipped
    ScheduleSpec schedule = {};                    // of the learning rate
    std::optional<LossScaling> loss_scaling = {};  // in fp16 never empty (resolved_optimizer())
};

}  // namespace gyre::train
