// Settings whose texts are more than a number, a word or a path.
#pragma once

#include <optional>
#include <string>

#include "train/run_spec.hpp"
#include "train/setting.hpp"

namespace gyre::train {

inline constexpr float kBelowOne = 0.9999999f;  // the greatest value of settings in [0, 1)

Setting resize_setting(std::optional<Resize>& field);
Setting init_method_setting(std::string& field);
Setting no_cuda_setting(std::string& device);
Setting virtual_ranks_setting(std::string name, BatchSpec& field, std::string help);
Setting class_weights_setting(LossSpec& field);
Setting betas_setting(OptimizerSpec& spec);
Setting augment_setting(AugmentSpec& field);
Setting save_every_setting(SaveEvery& field);
Setting metrics_setting(std::string& field);
Setting trace_steps_setting(TraceSteps& field);

}  // namespace gyre::train
