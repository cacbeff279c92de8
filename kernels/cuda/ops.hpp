// The operations that a GPU backend has: gyre's own, the CUDA libraries', and the faster of both.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/cuda/kernels.hpp"

namespace gyre::SIMT_NAMESPACE {

// gyre's own operations, each in the .cu file of its name. A spec without a line here, or for which
// null is returned, is not offered. One for values in 16 bits is an overload with a DataType more.
std::unique_ptr<Op> make_op(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes,
                            DataType type);
std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes& sizes,
                            DataType type);
std::unique_ptr<Op> make_op(const Context& context, const MaxPool2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const AvgPool2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const ReluSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const BatchNorm2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const DropoutSpec& spec, const OpSizes& sizes);
std::unique_ptr<Op> make_op(const Context& context, const AddSpec& spec, const OpSizes& sizes);

// One set of kernels. Its operations refer to it and to the context it was made with.
class KernelFactory : public OpFactory {
 public:
    // What computes, as text.
    virtual std::string description() const = 0;
    // What was chosen for each layer and why, for -v; empty where there was no choice.
    virtual std::string choices() const { return {}; }
};

std::unique_ptr<KernelFactory> make_own_factory(const Context& context);
// For each direction and named number of images the faster of both, timed in a graph as the
// operation is made; timings are read from and added to options.choices_file, under the name of
// the GPU. Max-pooling and batch normalisation are chosen as a whole: what a forward pass keeps,
// only its own backward pass reads. What the library lacks is ours.
std::unique_ptr<KernelFactory> make_auto_factory(const Context& context, const GpuOptions& options,
                                                 const std::string& gpu,
                                                 std::unique_ptr<KernelFactory> own,
                                                 std::unique_ptr<KernelFactory> library);

// body(n, training) for each number of images that kernels are chosen for, training first.
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

// The gradients of a weight and a bias that no image has: zeros.
void zero_gradients(const Context& context, std::int64_t weights, std::int64_t biases,
                    const OpIo& io);

}  // namespace gyre::SIMT_NAMESPACE
