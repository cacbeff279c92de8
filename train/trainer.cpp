#include "train/trainer.hpp"

#include <array>

namespace gyre {

namespace {
// Floats in the tail of the gradient buffer, summed over the ranks with the gradients: what the
// loss kernel writes, then the number of ranks that want to stop.
enum Tail { kLoss, kCorrect, kStop, kTailCount };
}  // namespace

void Trainer::begin_epoch(std::uint32_t epoch) {
    epoch_ = epoch;
    exposed_seconds_ = 0.0;
    images_.set_order(epoch_order(images_.count(), options_.seed, epoch, options_.shuffle));
}

StepResult Trainer::step(std::int64_t step, bool stop) {
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
    const float wants_stop = stop ? 1.0f : 0.0f;
    backend_.upload(tail + kStop, &wants_stop, sizeof wants_stop);
    net_.backward(pass, [&](std::int64_t offset) { reducer_.ready(offset); });
    exposed_seconds_ += reducer_.wait();

    std::array<float, kTailCount> sums{};
    backend_.download(sums.data(), tail, sizeof sums);
    optimizer_.step();
    return {double{sums[kLoss]}, global.count, sums[kStop] > 0.0f};
}

}  // namespace gyre
