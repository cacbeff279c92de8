// gyre's own operations on a GPU, and the interface of a set of operations.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {

// gyre's own operations, each in the .cu file of its name. A spec is unsupported if it has no line
// here or if null is returned. The overloads with a DataType also support 16-bit values.
std::unique_ptr<Op> make_op(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes,
                            DataType type);
std::unique_ptr<Op> make_op(const Context& context, const GroupedConv2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes& sizes,
                            DataType type);
std::unique_ptr<Op> make_op(const Context& context, const MaxPool2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const AvgPool2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const ReluSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const ActivationSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const BatchNorm2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const DropoutSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const AddSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const MulSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const ConcatSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const ChannelsSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const GroupNormSpec& spec,
                            const OpSizes& sizes);

// One set of kernels. Its operations refer to it and to the context that it was created with.
class KernelFactory : public OpFactory {
 public:
    // The kernels' name, as text for reports.
    virtual std::string description() const = 0;
    // For -v: the choice for each layer and its reason; empty if there was no choice.
    virtual std::string choices() const { return {}; }
};

std::unique_ptr<KernelFactory> make_own_factory(const Context& context);

// Calls body(n, training) for each number of images that kernels are chosen for, training first.
template <typename Body>
void for_each_size(const OpSizes& sizes, const Body& body) {
    const auto each = [&](const std::vector<int>& named, int most, bool training) {
        for (const int n : named.empty() && most > 0 ? std::vector<int>{most} : named) {
            if (n > 0) {
                body(n, training);
            }
        }
    };
    each(sizes.train_sizes, sizes.train_images, true);
    each(sizes.eval_sizes, sizes.eval_images, false);
}

// Zeroes the gradients of a weight and a bias, for a pass without images.
void zero_gradients(const Context& context, std::int64_t weights, std::int64_t biases,
                    const OpIo& io);

}  // namespace gyre::SIMT_NAMESPACE
