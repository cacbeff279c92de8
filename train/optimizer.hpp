// SGD, Adam and AdamW with PyTorch's update rules, over the flat parameter buffer of a net.
#pragma once

#include "model/net.hpp"
#include "train/options.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

class Optimizer {
 public:
    // Throws Error(usage) for a rule that is unknown, and for options that it cannot have.
    Optimizer(Backend& backend, Net& net, const TrainOptions& options);

    // Counts a step and writes what its update reads to the device, which is asked for it before
    // the step itself, captured or not. pinned: on the way there, so it must stay as it is until
    // the device has done the step.
    void next_step(StepScalars& pinned);
    // The step: updates each parameter from its reduced gradient, as soon as that has arrived, or
    // at the end where gradients are clipped. not_finite: FiniteCheck's word, on the device.
    void begin_step(std::int32_t* not_finite);
    void arrived(std::int64_t begin, std::int64_t end);  // elements of the gradient buffer
    void end_step();

 private:
    enum class Rule { sgd, adam };
    static Rule rule_of(const TrainOptions& options);
    void update(std::int64_t begin, std::int64_t end);
    StepScalars scalars(std::int64_t step) const;

    const Rule rule_;
    Backend& backend_;
    Net& net_;
    const std::optional<float> max_grad_norm_;
    float learning_rate_;
    float decoupled_decay_ = 0.0f;        // AdamW's
    DeviceBuffer<StepScalars> scalars_;   // [1]
    std::optional<StepScalars> written_;  // last
    std::int64_t steps_ = 0;
    SgdArgs sgd_;
    AdamArgs adam_;
    FiniteCheck clip_;
    DeviceBuffer<float> first_, second_;  // velocity; or the moments m and v
};

}  // namespace gyre::train
