#include "train/optimizer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "kernels/base/error.hpp"
#include "kernels/base/printable.hpp"

namespace gyre::train {
namespace {

OptimizerSpec complete(OptimizerSpec spec) {
    check(spec);
    const bool sgd = spec.rule == UpdateRule::sgd;
    spec.learning_rate = spec.learning_rate.value_or(sgd ? 0.01f : 0.001f);
    spec.weight_decay = spec.weight_decay.value_or(spec.rule == UpdateRule::adamw ? 0.01f : 0.0f);
    return spec;
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

Optimizer::Optimizer(Backend& backend, Net& net, const OptimizerSpec& spec, int most_steps)
    : backend_(backend), net_(net), spec_(complete(spec)), scalars_(backend, most_steps) {
    written_.reserve(static_cast<std::size_t>(most_steps));
    if (spec_.rule == UpdateRule::sgd) {
        sgd_ = {.momentum = spec_.momentum,
                .weight_decay = *spec_.weight_decay,
                .nesterov = spec_.nesterov};
        if (sgd_.momentum != 0.0f) {
            first_ = {backend, net.flat_elems()};
        }
    } else {
        adam_ = {.beta1 = spec_.betas[0],
                 .beta2 = spec_.betas[1],
                 .epsilon = spec_.epsilon,
                 .weight_decay = spec_.rule == UpdateRule::adam ? *spec_.weight_decay : 0.0f};
        first_ = {backend, net.flat_elems()};
        second_ = {backend, net.flat_elems()};
    }
}

// In double precision, as PyTorch does.
StepScalars Optimizer::scalars(std::int64_t step) const {
    const double rate = scheduled_rate(spec_.schedule, double{*spec_.learning_rate}, step - 1);
    StepScalars result = {.learning_rate = static_cast<float>(rate)};
    if (spec_.rule == UpdateRule::sgd) {
        return result;
    }
    const auto remaining = [&](float beta) {
        return 1.0 - std::pow(double{beta}, static_cast<double>(step));
    };
    result.adam_step_size = static_cast<float>(rate / remaining(spec_.betas[0]));
    result.adam_correction = static_cast<float>(1.0 / std::sqrt(remaining(spec_.betas[1])));
    if (spec_.rule == UpdateRule::adamw) {
        result.adam_shrink = static_cast<float>(1.0 - rate * double{*spec_.weight_decay});
    }
    return result;
}

void Optimizer::next_steps(StepScalars* pinned, int steps) {
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
    sgd_.scalars = adam_.scalars = scalars_.get() + index;
    sgd_.finite.word = adam_.finite.word = spec_.max_grad_norm ? nullptr : not_finite;
    clip_.word = not_finite;
}

void Optimizer::arrived(std::int64_t begin, std::int64_t end) {
    if (!spec_.max_grad_norm) {
        update(begin, std::min(end, net_.flat_elems()));
    }
}

void Optimizer::end_step() {
    if (spec_.max_grad_norm) {
        backend_.clip_norm(net_.flat_elems(), *spec_.max_grad_norm, net_.gradient_data(), clip_);
        update(0, net_.flat_elems());
    }
}

std::vector<Optimizer::Moment> Optimizer::moments() const {
    if (spec_.rule != UpdateRule::sgd) {
        return {{"exp_avg", first_.get()}, {"exp_avg_sq", second_.get()}};
    }
    if (first_.get() != nullptr) {
        return {{"momentum_buffer", first_.get()}};
    }
    return {};
}

std::vector<HostTensor> Optimizer::export_state() const {
    std::vector<HostTensor> tensors = {{"step", {}, {static_cast<float>(steps_)}}};
    for (const Parameter& parameter : net_.parameters()) {
        for (const Moment& moment : moments()) {
            HostTensor& tensor = tensors.emplace_back();
            tensor.name = fmt::format("{}.{}", parameter.name, moment.name);
            tensor.shape = parameter.shape;
            tensor.values.resize(static_cast<std::size_t>(parameter.elems));
            backend_.download(tensor.values.data(), moment.values + parameter.offset_elems,
                              tensor.values.size() * sizeof(float));
        }
    }
    return tensors;
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
    const std::vector<float>& step = *take("step", {});
    // All are looked at before any is taken.
    std::vector<std::pair<float*, const std::vector<float>*>> copies;
    for (const Parameter& parameter : net_.parameters()) {
        for (const Moment& moment : moments()) {
            copies.emplace_back(
                moment.values + parameter.offset_elems,
                take(fmt::format("{}.{}", parameter.name, moment.name), parameter.shape));
        }
    }
    if (!given.empty()) {
        throw input_error(fmt::format(
            "{}: the optimiser's state has {}, for which there is no place here; take the rule and "
            "the model it was saved with",
            source, printable(given.begin()->first)));
    }
    if (!(step[0] >= 0.0f && step[0] < 0x1p62f && step[0] == std::floor(step[0]))) {
        throw input_error(
            fmt::format("{}: step of the optimiser's state is {}, expected a number of steps",
                        source, step[0]));
    }
    steps_ = static_cast<std::int64_t>(step[0]);
    for (const auto& [to, values] : copies) {
        backend_.upload(to, values->data(), values->size() * sizeof(float));
    }
}

void Optimizer::update(std::int64_t begin, std::int64_t end) {
    if (begin >= end) {
        return;
    }
    float* p = net_.parameter_data() + begin;
    const float* g = net_.gradient_data() + begin;
    if (spec_.rule == UpdateRule::sgd) {
        sgd_.finite.first_elem = begin;
        backend_.sgd_step(sgd_, end - begin, p, g,
                          first_.get() == nullptr ? nullptr : first_.get() + begin);
    } else {
        adam_.finite.first_elem = begin;
        backend_.adam_step(adam_, end - begin, p, g, first_.get() + begin, second_.get() + begin);
    }
}

}  // namespace gyre::train
