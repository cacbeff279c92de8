// How a training pass runs: layer by layer, or fused. Chosen once, before the training.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kernels/ops/backend.hpp"
#include "model/net.hpp"
#include "train/images.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

class StepProgram {
 public:
    // The program is fused if `fuse` asks for it, the backend has it for the net, and it can do all
    // that the step needs. Everything given must outlive the program.
    StepProgram(Backend& backend, Net& net, const DeviceImages& images, const AugmentSpec& augment,
                bool fuse);

    bool fused() const { return fused_ != nullptr; }
    // For -v: what runs, and why it is not fused.
    const std::string& description() const { return description_; }

    struct Pass {
        Batch batch;
        // The batch's samples, [n] on the device.
        std::int32_t* samples = nullptr;
        // Not null: the pass first finds out which images the step has, and puts them into
        // `samples`, which a fused pass leaves as they are.
        const NextSamplesArgs* next = nullptr;
        float scale = 1.0f;                 // of the loss
        const float* loss_scale = nullptr;  // as Net::loss() takes it
        BackwardHooks hooks = {};
    };
    // Gathers the images, and computes the loss, the net's statistics of the step and all
    // gradients, or updates. Allocates nothing.
    void run(const Pass& pass) const;
    // The same for leaves that go through the net side by side (Net::leaves()), with the hooks of
    // the first; also for a guest after them. Their samples are known.
    void run_leaves(std::span<const Pass> leaves) const;
    // The first part of both: the images and labels of the pass, in the net's memory.
    void gather(const Pass& pass) const;

 private:
    void run_fused(const Pass& pass) const;

    Net& net_;
    const DeviceImages& images_;
    const AugmentSpec augment_;
    std::unique_ptr<TrainingPass> fused_;
    std::string description_;
};

}  // namespace gyre::train
