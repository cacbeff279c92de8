#include "train/trainer.hpp"

#include <fmt/format.h>

namespace gyre::train {

namespace {
// Steps that run before one is captured: libraries and drivers load and allocate at first use.
constexpr int kWarmUps = 2;
}  // namespace

void Trainer::begin_epoch(std::uint32_t epoch) {
    at_ = {.epoch = epoch};
    backend_.upload(place_.get(), &at_, sizeof at_);
}

void Trainer::compute(std::int64_t local_count, std::int64_t global_count, int part) {
    const Range range = rank_share(local_count, part, options_.accumulate);
    const bool last = part + 1 == options_.accumulate;
    Batch pass;
    pass.n = static_cast<int>(range.count);
    pass.global_n = sharding_.part_images(global_count, part, options_.accumulate);
    pass.ranks = sharding_.ranks > 1 ? &sums_ : nullptr;
    pass.samples = samples_.get() + range.first;
    pass.seed = options_.seed;
    pass.epoch = &place_.get()->epoch;
    pass.training = true;

    images_.gather(pass.samples, pass.n, net_.input(), net_.labels());
    net_.forward(pass);
    // Every rank scales by the size of the global batch, so the sum over ranks is the mean over
    // it, whatever each rank's share.
    float* gradients = net_.gradient_data();
    net_.loss(pass, 1.0f / static_cast<float>(global_count));
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
    net_.backward(pass, ready, [&](std::size_t node, const float* x, const float* dy) {
        return factors_.take(pass, node, x, dy);
    });
    if (!last) {
        backend_.add(net_.gradient_elems(), gradients, kept_.get());
    }
}

void Trainer::submit(std::int64_t local_count, std::int64_t global_count) {
    reducer_.begin_step();
    const Range mine = rank_share(global_count, sharding_.rank, sharding_.ranks);
    backend_.next_samples({.order = order_,
                           .place = place_.get(),
                           .step_images = sharding_.global_batch,
                           .first = mine.first},
                          static_cast<int>(local_count), samples_.get());
    if (options_.accumulate > 1) {
        backend_.fill_zero(kept_.get(), kept_.bytes());
    }
    for (int part = 0; part < options_.accumulate; ++part) {
        compute(local_count, global_count, part);
    }
    optimizer_.begin_step(&net_.tail()->not_finite);
    reducer_.finish_step(
        [&](const Bucket& bucket) { optimizer_.arrived(bucket.begin, bucket.end); });
    optimizer_.end_step();
}

void Trainer::capture(Reducer::Captured& captured, std::int64_t local_count,
                      std::int64_t global_count) {
    Communicator& comm = reducer_.communicator();
    try {
        // Where one rank launched a graph and another did not, reductions might not meet.
        agree(comm,
              [&] { captured = reducer_.capture([&] { submit(local_count, global_count); }); });
    } catch (const Error& error) {
        if (error.code() == ExitCode::communication) {
            throw;  // what reduces is of no use any more, with a graph or without
        }
        graph_ = false;  // those that were launched stay, as their events are still to be read
        if (comm.is_root()) {
            fmt::print(stderr,
                       "gyre: the step runs without a CUDA graph, as it could not be captured: "
                       "{}\n",
                       error.what());
        }
    }
}

std::optional<StepResult> Trainer::step(std::int64_t step, bool stop) {
    const Range global = sharding_.global(step);
    const Range local = sharding_.local(step);
    StepTail* tail = net_.tail();
    if (stop) {
        // Where nobody has asked before it is 0; no kernel writes it, parts and ranks add it up.
        const float one = 1.0f;
        backend_.upload(&tail->stop, &one, sizeof one);
    }
    const auto slot = static_cast<std::size_t>(submitted_++ % (ahead_ + 1));
    if (at_.step != step) {  // the device expects the one after the last
        at_.step = static_cast<std::uint32_t>(step);
        places_.get()[slot] = at_;
        backend_.upload_async(Device::Stream::compute, place_.get(), places_.get() + slot,
                              sizeof at_);
    }
    ++at_.step;
    const float learning_rate = optimizer_.next_step(scalars_.get()[slot]);
    const bool whole = graph_ && global.count == sharding_.global(0).count;
    if (whole && captured_[slot].graph == nullptr && warm_ups_++ >= kWarmUps) {
        capture(captured_[slot], local.count, global.count);
    }
    if (whole && graph_ && captured_[slot].graph != nullptr) {
        reducer_.launch(captured_[slot]);
    } else {
        submit(local.count, global.count);
    }
    StepTail* result = results_.get() + slot;
    pending_.push_back(
        {.step = step,
         .images = global.count,
         .learning_rate = learning_rate,
         .result = result,
         .transfer = backend_.download_async(Device::Stream::compute, result, tail, sizeof *tail)});
    return std::int64_t(pending_.size()) > ahead_ ? next_result() : std::nullopt;
}

std::optional<StepResult> Trainer::next_result() {
    if (pending_.empty()) {
        return std::nullopt;
    }
    const Pending done = pending_.front();
    pending_.erase(pending_.begin());
    StepResult result;
    result.communication = reducer_.synchronize_step();
    backend_.synchronize(done.transfer);
    const StepTail& tail = *done.result;
    result.step = done.step;
    result.loss = double{tail.loss};
    result.learning_rate = done.learning_rate;
    result.images = done.images;
    result.correct = static_cast<std::int64_t>(tail.correct);
    result.stop = tail.stop > 0.0f;
    if (const std::int32_t word = tail.not_finite; word != 0) {
        // No kernel resets it. Steps that were submitted meanwhile still report one.
        backend_.fill_zero(&net_.tail()->not_finite, sizeof word);
        const std::int64_t elem = std::int64_t{word - 1} * FiniteCheck::kGrain;
        for (const Parameter& parameter : net_.parameters()) {
            if (parameter.offset_elems <= elem) {
                result.not_finite = parameter.name;
            }
        }
    }
    return result;
}

}  // namespace gyre::train
