#include "train/trainer.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace gyre::train {

namespace {
// Steps that run before one is captured: libraries and drivers load and allocate at first use.
constexpr int kWarmUps = 2;
}  // namespace

void Trainer::begin_epoch(std::uint32_t epoch) {
    backend_.upload(epoch_.get(), &epoch, sizeof epoch);
    images_.set_order(epoch_order(images_.count(), options_.seed, epoch, options_.shuffle));
}

void Trainer::compute(std::int64_t local_count, std::int64_t global_count, int part,
                      const PassUpdate* update) {
    const Range range = rank_share(local_count, part, options_.accumulate);
    const bool last = part + 1 == options_.accumulate;
    Batch pass;
    pass.n = static_cast<int>(range.count);
    pass.global_n = sharding_.part_images(global_count, part, options_.accumulate);
    pass.ranks = sharding_.ranks > 1 ? &sums_ : nullptr;
    pass.samples = samples_.get() + range.first;
    pass.seed = options_.seed;
    pass.epoch = epoch_.get();
    pass.training = true;

    // Every rank scales by the size of the global batch, so the sum over ranks is the mean over
    // it, whatever each rank's share.
    const float scale = 1.0f / static_cast<float>(global_count);
    float* gradients = net_.gradient_data();
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
    if (net_.has_pass()) {
        net_.run_pass(pass, images_.source(), scale, update);
        ready(0);
    } else {
        images_.gather(pass.samples, pass.n, net_.input(), net_.labels());
        net_.forward(pass);
        net_.loss(pass, scale);
        net_.backward(pass, ready, [&](std::size_t node, const float* x, const float* dy) {
            return factors_.take(pass, node, x, dy);
        });
    }
    if (!last) {
        backend_.add(net_.gradient_elems(), gradients, kept_.get());
    }
}

void Trainer::submit(std::int64_t local_count, std::int64_t global_count) {
    reducer_.begin_step();
    if (options_.accumulate > 1) {
        backend_.fill_zero(kept_.get(), kept_.bytes());
    }
    // On one rank nothing comes between gradients and update.
    const bool alone = net_.has_pass() && sharding_.ranks == 1 && options_.accumulate == 1;
    const PassUpdate* update = alone ? optimizer_.in_pass(&net_.tail()->not_finite) : nullptr;
    for (int part = 0; part < options_.accumulate; ++part) {
        compute(local_count, global_count, part, update);
    }
    if (update != nullptr) {
        return reducer_.finish_step([](const Bucket&) {});
    }
    const int rank = sharding_.rank;
    optimizer_.begin_step(found_.get() == nullptr ? &net_.tail()->not_finite : found_.get() + rank);
    reducer_.finish_step(
        [&](const Bucket& bucket) {
            optimizer_.arrived(bucket.begin, bucket.end);
            if (bucket.shared()) {
                reducer_.gather_updates(net_.parameter_data() + bucket.begin, bucket.share_elems);
            }
        },
        [&] {
            optimizer_.end_step();
            if (found_.get() != nullptr) {
                reducer_.gather_updates(reinterpret_cast<float*>(found_.get()), 1);
            }
        });
}

bool Trainer::shared() const {
    const std::vector<Bucket>& buckets = reducer_.buckets();
    return std::any_of(buckets.begin(), buckets.end(),
                       [](const Bucket& bucket) { return bucket.shared(); });
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
    backend_.copy(samples_.get(), images_.samples(local.first),
                  static_cast<std::size_t>(local.count) * sizeof(std::int32_t));
    StepTail* tail = net_.tail();
    if (stop) {
        // Where nobody has asked before it is 0; no kernel writes it, parts and ranks add it up.
        const float one = 1.0f;
        backend_.upload(&tail->stop, &one, sizeof one);
    }
    const auto slot = static_cast<std::size_t>(submitted_++ % (ahead_ + 1));
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
    if (found_.get() != nullptr) {
        backend_.download_async(Device::Stream::compute, all_found_.get() + slot * found_.elems(),
                                found_.get(), found_.bytes());
    }
    pending_.push_back(
        {.step = step,
         .images = global.count,
         .learning_rate = learning_rate,
         .result = result,
         .transfer = backend_.download_async(Device::Stream::compute, result, tail, sizeof *tail)});
    return std::int64_t(pending_.size()) > ahead_ ? next_result() : std::nullopt;
}

std::int32_t Trainer::not_finite(const Pending& done) const {
    if (found_.get() == nullptr) {
        return done.result->not_finite;
    }
    const std::int32_t* words = all_found_.get() + (done.result - results_.get()) * found_.elems();
    return *std::max_element(words, words + found_.elems());
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
    if (const std::int32_t word = not_finite(done); word != 0) {
        // No kernel resets it. Steps that were submitted meanwhile still report one.
        backend_.fill_zero(&net_.tail()->not_finite, sizeof word);
        if (found_.get() != nullptr) {
            backend_.fill_zero(found_.get(), found_.bytes());
        }
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
