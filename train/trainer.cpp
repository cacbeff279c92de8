#include "train/trainer.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace gyre::train {

namespace {
// Steps that run before one is captured: libraries and drivers load and allocate at first use.
constexpr int kWarmUps = 2;
}  // namespace

void Trainer::begin_epoch(std::uint32_t epoch, std::int64_t first) {
    at_ = {.epoch = epoch, .step = static_cast<std::uint32_t>(first)};
    begin_ = end_ = first;
    backend_.upload(place_.get(), &at_, sizeof at_);
}

void Trainer::gather(const Batch& pass, const NextSamplesArgs* next) {
    const TimelineSpan span(timeline_, "gather");
    const AugmentArgs augment{options_.augment, options_.seed,
                              options_.augment.any() ? pass.epoch : nullptr};
    if (next != nullptr) {
        images_.gather_next(*next, samples_.get(), pass.n, net_.input(), net_.labels(), augment);
    } else {
        images_.gather(pass.samples, pass.n, net_.input(), net_.labels(), augment);
    }
}

void Trainer::trace(Timeline* timeline) {
    timeline_ = timeline;
    reducer_.trace(timeline);
}

void Trainer::compute(std::int64_t global_count, int part, const PassUpdate* update) {
    const Range range = sharding_.part(global_count, part, passes_);
    const bool last = part + 1 == passes_;
    Batch pass;
    pass.n = static_cast<int>(range.count);
    if (sharding_.shards == 0) {  // otherwise a shard's statistics are its own
        pass.global_n = sharding_.part_images(global_count, part, passes_);
        pass.ranks = sharding_.ranks > 1 ? &sums_ : nullptr;
    }
    pass.samples = samples_.get() + range.first;
    pass.seed = options_.seed;
    pass.epoch = &place_.get()->epoch;
    pass.training = true;
    pass.timeline = timeline_;

    // Every rank scales by the size of the global batch, so the sum over ranks is the mean over
    // it, whatever each rank's share.
    const float scale = 1.0f / static_cast<float>(global_count);
    float* gradients = net_.gradient_data();
    std::int64_t end = net_.gradient_elems();
    const auto ready = [&](std::int64_t begin) {
        if (!last) {
            return;
        }
        for (const DeviceBuffer<float>& kept : kept_) {
            backend_.add(end - begin, kept.get() + begin, gradients + begin);
        }
        end = begin;
        reducer_.ready(begin);
    };
    const auto updated = [&](std::int64_t from, std::int64_t to) { optimizer_.updated(from, to); };
    const InPass in_pass{update, updated};
    // What takes all of the rank's share finds its images itself.
    const bool all = passes_ == 1;
    const NextSamplesArgs next = next_samples(global_count);
    if (net_.has_pass()) {
        net_.run_pass(pass, images_.source(), scale, in_pass, all ? &next : nullptr);
        ready(0);
    } else {
        gather(pass, all ? &next : nullptr);
        net_.forward(pass);
        net_.loss(pass, scale, &net_.tail()->loss, optimizer_.loss_scale());
        const auto take = [&](std::size_t node, const Tensor& x, const Tensor& dy) {
            return factors_.take(pass, node, x, dy);
        };
        net_.backward(pass, ready, take, in_pass);
    }
    keep(part);
    keep_state(part);
}

void Trainer::keep(int part) {
    if (part + 1 == passes_) {
        return;
    }
    float* gradients = net_.gradient_data();
    if (sharding_.shards == 0) {
        backend_.add(net_.gradient_elems(), gradients, kept_[0].get());
        return;
    }
    std::size_t level = 0;
    for (; (part >> level & 1) != 0; ++level) {  // neighbours that wait: a carry, as in counting
        backend_.add(net_.gradient_elems(), kept_[level].get(), gradients);
    }
    backend_.copy(kept_[level].get(), gradients, kept_[level].bytes());
}

// Running statistics are those of shard 0, which rank 0 has on any number of ranks.
void Trainer::keep_state(int part) {
    if (kept_state_.elems() == 0) {
        return;
    }
    if (part == 0) {
        backend_.copy(kept_state_.get(), net_.state_data(), kept_state_.bytes());
    } else if (part + 1 == passes_) {
        backend_.copy(net_.state_data(), kept_state_.get(), kept_state_.bytes());
    }
}

NextSamplesArgs Trainer::next_samples(std::int64_t global_count) const {
    return {.order = order_,
            .place = place_.get(),
            .step_images = sharding_.global_batch,
            .first = sharding_.share(global_count).first};
}

void Trainer::submit(std::int64_t local_count, std::int64_t global_count, int index) {
    const TimelineSpan span(timeline_, "step");
    reducer_.begin_step();
    if (passes_ > 1) {
        backend_.next_samples(next_samples(global_count), static_cast<int>(local_count),
                              samples_.get());
    }
    if (passes_ > 1 && sharding_.shards == 0) {
        backend_.fill_zero(kept_[0].get(), kept_[0].bytes());
    }
    const int rank = sharding_.rank;
    optimizer_.begin_step(found_.get() == nullptr ? &net_.tail()->not_finite : found_.get() + rank,
                          index);
    // On one rank nothing comes between gradients and update.
    const bool alone = sharding_.ranks == 1 && sharding_.shards == 0 && passes_ == 1;
    const PassUpdate* update = alone ? optimizer_.in_pass() : nullptr;
    for (int part = 0; part < passes_; ++part) {
        compute(global_count, part, update);
    }
    reducer_.finish_step(
        [&](const Bucket& bucket) {
            {
                const TimelineSpan of_bucket(timeline_, "update");
                optimizer_.arrived(bucket.begin, bucket.end);
            }
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
                      std::int64_t global_count, int steps) {
    Communicator& comm = reducer_.communicator();
    const auto calls = [&] {
        for (int i = 0; i < steps; ++i) {
            submit(local_count, global_count, i);
            if (steps > 1) {
                backend_.copy(ring_.get() + i, net_.tail(), sizeof(StepTail));
                if (found_.get() != nullptr) {
                    backend_.copy(found_ring_.get() + std::size_t(i) * ranks(), found_.get(),
                                  found_.bytes());
                }
            }
        }
    };
    try {
        // Where one rank launched a graph and another did not, reductions might not meet.
        agree(comm, [&] { captured = reducer_.capture(calls); });
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

const Reducer::Captured* Trainer::graph_from(std::int64_t step, std::size_t slot) {
    const Range global = sharding_.global(step);
    if (!graph_ || timeline_ != nullptr || global.count != sharding_.global(0).count) {
        return nullptr;
    }
    const bool warm = warm_ups_ >= kWarmUps;
    const bool several = most_steps_ > 1 && warm &&
                         global.first + most_steps_ * sharding_.global_batch <= sharding_.images;
    Reducer::Captured& captured = (several ? captured_several_ : captured_)[slot];
    if (captured.graph == nullptr && warm) {
        capture(captured, sharding_.local(step).count, global.count, several ? most_steps_ : 1);
    }
    warm_ups_ += warm ? 0 : 1;
    return graph_ && captured.graph != nullptr ? &captured : nullptr;
}

void Trainer::launch(std::int64_t step) {
    const auto slot = static_cast<std::size_t>(launched_++ % (ahead_ + 1));
    const std::size_t first = slot * static_cast<std::size_t>(most_steps_);
    if (at_.step != step) {  // the device expects the one after the last
        at_.step = static_cast<std::uint32_t>(step);
        places_.get()[slot] = at_;
        backend_.upload_async(Device::Stream::compute, place_.get(), places_.get() + slot,
                              sizeof at_);
    }
    const Reducer::Captured* graph = graph_from(step, slot);
    const int steps = graph == nullptr ? 1 : static_cast<int>(graph->steps.size());
    optimizer_.next_steps(scalars_.get() + first, steps);
    if (graph != nullptr) {
        reducer_.launch(*graph);
    } else {
        submit(sharding_.local(step).count, sharding_.global(step).count, 0);
    }
    at_.step += static_cast<std::uint32_t>(steps);
    end_ = step + steps;
    const StepTail* from = steps > 1 ? ring_.get() : net_.tail();
    if (found_.get() != nullptr) {
        backend_.download_async(Device::Stream::compute, all_found_.get() + first * ranks(),
                                steps > 1 ? found_ring_.get() : found_.get(),
                                static_cast<std::size_t>(steps) * found_.bytes());
    }
    launches_.push_back(
        {.step = step,
         .steps = steps,
         .slot = slot,
         .transfer = backend_.download_async(Device::Stream::compute, results_.get() + first, from,
                                             static_cast<std::size_t>(steps) * sizeof *from)});
}

std::optional<StepResult> Trainer::step(std::int64_t step, bool stop, bool save) {
    if (step != begin_ || begin_ >= end_) {
        // Where nobody has asked before they are 0; no kernel writes them, parts and ranks add them
        // up.
        const float one = 1.0f;
        if (stop) {
            backend_.upload(&net_.tail()->stop, &one, sizeof one);
        }
        if (save) {
            backend_.upload(&net_.tail()->save, &one, sizeof one);
        }
        launch(step);
        // The device does not keep the events of a timeline for long.
        while (std::int64_t(launches_.size()) > (timeline_ == nullptr ? ahead_ : 0)) {
            collect();
        }
        if (timeline_ != nullptr) {
            timeline_->read();
        }
    }
    begin_ = step + 1;
    return ready_.empty() ? std::nullopt : next_result();
}

// at: of the step among results_.
std::int32_t Trainer::not_finite(std::size_t at) const {
    if (found_.get() == nullptr) {
        return results_.get()[at].not_finite;
    }
    const std::int32_t* words = all_found_.get() + at * ranks();
    return *std::max_element(words, words + found_.elems());
}

std::optional<StepResult> Trainer::next_result() {
    if (ready_.empty() && !launches_.empty()) {
        collect();
    }
    if (ready_.empty()) {
        return std::nullopt;
    }
    std::optional<StepResult> result = std::move(ready_.front());
    ready_.erase(ready_.begin());
    return result;
}

void Trainer::collect() {
    const Launch done = launches_.front();
    launches_.erase(launches_.begin());
    const std::size_t first = done.slot * static_cast<std::size_t>(most_steps_);
    for (std::size_t i = 0; i < static_cast<std::size_t>(done.steps); ++i) {
        StepResult& result = ready_.emplace_back();
        result.communication = reducer_.synchronize_step();
        backend_.synchronize(done.transfer);
        result.learning_rate = scalars_.get()[first + i].learning_rate;
        read(first + i, done.step + std::int64_t(i), result);
    }
}

void Trainer::read(std::size_t at, std::int64_t step, StepResult& result) {
    const StepTail& tail = results_.get()[at];
    result.step = step;
    result.loss = double{tail.loss};
    result.images = sharding_.global(step).count;
    result.correct = static_cast<std::int64_t>(tail.correct);
    result.stop = tail.stop > 0.0f;
    result.save = tail.save > 0.0f;
    if (result.save) {
        // As of not_finite below.
        backend_.fill_zero(&net_.tail()->save, sizeof tail.save);
    }
    result.skipped = tail.skipped > 0.0f;
    result.loss_scale = double{tail.loss_scale};
    if (const std::int32_t word = not_finite(at); word != 0) {
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
}

}  // namespace gyre::train
