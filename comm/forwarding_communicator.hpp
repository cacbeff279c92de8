// A communicator around another, which does all that is not overridden.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.hpp"

namespace gyre::comm {

class ForwardingCommunicator : public Communicator {
 public:
    explicit ForwardingCommunicator(std::shared_ptr<Communicator> inner)
        : inner_(std::move(inner)) {}

    std::string description() const override { return inner_->description(); }
    int rank() const override { return inner_->rank(); }
    int size() const override { return inner_->size(); }
    int local_rank() const override { return inner_->local_rank(); }
    int local_size() const override { return inner_->local_size(); }
    std::string address() const override { return inner_->address(); }
    bool own_terminal() const override { return inner_->own_terminal(); }
    bool use_device(Device& device) override { return inner_->use_device(device); }
    std::unique_ptr<Request> start(const Collective& collective) override {
        return inner_->start(collective);
    }
    bool sums_in_tree() const override { return inner_->sums_in_tree(); }
    bool can_sum_in_tree() const override { return inner_->can_sum_in_tree(); }
    std::unique_ptr<Request> track(std::unique_ptr<Request> operation,
                                   const Label& label) override {
        return inner_->track(std::move(operation), label);
    }
    void allreduce_sum(std::span<double> data) override { inner_->allreduce_sum(data); }
    void broadcast(void* data, std::size_t bytes, int root) override {
        inner_->broadcast(data, bytes, root);
    }
    void barrier() override { inner_->barrier(); }
    std::string async_error() override { return inner_->async_error(); }
    [[noreturn]] void abort(int exit_code) noexcept override {
        inner_->abort(exit_code);
        std::_Exit(exit_code);
    }

 protected:
    Communicator& inner() const { return *inner_; }

 private:
    const std::shared_ptr<Communicator> inner_;
};

}  // namespace gyre::comm
