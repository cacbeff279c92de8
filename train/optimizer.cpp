#include "train/optimizer.hpp"

#include <algorithm>

namespace gyre::train {

Optimizer::Optimizer(Backend& backend, Net& net, const TrainOptions& options)
    : rule_(options.optimizer == "sgd" ? Rule::sgd : Rule::adam),
      backend_(backend),
      net_(net),
      max_grad_norm_(options.max_grad_norm) {
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
