#include "train/optimizer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.hpp"
#include "base/printable.hpp"
#include "train/kept_net.hpp"
#include "train/parameter_groups.hpp"

namespace gyre::train {
namespace {

OptimizerSpec complete(OptimizerSpec spec) {
    check(spec);
    const UpdateRuleFacts& rule = facts(spec.rule);
    spec.learning_rate = spec.learning_rate.value_or(rule.learning_rate);
    spec.weight_decay = spec.weight_decay.value_or(rule.weight_decay);
    spec.betas = spec.betas.value_or(rule.betas);
    return spec;
}

void scale(UpdateArgs& args, const Scales& scales) {
    args.lr_scale = scales.lr;
    args.weight_decay *= scales.decay;
    args.shrink_scale = scales.lr * scales.decay;
}

std::vector<Bucket> only_shared(std::vector<Bucket> buckets) {
    std::erase_if(buckets, [](const Bucket& bucket) { return !bucket.shared(); });
    return buckets;
}

}  // namespace

void check(const OptimizerSpec& spec) {
    const bool sgd = spec.rule == UpdateRule::sgd;
    if (spec.nesterov && (!sgd || spec.momentum == 0.0f)) {
        throw usage_error("`nesterov` needs `rule` sgd and `momentum` greater than 0");
    }
    if (sgd && !(spec.momentum >= 0.0f && spec.momentum < 1.0f)) {
        throw usage_error("`momentum` must be at least 0 and less than 1");
    }
    check(spec.schedule);
}

Optimizer::Optimizer(Backend& backend, Net& net, const OptimizerSpec& spec, int most_steps,
                     Reducer* reducer)
    : backend_(backend),
      net_(net),
      reducer_(reducer),
      shared_(reducer == nullptr ? std::vector<Bucket>{} : only_shared(reducer->buckets())),
      ranges_([&] {
          std::vector<Range> ranges;
          std::int64_t moment = 0;
          const std::vector<TrainedRange> all = trained_ranges(net, spec);
          for (const Bucket& own : updated_by(rank(), shared_, net.flat_elems())) {
              for (const TrainedRange& part : all) {
                  const Range range = {std::max(own.begin, part.begin), std::min(own.end, part.end),
                                       moment,
                                       // Rank 0 counts a range that all ranks have.
                                       own.shared() || rank() == 0, part.scales};
                  if (range.begin >= range.end) {
                      continue;
                  }
                  if (!ranges.empty() && ranges.back().end == range.begin &&
                      ranges.back().counted == range.counted &&
                      ranges.back().scales == range.scales) {
                      ranges.back().end = range.end;
                  } else {
                      ranges.push_back(range);
                  }
                  moment += range.elems();
              }
          }
          return ranges;
      }()),
      spec_(complete(spec)),
      scalars_(backend, most_steps) {
    written_.reserve(static_cast<std::size_t>(most_steps));
    // A rank has no range if all of its shares are frozen.
    const std::int64_t moment_elems =
        ranges_.empty() ? 0 : ranges_.back().moment + ranges_.back().elems();
    const UpdateRuleFacts& rule = facts(spec_.rule);
    const bool momentum = rule.formula == Formula::sgd && spec_.momentum != 0.0f;
    update_ = {.formula = momentum ? Formula::sgd_momentum : rule.formula,
               .momentum = spec_.momentum,
               .nesterov = spec_.nesterov,
               .beta1 = spec_.betas->at(0),
               .beta2 = rule.formula == Formula::rmsprop ? spec_.alpha : spec_.betas->at(1),
               .epsilon = spec_.epsilon,
               .weight_decay = rule.decoupled ? 0.0f : *spec_.weight_decay};
    if (ranges_.size() == 1) {  // else each range of its own
        scale(update_, ranges_.front().scales);
    }
    with_formula(update_.formula, [&]<typename Rule>(Rule) {
        for (int k = 0; k < Rule::kStates; ++k) {
            update_.states[k] = states_.emplace_back(backend, moment_elems).get();
        }
    });
    if (spec_.ema) {
        average_ = {backend, moment_elems};
        average_step_ = {backend, 1};
        const StepScalars step = {.learning_rate = *spec_.ema - 1.0f};
        backend.upload(average_step_.get(), &step, sizeof step);
    }
    if (waits()) {
        facts_ = {backend, ranks()};
    }
    if (spec_.loss_scaling) {
        scaling_ = {backend, 1};
        LossScale start;
        start.scale = spec_.loss_scaling->init_scale;
        backend.upload(scaling_.get(), &start, sizeof start);
        decision_ = {.rule = *spec_.loss_scaling,
                     .state = scaling_.get(),
                     .of_ranks = facts_.get(),
                     .ranks = ranks(),
                     .beta1 = rule.formula == Formula::adam ? update_.beta1 : 0.0f,
                     .beta2 = update_.beta2,
                     .next_scale = &net.stats()->loss_scale,
                     .skips = &net.stats()->skipped};
        update_.skip = &scaling_.get()->skip;
    }
}

// In double precision, as PyTorch does.
StepScalars Optimizer::scalars(std::int64_t step) const {
    const double rate =
        scheduled_rate(spec_.schedule, double{*spec_.learning_rate}, step - 1, plateau_.falls);
    StepScalars result = {.learning_rate = static_cast<float>(rate)};
    const UpdateRuleFacts& rule = facts(spec_.rule);
    if (rule.formula == Formula::adam) {
        const auto remaining = [&](float beta) {
            return 1.0 - std::pow(double{beta}, static_cast<double>(step));
        };
        result.adam_step_size = static_cast<float>(rate / remaining(update_.beta1));
        result.adam_correction = static_cast<float>(1.0 / std::sqrt(remaining(update_.beta2)));
    }
    if (rule.decoupled) {
        result.shrink = static_cast<float>(1.0 - rate * double{*spec_.weight_decay});
    }
    return result;
}

void Optimizer::evaluated(double loss) {
    if (spec_.schedule.kind == ScheduleKind::plateau) {
        plateau_.evaluated(spec_.schedule, loss);
    }
}

void Optimizer::next_steps(StepScalars* pinned, int steps) {
    if (averages() && steps_ == 0) {
        for (const Range& range : ranges_) {
            backend_.copy(average_.get() + range.moment, net_.parameter_data() + range.begin,
                          static_cast<std::size_t>(range.elems()) * sizeof(float));
        }
    }
    std::generate_n(pinned, steps, [&] { return scalars(++steps_); });
    const auto count = static_cast<std::size_t>(steps);
    if (written_.size() >= count && std::equal(pinned, pinned + steps, written_.begin())) {
        return;  // SGD at a constant rate has written them once
    }
    backend_.upload_async(Device::Stream::compute, scalars_.get(), pinned, count * sizeof *pinned);
    written_.resize(std::max(written_.size(), count));
    std::copy_n(pinned, steps, written_.begin());
}

void Optimizer::begin_step(std::int32_t* not_finite, int index) {
    update_.scalars = scalars_.get() + index;
    update_.finite.word = waits() ? nullptr : not_finite;
    clip_word_ = spec_.loss_scaling ? nullptr : not_finite;
    if (spec_.loss_scaling) {
        decision_.scalars = scalars_.get() + index;
        decision_.not_finite = not_finite;
        update_.scalars = &scaling_.get()->scalars;
    }
    updated_.clear();
}

const UpdateArgs* Optimizer::in_pass() {
    return waits() || !has_all() ? nullptr : &update_;
}

void Optimizer::updated(std::int64_t begin, std::int64_t end) {
    if (!updated_.empty() && updated_.front().begin == end) {
        updated_.front().begin = begin;
    } else {
        updated_.insert(updated_.begin(), {begin, end});
    }
}

void Optimizer::arrived(const Bucket& bucket) {
    if (!waits()) {
        update(bucket.begin, std::min(bucket.end, net_.flat_elems()));
        gather(bucket);
    }
}

void Optimizer::gather(const Bucket& bucket) {
    if (bucket.shared()) {
        reducer_->gather_updates(net_.parameter_data() + bucket.begin, bucket.share_elems);
    }
}

void Optimizer::finish_gradients() {
    GradientFacts* const own = facts_.get() + rank();
    if (spec_.max_grad_norm) {
        backend_.fill_zero(&own->squares, sizeof own->squares);
    }
    for (const Range& range : ranges_) {
        float* const gradients = net_.gradient_data() + range.begin;
        if (spec_.loss_scaling) {
            backend_.unscale(range.elems(), scaling_.get(), {&own->not_finite, range.begin},
                             gradients);
        }
        if (spec_.max_grad_norm && range.counted) {
            backend_.sum_of_squares(range.elems(), gradients, {clip_word_, range.begin},
                                    &own->squares);
        }
    }
    if (shared_out()) {
        reducer_->run({.kind = Collective::Kind::all_gather,
                       .data = facts_.get(),
                       .count = sizeof(GradientFacts) / sizeof(float)},
                      "norm");
    }
    if (spec_.loss_scaling) {
        backend_.decide_step(decision_);
    }
    if (spec_.max_grad_norm) {
        const ClipArgs clip = {.most = *spec_.max_grad_norm,
                               .of_ranks = facts_.get(),
                               .ranks = ranks(),
                               .norm = &net_.stats()->gradient_norm};
        for (const Range& range : ranges_) {
            backend_.scale_to_norm(clip, range.elems(), net_.gradient_data() + range.begin);
        }
        if (ranges_.empty()) {
            backend_.scale_to_norm(clip, 0, net_.gradient_data());
        }
    }
}

void Optimizer::end_step() {
    if (waits()) {
        finish_gradients();
        update(0, net_.flat_elems());
        std::for_each(shared_.begin(), shared_.end(), [&](const Bucket& b) { gather(b); });
    }
    if (averages()) {
        move_average();
    }
}

// average += (1 - decay) * (parameters - average), as a step of SGD whose gradient are the
// parameters and whose weight decay is -1.
void Optimizer::move_average() {
    const UpdateArgs args = {.formula = Formula::sgd,
                             .scalars = average_step_.get(),
                             .weight_decay = -1.0f,
                             .skip = update_.skip};
    for (const Range& range : ranges_) {
        backend_.update(args, range.elems(), average_.get() + range.moment,
                        net_.parameter_data() + range.begin);
    }
}

void Optimizer::with_average(FunctionRef<void()> body) {
    if (!averages()) {
        return body();
    }
    KeptNet now(backend_, net_);
    const std::vector<float> average = download(average_.get());
    for (const TrainedRange& part : trained_ranges(net_, spec_)) {
        backend_.upload(net_.parameter_data() + part.begin, average.data() + part.begin,
                        static_cast<std::size_t>(part.end - part.begin) * sizeof(float));
    }
    body();
    now.put_back();
}

std::vector<std::pair<const char*, float*>> Optimizer::kept() const {
    std::vector<std::pair<const char*, float*>> all;
    for (std::size_t k = 0; k < states_.size(); ++k) {
        all.emplace_back(facts(spec_.rule).states[k], states_[k].get());
    }
    if (averages()) {
        all.emplace_back("ema", average_.get());
    }
    return all;
}

std::vector<float> Optimizer::download(const float* state) const {
    std::vector<float> flat(static_cast<std::size_t>(net_.flat_elems()));
    for (const Range& range : ranges_) {
        backend_.download(flat.data() + range.begin, state + range.moment,
                          static_cast<std::size_t>(range.elems()) * sizeof(float));
    }
    for (const Bucket& bucket : shared_) {
        for (int rank = 0; rank < ranks(); ++rank) {
            const Bucket share = bucket.share(rank);
            reducer_->communicator().broadcast(flat.data() + share.begin,
                                               static_cast<std::size_t>(share.bytes()), rank);
        }
    }
    return flat;
}

std::vector<HostTensor> Optimizer::export_state() const {
    return copies([&](const TensorVisitor& visit) { visit_state(visit); });
}

void Optimizer::visit_scalars(const TensorVisitor& visit) const {
    const auto scalar = [&](const char* name, auto number) {
        const auto value = static_cast<float>(number);
        visit(name, {}, {&value, 1});
    };
    const auto step = static_cast<float>(steps_);
    scalar("step", step);
    scalar(kStepRest, steps_ - static_cast<std::int64_t>(step));
    if (spec_.loss_scaling) {
        LossScale now;
        backend_.download(&now, scaling_.get(), sizeof now);
        scalar("scaler.scale", now.scale);
        scalar("scaler._growth_tracker", now.growth_tracker);
        scalar("scaler.skipped", now.skipped);
    }
    if (spec_.schedule.kind == ScheduleKind::plateau) {
        scalar("scheduler.best", plateau_.best);
        scalar("scheduler.num_bad_epochs", plateau_.num_bad_epochs);
        scalar("scheduler.falls", plateau_.falls);
    }
}

void Optimizer::visit_slices(const SliceVisitor& visit) const {
    visit_scalars([&](const std::string& name, const std::vector<std::int64_t>&,
                      std::span<const float> value) { visit(name, 0, value, true); });
    std::vector<float> copy;
    for (const auto& [state_name, state] : kept()) {
        for (const Parameter& parameter : net_.parameters()) {
            const std::string name = fmt::format("{}.{}", parameter.name, state_name);
            visit(name, 0, {}, true);
            for (const Range& range : ranges_) {
                const std::int64_t begin = std::max(range.begin, parameter.offset_elems);
                const std::int64_t end =
                    std::min(range.end, parameter.offset_elems + parameter.elems);
                if (begin >= end || (shared_out() && !range.counted)) {
                    continue;
                }
                const auto elems = static_cast<std::size_t>(end - begin);
                const float* values = state + range.moment + (begin - range.begin);
                if (!backend_.host_memory()) {
                    copy.resize(elems);
                    backend_.download(copy.data(), values, elems * sizeof(float));
                    values = copy.data();
                }
                visit(name, begin - parameter.offset_elems, {values, elems}, !shared_out());
            }
        }
    }
}

void Optimizer::visit_state(const TensorVisitor& visit) const {
    visit_scalars(visit);
    const std::vector<std::pair<const char*, float*>> all = kept();
    std::vector<const float*> flat;  // over all parameters
    std::vector<std::vector<float>> downloaded;
    for (const auto& [name, state] : all) {
        if (has_all() && backend_.host_memory()) {
            flat.push_back(state);
        } else {
            flat.push_back(downloaded.emplace_back(download(state)).data());
        }
    }
    for (const Parameter& parameter : net_.parameters()) {
        for (std::size_t k = 0; k < all.size(); ++k) {
            visit(fmt::format("{}.{}", parameter.name, all[k].first), parameter.shape,
                  {flat[k] + parameter.offset_elems, static_cast<std::size_t>(parameter.elems)});
        }
    }
}

void Optimizer::import_state(const std::vector<HostTensor>& tensors, const std::string& source) {
    std::map<std::string, const HostTensor*> given;
    for (const HostTensor& tensor : tensors) {
        given[tensor.name] = &tensor;
    }
    const auto take = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
        const auto found = given.find(name);
        if (found == given.end()) {
            throw input_error(
                fmt::format("{}: the optimiser's state lacks {}; take the rule it was saved with",
                            source, name));
        }
        const HostTensor& tensor = *found->second;
        if (tensor.shape != shape) {
            throw input_error(
                fmt::format("{}: {} of the optimiser's state has the shape [{}], "
                            "expected [{}]; take the model it was saved with",
                            source, name, fmt::join(tensor.shape, ", "), fmt::join(shape, ", ")));
        }
        given.erase(found);
        return &tensor.values;
    };
    const auto take_count = [&](const char* name) {
        const float value = take(name, {})->front();
        if (!(value >= 0.0f && value <= 0x1p24f)) {
            throw input_error(fmt::format("{}: {} of the optimiser's state is {}, expected a count",
                                          source, name, value));
        }
        return static_cast<std::int32_t>(value);
    };
    const float step = take("step", {})->front();
    const float rest = given.contains(kStepRest) ? take(kStepRest, {})->front() : 0.0f;
    LossScale scaling;
    if (spec_.loss_scaling) {
        scaling.scale = take("scaler.scale", {})->front();
        scaling.growth_tracker = take_count("scaler._growth_tracker");
        scaling.skipped = take_count("scaler.skipped");
    }
    Plateau plateau;
    if (spec_.schedule.kind == ScheduleKind::plateau) {
        plateau.best = take("scheduler.best", {})->front();
        plateau.num_bad_epochs = take_count("scheduler.num_bad_epochs");
        plateau.falls = take_count("scheduler.falls");
    }
    // All are looked at before any is taken.
    std::vector<std::pair<float*, std::vector<float>>> copies;
    for (const auto& [name, state] : kept()) {
        std::vector<float> flat(static_cast<std::size_t>(net_.flat_elems()));
        for (const Parameter& parameter : net_.parameters()) {
            const std::vector<float>& values =
                *take(fmt::format("{}.{}", parameter.name, name), parameter.shape);
            std::copy(values.begin(), values.end(), flat.begin() + parameter.offset_elems);
        }
        copies.emplace_back(state, std::move(flat));
    }
    if (!given.empty()) {
        throw input_error(fmt::format(
            "{}: the optimiser's state has {}, for which there is no place here; take the rule and "
            "the model it was saved with",
            source, printable(given.begin()->first)));
    }
    if (!(step >= 0.0f && step < 0x1p48f && step == std::floor(step) &&
          std::abs(rest) <= step * 0x1p-24f && rest == std::floor(rest))) {
        throw input_error(
            fmt::format("{}: step of the optimiser's state is {} and {} {}, expected a number of "
                        "steps and what its rounding left",
                        source, step, kStepRest, rest));
    }
    steps_ = static_cast<std::int64_t>(step) + static_cast<std::int64_t>(rest);
    plateau_ = plateau;
    if (spec_.loss_scaling) {
        scaling.updates = static_cast<std::int32_t>(steps_) - scaling.skipped;
        backend_.upload(scaling_.get(), &scaling, sizeof scaling);
    }
    for (const auto& [to, flat] : copies) {
        for (const Range& range : ranges_) {
            backend_.upload(to + range.moment, flat.data() + range.begin,
                            static_cast<std::size_t>(range.elems()) * sizeof(float));
        }
    }
}

void Optimizer::update(std::int64_t begin, std::int64_t end) {
    for (const Range& range : ranges_) {
        const std::int64_t from = std::max(begin, range.begin), to = std::min(end, range.end);
        if (from < to) {
            update_around(range, from, to);
        }
    }
}

// Updates what is before and behind a part that the pass has updated, in one call.
void Optimizer::update_around(const Range& range, std::int64_t begin, std::int64_t end) {
    for (auto next = updated_.begin(); begin < end;) {
        const auto last = updated_.end();
        if (next != last && next->begin <= begin) {
            begin = std::max(begin, next++->end);
            continue;
        }
        const Bucket done = next != last && next->begin < end ? *next++ : Bucket{end, end};
        const std::int64_t until = next == last ? end : std::min(end, next->begin);
        update_range(range, begin, until, {done.begin - begin, done.elems()});
        begin = until;
    }
}

void Optimizer::update_range(const Range& range, std::int64_t begin, std::int64_t end,
                             const UpdateGap& gap) {
    UpdateArgs args = update_;
    if (ranges_.size() > 1) {
        scale(args, range.scales);
    }
    args.finite.first_elem = begin;
    args.gap = gap;
    for (std::size_t k = 0; k < states_.size(); ++k) {
        args.states[k] += range.moment + begin - range.begin;
    }
    backend_.update(args, end - begin, net_.parameter_data() + begin, net_.gradient_data() + begin);
}

}  // namespace gyre::train
