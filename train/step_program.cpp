#include "train/step_program.hpp"

#include <vector>

namespace gyre::train {

StepProgram::StepProgram(Backend& backend, Net& net, const DeviceImages& images,
                         const AugmentSpec& augment, bool fuse)
    : net_(net), images_(images), augment_(augment) {
    const char* reason =
        backend.host_memory()                    ? "a CPU has no fused pass"
        : !fuse                                  ? "a fused pass is not asked for"
        : augment.any()                          ? "augmentation is not in the fused pass"
        : net.loss_spec().label_smoothing > 0.0f ? "label smoothing is not in the fused pass"
        : !net.loss_spec().plain()               ? "class weights are not in the fused pass"
        : net.type() != DataType::float32        ? "the fused pass computes in float32 only"
        : !net.fusable_layers()                  ? "the net is not a chain of layers without state"
                                                 : nullptr;
    if (reason == nullptr) {
        fused_ = backend.make_pass(*net.fusable_layers());
        reason = "the device's fused pass does not take such a net";
    }
    description_ =
        fused() ? "fused: " + fused_->description() : std::string("layer by layer: ") + reason;
}

void StepProgram::run(const Pass& pass) const {
    if (fused()) {
        return run_fused(pass);
    }
    gather(pass);
    net_.forward(pass.batch);
    net_.loss(pass.batch, pass.scale, &net_.stats()->loss, pass.loss_scale);
    net_.backward(pass.batch, pass.hooks);
}

void StepProgram::run_leaves(std::span<const Pass> leaves) const {
    std::vector<Batch> batches;
    for (const Pass& pass : leaves) {
        gather(pass);
        batches.push_back(pass.batch);
    }
    net_.forward(batches);
    const BackwardHooks& hooks = leaves.front().hooks;
    for (const Pass& pass : leaves) {
        const Batch& batch = pass.batch;
        net_.loss(batch, pass.scale, &net_.stats(batch)->loss, pass.loss_scale);
        if (batch.leaf + 1 < batch.leaves) {
            hooks.leaf_ready(batch.leaf, net_.stats_offset());
        } else if (!Net::is_guest(batch)) {
            hooks.ready(net_.stats_offset());
        }
    }
    net_.backward(batches, hooks);
}

void StepProgram::run_fused(const Pass& pass) const {
    const TimelineSpan span(pass.batch.timeline, "training pass");
    fused_->run(pass.batch, {.images = images_.source(),
                             .next = pass.next,
                             .scale = pass.scale,
                             .params = net_.parameter_data(),
                             .grads = net_.gradient_data(),
                             .sums = &net_.stats()->loss,
                             .update = pass.hooks.update});
    if (pass.hooks.update != nullptr) {
        pass.hooks.updated(0, net_.flat_elems());
    }
    if (pass.hooks.ready) {
        pass.hooks.ready(0);
    }
}

void StepProgram::gather(const Pass& pass) const {
    const Batch& batch = pass.batch;
    const TimelineSpan span(batch.timeline, "gather");
    const AugmentArgs augment{augment_, batch.seed, augment_.any() ? batch.epoch : nullptr,
                              static_cast<int>(images_.count())};
    if (pass.next != nullptr) {
        images_.gather_next(*pass.next, pass.samples, batch.n, net_.input(batch.leaf),
                            net_.labels(batch.leaf), augment);
    } else {
        images_.gather(pass.samples, batch.n, net_.input(batch.leaf), net_.labels(batch.leaf),
                       augment);
    }
}

}  // namespace gyre::train
