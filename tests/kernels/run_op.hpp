// One operation of a backend, run with plain pointers.
#pragma once

#include "kernels/ops/backend.hpp"

namespace gyre::test {

class RunOp {
 public:
    // For passes of at most n images. batch is initially a training pass of n images.
    RunOp(Backend& backend, const OpSpec& spec, int n, DataType type = DataType::float32)
        : batch{.n = n, .training = true},
          op_(backend.make("layer", spec, {.train_images = n, .eval_images = n}, type)),
          saved_(backend, static_cast<std::int64_t>(needs().saved_bytes)) {}

    OpNeeds needs() const { return op_->needs(); }
    Op& op() { return *op_; }
    // The functions of Op; `saved` is added to their arguments.
    void forward(OpIo io) {
        io.saved = saved_.get();
        op_->forward(batch, io);
    }
    // Computes the gradients that have a destination in grads, dx and dx2.
    void backward(OpIo io) {
        io.saved = saved_.get();
        op_->backward_begin(batch, io);
        if (io.grads[0]) {
            op_->backward_params(batch, io);
        }
        if (io.dx || io.dx2) {
            op_->backward_input(batch, io);
        }
    }

    Batch batch;

 private:
    std::unique_ptr<Op> op_;
    DeviceBuffer<std::uint8_t> saved_;
};

}  // namespace gyre::test
