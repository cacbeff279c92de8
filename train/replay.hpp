// One step of a training, taken again and shown.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "train/fit.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

struct ReplayedImage {
    std::int64_t image = 0;  // its index in the training set
    int label = 0;           // of mixed images: that with the larger share
    int predicted = 0;       // before the update, as the loss is
    double loss = 0.0;       // as it counts in the step's
};

struct ReplayedParameter {
    std::string name;
    std::vector<std::int64_t> shape;
    // Euclidean norms.
    double weights = 0.0;   // before the update
    double gradient = 0.0;  // of the step's loss, as the update takes it: clipped
    double update = 0.0;    // what the step adds to the weights
};

struct ReplayedStep {
    int epoch = 0;                           // from 1
    StepResult result = {};                  // its step counts from 0
    std::vector<ReplayedImage> images = {};  // in the order of the step
    std::vector<ReplayedParameter> parameters = {};
};

// Ends a training after a step, of which it then knows everything. All functions are collective.
class Replay final : public FitObserver {
 public:
    // number: of the step, from 1, over all epochs.
    explicit Replay(std::int64_t number) : number_(number) {}

    // Complete on rank 0 after the step.
    const std::optional<ReplayedStep>& step() const { return step_; }

    // Throws AgreedError if the training begins after the step.
    void on_start(const Training& training) override;
    bool pauses_after(std::int64_t steps) override {
        return steps == number_ - 1 || steps == number_;
    }
    void on_step(const Training& training, const StepResult& result) override;
    void on_pause(const Training& training) override;
    void on_epoch(const Training& training, const EpochFacts&) override { on_pause(training); }
    bool ends() override { return done_; }

 private:
    // Before the step, and after it.
    void look(const Training& training);
    void finish(Session& session);

    const std::int64_t number_;
    bool done_ = false;
    std::map<std::string, std::vector<float>> before_;  // the parameters' values
    std::optional<ReplayedStep> step_;
};

}  // namespace gyre::train
