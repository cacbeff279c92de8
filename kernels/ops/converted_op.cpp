#include "kernels/ops/converted_op.hpp"

#include <utility>
#include <variant>

#include "base/round_up.hpp"

namespace gyre {
namespace {

constexpr std::int64_t kAlignElems = 64;

std::int64_t aligned(std::int64_t elems) {
    return round_up(elems, kAlignElems);
}

template <typename Spec>
const Shape& input_of(const Spec& spec) {
    if constexpr (requires { spec.shape.in; }) {
        return spec.shape.in;
    } else {
        return spec.in;
    }
}

template <typename Spec>
Shape second_input_of(const Spec& spec) {
    if constexpr (requires { spec.in2; }) {
        return spec.in2;
    } else {
        return input_of(spec);
    }
}

// The number of weights that are operands of products; 0: none.
template <typename Spec>
std::int64_t weight_elems(const Spec& spec) {
    if constexpr (requires { spec.shape.weight_elems(); }) {
        return spec.shape.weight_elems();
    } else {
        return 0;
    }
}

OpNeeds needs_of(const Op& op) {
    OpNeeds needs = op.needs();
    needs.together = false;  // without phases there is room for one leaf's widened tensors
    return needs;
}

class ConvertedOp final : public Op {
 public:
    ConvertedOp(WideMemory& memory, std::unique_ptr<Op> op, const OpSpec& spec,
                const OpSizes& sizes, DataType type)
        : memory_(memory),
          backend_(memory.backend()),
          op_(std::move(op)),
          needs_(needs_of(*op_)),
          type_(type),
          in_(std::visit([](const auto& each) { return input_of(each); }, spec)),
          in2_(std::visit([](const auto& each) { return second_input_of(each); }, spec)),
          out_(std::visit([](const auto& each) { return each.out(); }, spec)),
          weight_elems_(std::visit([](const auto& each) { return weight_elems(each); }, spec)) {
        const std::int64_t in = aligned(backend_.activation_elems(in_, sizes.most()));
        const std::int64_t in2 = aligned(backend_.activation_elems(in2_, sizes.most()));
        const std::int64_t out = aligned(backend_.activation_elems(out_, sizes.most()));
        x_at_ = aligned(weight_elems_);
        y_at_ = x_at_ + in;
        dx_at_ = y_at_ + out;
        dy_at_ = dx_at_ + in;
        x2_at_ = needs_.writes_dx2 ? dy_at_ + out : dx_at_;
        dx2_at_ = x2_at_ + (needs_.writes_dx2 ? in2 : 0);
        leaf_elems_ = needs_.writes_dx2 ? dx2_at_ + in2 : dy_at_ + out;
        memory.reserve(leaf_elems_ * (needs_.phases > 1 ? sizes.leaves : 1));
    }

    OpNeeds needs() const override { return needs_; }

    void forward(const Batch& batch, const OpIo& io) override {
        OpIo wide = wide_input(batch, io);
        op_->forward(batch, wide);
        narrow(batch, out_, wide.y, io.y);
    }
    // The widened tensors of all leaves are kept for the next phases.
    void forward_phase(const Batch& batch, const OpIo& io, int phase) override {
        const OpIo wide = phase == 0 ? wide_input(batch, io) : wide_io(batch, io);
        op_->forward_phase(batch, wide, phase);
        if (phase + 1 == needs_.phases) {
            narrow(batch, out_, wide.y, io.y);
        }
    }

    // The widened tensors are kept for the next two functions.
    void backward_begin(const Batch& batch, const OpIo& io) override {
        const OpIo wide = wide_io(batch, io);
        if (!needs_.in_place) {
            widen(batch, out_, io.dy, wide.dy);
        }
        if (needs_.backward_reads_x) {
            widen(batch, in_, io.x, wide.x);
        }
        if (needs_.backward_reads_y) {
            widen(batch, out_, io.y, wide.y);
        }
        if (needs_.backward_reads_x2) {
            widen(batch, in2_, io.x2, at(x2_at_));
        }
        op_->backward_begin(batch, wide);
        if (needs_.backward_reads_y && !needs_.in_place) {
            narrow(batch, out_, wide.dy, io.dy);  // a ReLU may have changed it
        }
    }

    void backward_params(const Batch& batch, const OpIo& io) override {
        const bool others = io.dy.type == DataType::float32;  // such as all ranks' factors
        op_->backward_params(batch, others ? io : wide_io(batch, io));
    }

    void backward_input(const Batch& batch, const OpIo& io) override {
        OpIo wide = wide_io(batch, io);
        round_weight(io, wide);
        if (needs_.in_place) {
            widen(batch, in_, io.dx, wide.dx);
        }
        if (needs_.writes_dx2) {
            wide.x2 = at(x2_at_);
            wide.dx = io.dx ? wide.dx : Tensor();
            wide.dx2 = io.dx2 ? at(dx2_at_) : Tensor();
        }
        op_->backward_input(batch, wide);
        if (io.dx) {
            narrow(batch, in_, wide.dx, io.dx);
        }
        if (io.dx2) {
            narrow(batch, in2_, wide.dx2, io.dx2);
        }
    }

 private:
    float* at(std::int64_t elem) const { return memory_.get() + elem; }
    OpIo wide_io(const Batch& batch, const OpIo& io) const {
        const std::int64_t leaf = needs_.phases > 1 ? batch.leaf * leaf_elems_ : 0;
        OpIo wide = io;
        wide.x2 = wide.dx2 = {};
        wide.x = at(leaf + x_at_);
        wide.y = at(leaf + (needs_.in_place ? x_at_ : y_at_));
        wide.dy = at(leaf + dy_at_);
        wide.dx = at(leaf + (needs_.in_place ? dy_at_ : dx_at_));
        return wide;
    }
    OpIo wide_input(const Batch& batch, const OpIo& io) {
        OpIo wide = wide_io(batch, io);
        if (io.x2) {
            wide.x2 = at(x2_at_);
            widen(batch, in2_, io.x2, wide.x2);
        }
        widen(batch, in_, needs_.in_place ? io.y : io.x, wide.x);
        round_weight(io, wide);
        return wide;
    }
    void widen(const Batch& batch, const Shape& shape, const Tensor& from, const Tensor& to) {
        backend_.widen(type_, backend_.activation_elems(shape, batch.n), from.narrow(), to.f32());
    }
    void narrow(const Batch& batch, const Shape& shape, const Tensor& from, const Tensor& to) {
        backend_.narrow(type_, backend_.activation_elems(shape, batch.n), from.f32(), to.narrow());
    }
    void round_weight(const OpIo& io, OpIo& wide) {
        if (weight_elems_ > 0) {
            wide.params[0] = at(0);
            backend_.round_to(type_, weight_elems_, io.params[0].f32(), at(0));
        }
    }

    WideMemory& memory_;
    Backend& backend_;
    const std::unique_ptr<Op> op_;
    const OpNeeds needs_;
    const DataType type_;
    const Shape in_, in2_, out_;
    const std::int64_t weight_elems_;
    std::int64_t x_at_, y_at_, dx_at_, dy_at_, x2_at_, dx2_at_;  // offsets; the weight comes first
    std::int64_t leaf_elems_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_op(WideMemory& memory, const std::string& name, const OpSpec& spec,
                            const OpSizes& sizes, DataType type) {
    Backend& backend = memory.backend();
    std::unique_ptr<Op> op = backend.make(name, spec, sizes, type);
    if (op != nullptr || type == DataType::float32) {
        return op;
    }
    op = backend.make(name, spec, sizes);
    return op == nullptr ? nullptr
                         : std::make_unique<ConvertedOp>(memory, std::move(op), spec, sizes, type);
}

}  // namespace gyre
