// The CPU's operations. Each has its own file with its kernels, plan and Op, and is registered by a
// line here.
#pragma once

#include <memory>

#include "kernels/cpu/context.hpp"
#include "kernels/ops/op.hpp"

namespace gyre::cpu {

std::unique_ptr<Op> make_op(const Context&, const Conv2dSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const GroupedConv2dSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const LinearSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const MaxPool2dSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const AvgPool2dSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const ReluSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const ActivationSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const BatchNorm2dSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const DropoutSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const AddSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const MulSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const ConcatSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const ChannelsSpec&, const OpSizes&);
std::unique_ptr<Op> make_op(const Context&, const GroupNormSpec&, const OpSizes&);

// Operations on bfloat16 values.
std::unique_ptr<Op> make_bf16_op(const Context&, const Conv2dSpec&, const OpSizes&);
std::unique_ptr<Op> make_bf16_op(const Context&, const MaxPool2dSpec&, const OpSizes&);
std::unique_ptr<Op> make_bf16_op(const Context&, const BatchNorm2dSpec&, const OpSizes&);
std::unique_ptr<Op> make_bf16_op(const Context&, const ReluSpec&, const OpSizes&);
std::unique_ptr<Op> make_bf16_op(const Context&, const AddSpec&, const OpSizes&);

// y += x (add.cpp).
void add(const Context&, std::int64_t elems, const float* x, float* y);

// Fallbacks for every other spec: the CPU has no such operation.
template <typename Spec>
std::unique_ptr<Op> make_op(const Context&, const Spec&, const OpSizes&) {
    return nullptr;
}
template <typename Spec>
std::unique_ptr<Op> make_bf16_op(const Context&, const Spec&, const OpSizes&) {
    return nullptr;
}

}  // namespace gyre::cpu
