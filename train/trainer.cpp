#include "train/trainer.hpp"

namespace gyre {

namespace {
// Floats in the tail of the gradient buffer, summed over the ranks with the gradients: what the
// loss kernel writes, then the number of ranks that want to stop.
enum Tail { kLoss, kCorrect, kStop };
}  // namespace

void Trainer::begin_epoch(std::uint32_t epoch) {
    epoch_ = epoch;
    exposed_seconds_ = 0.0;
    images_.set_order(epoch_order(images_.count(), options_.seed, epoch, options_.shuffle));
}

std::optional<StepResult> Trainer::step(std::int64_t step, bool stop) {
    const Range global = sharding_.global(step);
    const Range local = sharding_.local(step);
    Pass pass;
    pass.n = static_cast<int>(local.count);
    pass.samples = images_.samples(local.first);
    pass.seed = options_.seed;
    pass.epoch = epoch_;
    pass.training = true;

    images_.gather(local.first, pass.n, net_.input(), net_.labels());
    net_.forward(pass);
    // Every rank scales by the size of the global batch, so the sum over ranks is the mean over
    // it, whatever each rank's share.
    float* tail = net_.gradient_data() + net_.tail_offset();
    net_.loss(pass, 1.0f / static_cast<float>(global.count), tail + kLoss);
    if (stop) {
        // Nobody has asked before, or there would be no further step: the sum so far is 0.
        const float one = 1.0f;
        backend_.upload(tail + kStop, &one, sizeof one);
    }
    net_.backward(pass, [&](std::int64_t offset) { reducer_.ready(offset); });
    exposed_seconds_ += reducer_.wait();
    optimizer_.step();
    float* result = results_.get() + step % (ahead_ + 1) * Net::kTailElems;
    pending_.push_back({step, global.count,
                        backend_.download_in_order(result, tail, Net::kTailElems * sizeof(float))});
    return std::int64_t(pending_.size()) > ahead_ ? next_result() : std::nullopt;
}

std::optional<StepResult> Trainer::next_result() {
    if (pending_.empty()) {
        return std::nullopt;
    }
    const Pending done = pending_.front();
    pending_.pop_front();
    backend_.wait_transfer(done.transfer);
    const float* sums = results_.get() + done.step % (ahead_ + 1) * Net::kTailElems;
    return StepResult{done.step, double{sums[kLoss]}, done.images, sums[kStop] > 0.0f};
}

}  // namespace gyre
