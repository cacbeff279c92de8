#include "train/optimizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/base/error.hpp"

namespace gyre::train {

Optimizer::Rule Optimizer::rule_of(const TrainOptions& options) {
    const bool sgd = options.optimizer == "sgd";
    if (!sgd && options.optimizer != "adam" && options.optimizer != "adamw") {
        throw usage_error(
            fmt::format("--optimizer {}: it must be sgd, adam or adamw", options.optimizer));
    }
    if (options.nesterov && (!sgd || options.momentum == 0.0f)) {
        throw usage_error("--nesterov needs --optimizer sgd and --momentum greater than 0");
    }
    if (sgd && !(options.momentum >= 0.0f && options.momentum < 1.0f)) {
        throw usage_error("--momentum must be at least 0 and less than 1");
    }
    if (options.betas.size() != 2) {
        throw usage_error("--betas must be two numbers");
    }
    return sgd ? Rule::sgd : Rule::adam;
}

Optimizer::Optimizer(Backend& backend, Net& net, const TrainOptions& options)
    : rule_(rule_of(options)),
      backend_(backend),
      net_(net),
      max_grad_norm_(options.max_grad_norm),
      learning_rate_(options.learning_rate.value_or(rule_ == Rule::sgd ? 0.01f : 0.001f)),
      scalars_(backend, 1) {
    if (rule_ == Rule::sgd) {
        sgd_ = {.scalars = scalars_.get(),
                .momentum = options.momentum,
                .weight_decay = options.weight_decay.value_or(0.0f),
                .nesterov = options.nesterov};
        if (sgd_.momentum != 0.0f) {
            first_ = {backend, net.flat_elems()};
        }
    } else {
        const bool adamw = options.optimizer == "adamw";
        const float decay = options.weight_decay.value_or(adamw ? 0.01f : 0.0f);
        decoupled_decay_ = adamw ? decay : 0.0f;
        adam_ = {.scalars = scalars_.get(),
                 .beta1 = options.betas[0],
                 .beta2 = options.betas[1],
                 .epsilon = options.epsilon,
                 .weight_decay = adamw ? 0.0f : decay};
        first_ = {backend, net.flat_elems()};
        second_ = {backend, net.flat_elems()};
    }
}

// In double precision, as PyTorch does.
StepScalars Optimizer::scalars(std::int64_t step) const {
    StepScalars result = {.learning_rate = learning_rate_};
    if (rule_ == Rule::adam) {
        const double rate{learning_rate_};
        const auto remaining = [&](float beta) {
            return 1.0 - std::pow(double{beta}, static_cast<double>(step));
        };
        result.adam_step_size = static_cast<float>(rate / remaining(adam_.beta1));
        result.adam_correction = static_cast<float>(1.0 / std::sqrt(remaining(adam_.beta2)));
        result.adam_shrink = static_cast<float>(1.0 - rate * double{decoupled_decay_});
    }
    return result;
}

void Optimizer::next_step(StepScalars& pinned) {
    const StepScalars now = scalars(++steps_);
    if (written_ != now) {  // SGD at a constant rate has written them once
        pinned = now;
        backend_.upload_async(Device::Stream::compute, scalars_.get(), &pinned, sizeof pinned);
        written_ = now;
    }
}

void Optimizer::begin_step(std::int32_t* not_finite) {
    sgd_.finite.word = adam_.finite.word = max_grad_norm_ ? nullptr : not_finite;
    clip_.word = not_finite;
}

void Optimizer::arrived(std::int64_t begin, std::int64_t end) {
    if (!max_grad_norm_) {
        update(begin, std::min(end, net_.flat_elems()));
    }
}

void Optimizer::end_step() {
    if (max_grad_norm_) {
        backend_.clip_norm(net_.flat_elems(), *max_grad_norm_, net_.gradient_data(), clip_);
        update(0, net_.flat_elems());
    }
}

void Optimizer::update(std::int64_t begin, std::int64_t end) {
    if (begin >= end) {
        return;
    }
    float* p = net_.parameter_data() + begin;
    const float* g = net_.gradient_data() + begin;
    if (rule_ == Rule::sgd) {
        sgd_.finite.first_elem = begin;
        backend_.sgd_step(sgd_, end - begin, p, g,
                          first_.get() == nullptr ? nullptr : first_.get() + begin);
    } else {
        adam_.finite.first_elem = begin;
        backend_.adam_step(adam_, end - begin, p, g, first_.get() + begin, second_.get() + begin);
    }
}

}  // namespace gyre::train
