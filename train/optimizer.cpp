#include "train/optimizer.hpp"

#include <fmt/format.h>

#include <algorithm>

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
    : rule_(rule_of(options)), backend_(backend), net_(net), max_grad_norm_(options.max_grad_norm) {
    const bool adamw = options.optimizer == "adamw";
    if (rule_ == Rule::sgd) {
        sgd_ = {options.learning_rate.value_or(0.01f),
                options.momentum,
                options.weight_decay.value_or(0.0f),
                options.nesterov,
                {}};
        if (sgd_.momentum != 0.0f) {
            first_ = {backend, net.flat_elems()};
        }
    } else {
        adam_ = {options.learning_rate.value_or(0.001f),
                 options.betas[0],
                 options.betas[1],
                 options.epsilon,
                 options.weight_decay.value_or(adamw ? 0.01f : 0.0f),
                 adamw,
                 nullptr,
                 {}};
        adam_state_ = {backend, 1};
        adam_.state = adam_state_.get();
        first_ = {backend, net.flat_elems()};
        second_ = {backend, net.flat_elems()};
    }
}

void Optimizer::begin_step(std::int32_t* not_finite) {
    if (rule_ == Rule::adam) {
        backend_.adam_begin_step(adam_);
    }
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
