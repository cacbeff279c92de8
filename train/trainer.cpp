#include "train/trainer.hpp"

#include <bit>

namespace gyre {

namespace {
// Floats in the tail of the gradient buffer, summed over the ranks with the gradients: what the
// loss kernel writes, then the number of ranks that want to stop. Last, and 0 until the reduction
// is over, FiniteCheck's word.
enum Tail { kLoss, kCorrect, kStop, kNotFinite };
}  // namespace

void Trainer::begin_epoch(std::uint32_t epoch) {
    epoch_ = epoch;
    images_.set_order(epoch_order(images_.count(), options_.seed, epoch, options_.shuffle));
}

void Trainer::compute(const Range& local, std::int64_t global_count, int part, bool stop) {
    const Range range = rank_share(local.count, part, options_.accumulate);
    const std::int64_t first = local.first + range.first;
    const bool last = part + 1 == options_.accumulate;
    Pass pass;
    pass.n = static_cast<int>(range.count);
    pass.samples = images_.samples(first);
    pass.seed = options_.seed;
    pass.epoch = epoch_;
    pass.training = true;

    images_.gather(first, pass.n, net_.input(), net_.labels());
    net_.forward(pass);
    // Every rank scales by the size of the global batch, so the sum over ranks is the mean over
    // it, whatever each rank's share.
    float* gradients = net_.gradient_data();
    float* tail = gradients + net_.tail_offset();
    net_.loss(pass, 1.0f / static_cast<float>(global_count), tail + kLoss);
    if (stop && last) {
        // Nobody has asked before, or there would be no further step: the sum so far is 0.
        const float one = 1.0f;
        backend_.upload(tail + kStop, &one, sizeof one);
    }
    std::int64_t end = net_.gradient_elems();
    const auto ready = [&](std::int64_t begin) {
        if (!last) {
            return;
        }
        if (part > 0) {
            backend_.add(end - begin, kept_.get() + begin, gradients + begin);
            end = begin;
        }
        reducer_.ready(begin);
    };
    Net::Take take;
    if (factors_ != nullptr) {
        take = [&](Layer& layer, const float* x, const float* dy) {
            return factors_->take(pass, layer, x, dy);
        };
    }
    net_.backward(pass, ready, take);
    if (!last) {
        backend_.add(net_.gradient_elems(), gradients, kept_.get());
    }
}

std::optional<StepResult> Trainer::step(std::int64_t step, bool stop) {
    const Range global = sharding_.global(step);
    const Range local = sharding_.local(step);
    reducer_.begin_step();
    if (options_.accumulate > 1) {
        backend_.fill_zero(kept_.get(), kept_.bytes());
    }
    for (int part = 0; part < options_.accumulate; ++part) {
        compute(local, global.count, part, stop);
    }
    float* tail = net_.gradient_data() + net_.tail_offset();
    optimizer_.begin_step(reinterpret_cast<std::int32_t*>(tail + kNotFinite));
    reducer_.finish_step(
        [&](const Bucket& bucket) { optimizer_.arrived(bucket.begin, bucket.end); });
    optimizer_.end_step();
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
    StepResult result;
    result.communication = reducer_.settle();
    backend_.wait_transfer(done.transfer);
    const float* sums = results_.get() + done.step % (ahead_ + 1) * Net::kTailElems;
    result.step = done.step;
    result.loss = double{sums[kLoss]};
    result.images = done.images;
    result.stop = sums[kStop] > 0.0f;
    if (const auto word = std::bit_cast<std::int32_t>(sums[kNotFinite]); word != 0) {
        const std::int64_t elem = std::int64_t{word - 1} * FiniteCheck::kGrain;
        for (const Parameter& parameter : net_.parameters()) {
            if (parameter.offset_elems <= elem) {
                result.not_finite = parameter.name;
            }
        }
    }
    return result;
}

}  // namespace gyre
