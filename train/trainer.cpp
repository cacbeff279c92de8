#include "train/trainer.hpp"

#include <algorithm>
#include <utility>

#include "train/hash.hpp"

namespace gyre::train {
namespace {

// The ranks whose FiniteCheck sees the gradients of their own shares only.
int word_ranks(const Reducer& reducer) {
    const std::vector<Bucket>& buckets = reducer.buckets();
    const bool shared = std::any_of(buckets.begin(), buckets.end(),
                                    [](const Bucket& bucket) { return bucket.shared(); });
    return shared ? reducer.communicator().size() : 0;
}

}  // namespace

Trainer::Trainer(const StepParts& parts, const Sharding& sharding, const RunSpec& run,
                 int graph_steps)
    : backend_(parts.backend),
      net_(parts.net),
      program_(parts.program),
      optimizer_(parts.optimizer),
      reducer_(parts.reducer),
      factors_(parts.factors),
      sharding_(sharding),
      micro_batches_(parts.micro_batches),
      queue_(backend_, net_.stats(), std::max(graph_steps, 1), word_ranks(reducer_)),
      graphs_(reducer_.communicator(), graph_steps > 0, queue_.slots(), queue_.max_steps()),
      device_place_(backend_, 1),
      batches_(sharding, run, device_place_.get(), &reducer_),
      samples_(backend_, sharding.most_local()) {
    ready_.reserve(queue_.slots() * static_cast<std::size_t>(queue_.max_steps()));
}

void Trainer::begin_epoch(std::uint32_t epoch, std::int64_t first) {
    place_ = {.epoch = epoch, .step = static_cast<std::uint32_t>(first)};
    begin_ = end_ = first;
    backend_.upload(device_place_.get(), &place_, sizeof place_);
}

void Trainer::trace(Timeline* timeline) {
    timeline_ = timeline;
    reducer_.trace(timeline);
}

StepProgram::Pass Trainer::pass_of(const MicroBatches::Pass& part,
                                   std::int64_t global_count) const {
    StepProgram::Pass pass{.batch = batches_.batch(part, samples_.get()),
                           .samples = samples_.get() + part.images.first};
    pass.batch.timeline = timeline_;
    // Every rank scales by the size of the global batch, so the sum over ranks is the mean over
    // it, whatever each rank's share.
    pass.scale = 1.0f / static_cast<float>(global_count);
    pass.loss_scale = optimizer_.loss_scale();
    return pass;
}

DeviceBuffer<std::int32_t> Trainer::samples_of_other(std::int64_t global_count) const {
    if (audit_ == nullptr) {
        return {};
    }
    const Range images = rank_share(global_count, audit_->other_leaf, sharding_.shards);
    DeviceBuffer<EpochPlace> place(backend_, 1);  // which the search moves on
    backend_.copy(place.get(), device_place_.get(), sizeof(EpochPlace));
    NextSamplesArgs next = batches_.next_samples(global_count);
    next.place = place.get();
    next.first = images.first;
    DeviceBuffer<std::int32_t> samples(backend_, images.count);
    backend_.next_samples(next, static_cast<int>(images.count), samples.get());
    backend_.synchronize();  // `place` goes
    return samples;
}

void Trainer::run_other(std::int64_t global_count, const DeviceBuffer<std::int32_t>& others) {
    StepProgram::Pass pass = pass_of({.images = {0, others.elems()}}, global_count);
    pass.batch.samples = pass.samples = others.get();
    DeviceBuffer<float> state(backend_, net_.state_elems());
    backend_.copy(state.get(), net_.state_data(), state.bytes());
    program_.run(pass);
    audit_->other_hash = gradients_hash(net_.gradient_data());
    backend_.copy(net_.state_data(), state.get(), state.bytes());
}

std::uint64_t Trainer::gradients_hash(const float* gradients) const {
    const auto elems = static_cast<std::size_t>(net_.flat_elems());
    if (backend_.host_memory()) {
        return hash_bytes(gradients, elems * sizeof(float));
    }
    std::vector<float> copy(elems);
    backend_.download(copy.data(), gradients, elems * sizeof(float));
    return hash_bytes(copy.data(), elems * sizeof(float));
}

void Trainer::run_pass(const MicroBatches::Pass& part, std::int64_t global_count,
                       const UpdateArgs* update) {
    StepProgram::Pass pass = pass_of(part, global_count);
    // A pass over all of the rank's share finds its images itself.
    const NextSamplesArgs next = batches_.next_samples(global_count);
    pass.next = micro_batches_.passes() == 1 ? &next : nullptr;
    // The gradients of a leaf are hashed before anything is added to them.
    const bool audited =
        audit_ != nullptr && part.index == audit_->own_leaf - sharding_.own_shards().first;

    const auto finished = [&](std::int64_t begin) {
        if (part.last) {
            micro_batches_.add_earlier(begin);
            reducer_.ready(begin);
        }
    };
    const auto ready = [&](std::int64_t begin) {
        if (!audited) {
            finished(begin);
        }
    };
    const auto updated = [&](std::int64_t from, std::int64_t to) { optimizer_.updated(from, to); };
    pass.hooks = {.ready = ready, .take = factors_, .update = update, .updated = updated};
    program_.run(pass);
    if (audited) {
        audit_->own_hash = gradients_hash(net_.gradient_data());
        finished(0);
    }
    micro_batches_.end_pass(part);
}

void Trainer::run_leaves(std::int64_t global_count, const DeviceBuffer<std::int32_t>& others) {
    const int count = micro_batches_.passes();
    std::vector<StepProgram::Pass> leaves;
    for (int i = 0; i < count; ++i) {
        leaves.push_back(pass_of(micro_batches_.pass(global_count, i), global_count));
    }
    if (audit_ != nullptr) {
        StepProgram::Pass& guest = leaves.emplace_back(
            pass_of({.images = {0, others.elems()}, .global_images = global_count}, global_count));
        guest.batch.samples = guest.samples = others.get();
    }
    for (std::size_t i = 0; i < leaves.size(); ++i) {
        leaves[i].batch.leaf = static_cast<int>(i);
        leaves[i].batch.leaves = count;
    }
    // The gradients of an audited leaf, before anything is added to them.
    const int audited = audit_ == nullptr ? count : audit_->own_leaf - sharding_.own_shards().first;
    DeviceBuffer<float> own;
    if (audit_ != nullptr) {  // elsewhere a step allocates nothing
        own = {backend_, net_.gradient_elems()};
    }
    std::int64_t end = own.elems();
    const auto leaf_ready = [&](int leaf, std::int64_t begin) {
        if (leaf == audited) {
            backend_.copy(own.get() + begin, net_.gradient_data() + begin,
                          static_cast<std::size_t>(end - begin) * sizeof(float));
            end = begin;
        }
        if (leaf + 1 < count) {
            micro_batches_.keep(leaf, begin);
        }
    };
    const auto ready = [&](std::int64_t begin) {
        leaf_ready(count - 1, begin);
        micro_batches_.add_earlier(begin);
        reducer_.ready(begin);
    };
    const auto summed = [&](std::int64_t begin) {
        micro_batches_.summed(begin);
        reducer_.ready(begin);
    };
    leaves.front().hooks = {.ready = ready,
                            .leaf_ready = leaf_ready,
                            .sums = audit_ == nullptr ? micro_batches_.sums() : LeafSums(),
                            .summed = summed,
                            .take = factors_};
    program_.run_leaves(leaves);
    if (audit_ != nullptr) {
        audit_->own_hash = gradients_hash(own.get());
        audit_->other_hash = gradients_hash(net_.guest_gradients());
    }
}

void Trainer::submit(std::int64_t local_count, std::int64_t global_count, int index) {
    const TimelineSpan span(timeline_, "step");
    const int passes = micro_batches_.passes();
    reducer_.begin_step();
    const DeviceBuffer<std::int32_t> others = samples_of_other(global_count);
    // A leaf that is alone with its rank is an ordinary pass.
    const bool together = net_.leaves_meet() && (passes > 1 || audit_ != nullptr);
    if (audit_ != nullptr && !together) {
        run_other(global_count, others);
    }
    if (passes > 1 || together) {
        backend_.next_samples(batches_.next_samples(global_count), static_cast<int>(local_count),
                              samples_.get());
    }
    micro_batches_.begin_step();
    optimizer_.begin_step(queue_.nonfinite_word(sharding_.rank), index);
    // On one rank nothing comes between gradients and update.
    const bool alone =
        sharding_.ranks == 1 && sharding_.shards == 0 && passes == 1 && !keeps_gradients_;
    const UpdateArgs* update = alone ? optimizer_.in_pass() : nullptr;
    if (together) {
        run_leaves(global_count, others);
    }
    for (int part = 0; part < passes && !together; ++part) {
        run_pass(micro_batches_.pass(global_count, part), global_count, update);
    }
    reducer_.finish_step(
        [&](const Bucket& bucket) {
            const TimelineSpan of_bucket(timeline_, "update");
            optimizer_.arrived(bucket);
        },
        [&] {
            optimizer_.end_step();
            if (queue_.words() != nullptr) {
                reducer_.gather_updates(reinterpret_cast<float*>(queue_.words()), 1);
            }
        });
}

const Reducer::Captured* Trainer::graph_from(std::int64_t step) {
    const Range global = sharding_.global(step);
    if (timeline_ != nullptr || keeps_gradients_ || audit_ != nullptr ||
        global.count != sharding_.global(0).count) {
        return nullptr;
    }
    const std::int64_t batches = (sharding_.images - global.first) / sharding_.global_batch;
    return graphs_.get(queue_.next_slot(), batches, [&](int steps) {
        return reducer_.capture([&] {
            for (int i = 0; i < steps; ++i) {
                submit(sharding_.local(step).count, global.count, i);
                if (steps > 1) {
                    queue_.keep_results(i);
                }
            }
        });
    });
}

void Trainer::launch(std::int64_t step) {
    if (place_.step != step) {  // the device expects the one after the last
        place_.step = static_cast<std::uint32_t>(step);
        *queue_.place() = place_;
        backend_.upload_async(Device::Stream::compute, device_place_.get(), queue_.place(),
                              sizeof place_);
    }
    const Reducer::Captured* graph = graph_from(step);
    const int steps = graph == nullptr ? 1 : static_cast<int>(graph->steps.size());
    optimizer_.next_steps(queue_.scalars(), steps);
    if (graph != nullptr) {
        reducer_.launch(*graph);
    } else {
        submit(sharding_.local(step).count, sharding_.global(step).count, 0);
    }
    place_.step += static_cast<std::uint32_t>(steps);
    end_ = step + steps;
    queue_.push(step, steps);
}

std::optional<StepResult> Trainer::step(std::int64_t step, bool stop, bool save) {
    if (step != begin_ || begin_ >= end_) {
        // If nobody has asked before, they are 0: no kernel writes them, parts and ranks add them
        // up.
        const float one = 1.0f;
        if (stop) {
            backend_.upload(&net_.stats()->stop, &one, sizeof one);
        }
        if (save) {
            backend_.upload(&net_.stats()->save, &one, sizeof one);
        }
        launch(step);
        // The device does not keep the events of a timeline for long.
        while (queue_.size() > (timeline_ == nullptr ? queue_.max_in_flight() : 0)) {
            collect();
        }
        if (timeline_ != nullptr) {
            timeline_->read();
        }
    }
    begin_ = step + 1;
    return ready_.empty() ? std::nullopt : next_result();
}

std::optional<StepResult> Trainer::next_result() {
    if (ready_.empty() && queue_.size() > 0) {
        collect();
    }
    if (ready_.empty()) {
        return std::nullopt;
    }
    std::optional<StepResult> result = std::move(ready_.front());
    ready_.erase(ready_.begin());
    return result;
}

std::string Trainer::parameter_at(std::int32_t nonfinite_word) const {
    const std::int64_t elem = std::int64_t{nonfinite_word - 1} * FiniteCheck::kGrain;
    std::string name;
    for (const Parameter& parameter : net_.parameters()) {
        name = parameter.offset_elems <= elem ? parameter.name : name;
    }
    return name;
}

void Trainer::collect() {
    for (int i = 0; i < queue_.steps_of_oldest(); ++i) {
        StepResult& result = ready_.emplace_back();
        result.communication = reducer_.synchronize_step();
        const LaunchQueue::Result found = queue_.read_oldest(i);
        result.step = found.step;
        result.loss = double{found.stats.loss};
        result.learning_rate = found.learning_rate;
        result.images = sharding_.global(found.step).count;
        result.correct = static_cast<std::int64_t>(found.stats.correct);
        result.stop = found.stats.stop > 0.0f;
        result.save = found.stats.save > 0.0f;
        result.skipped = found.stats.skipped > 0.0f;
        result.loss_scale = double{found.stats.loss_scale};
        result.gradient_norm = double{found.stats.gradient_norm};
        if (found.nonfinite_word != 0) {
            result.not_finite = parameter_at(found.nonfinite_word);
        }
    }
    queue_.pop();
}

}  // namespace gyre::train
