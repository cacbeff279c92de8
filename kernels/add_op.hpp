// y = x + x2, as in a residual connection (He et al., Deep residual learning, CVPR 2016): in place,
// on any backend, whatever its layout. The gradient of both inputs is dy itself, which the net
// passes on.
#pragma once

#include "kernels/backend.hpp"

namespace gyre {

class AddOp final : public Op {
 public:
    AddOp(Backend& backend, const AddSpec& spec) : backend_(backend), spec_(spec) {}
    OpNeeds needs() const override { return {.in_place = true, .backward_reads_x = false}; }
    void forward(const Batch& batch, const OpIo& io) override {
        backend_.add(backend_.activation_elems(spec_.in, batch.n), io.x2.f32(), io.y.f32());
    }
    void backward_input(const Batch&, const OpIo&) override {}

 private:
    Backend& backend_;
    const AddSpec spec_;
};

}  // namespace gyre
