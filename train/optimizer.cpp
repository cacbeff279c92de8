#include "train/optimizer.hpp"

namespace gyre {

Optimizer::Optimizer(Backend& backend, Net& net, const TrainOptions& options)
    : rule_(options.optimizer == "sgd" ? Rule::sgd : Rule::adam),
      backend_(backend),
      net_(net),
      max_grad_norm_(options.max_grad_norm) {
    const bool adamw = options.optimizer == "adamw";
    if (rule_ == Rule::sgd) {
        sgd_ = {options.learning_rate.value_or(0.01f), options.momentum,
                options.weight_decay.value_or(0.0f), options.nesterov};
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
                 0};
        first_ = {backend, net.flat_elems()};
        second_ = {backend, net.flat_elems()};
    }
}

void Optimizer::step() {
    if (max_grad_norm_) {
        backend_.clip_norm(net_.flat_elems(), *max_grad_norm_, net_.gradient_data());
    }
    if (rule_ == Rule::sgd) {
        backend_.sgd_step(sgd_, net_.flat_elems(), net_.parameter_data(), net_.gradient_data(),
                          first_.get());
    } else {
        ++adam_.step;
        backend_.adam_step(adam_, net_.flat_elems(), net_.parameter_data(), net_.gradient_data(),
                           first_.get(), second_.get());
    }
}

}  // namespace gyre
