#include "kernels/cuda/ops.hpp"

#include <variant>

namespace gyre::SIMT_NAMESPACE {
namespace {

class OwnFactory final : public KernelFactory {
 public:
    explicit OwnFactory(const Context& context) : context_(context) {}
    std::string description() const override { return "gyre's own kernels"; }

    std::unique_ptr<Op> make(const std::string&, const OpSpec& spec, const OpSizes& sizes,
                             DataType type) override {
        return std::visit(
            [&](const auto& each) -> std::unique_ptr<Op> {
                if (type != DataType::float32) {
                    if constexpr (requires { make_op(context_, each, sizes, type); }) {
                        return make_op(context_, each, sizes, type);
                    }
                } else if constexpr (requires { make_op(context_, each, sizes); }) {
                    return make_op(context_, each, sizes);
                }
                return nullptr;
            },
            spec);
    }

 private:
    const Context context_;
};

}  // namespace

std::unique_ptr<KernelFactory> make_own_factory(const Context& context) {
    return std::make_unique<OwnFactory>(context);
}

void zero_gradients(const Context& context, std::int64_t weights, std::int64_t biases,
                    const OpIo& io) {
    fill(context, weights, 0.0f, io.grads[0].f32());
    fill(context, biases, 0.0f, io.grads[1].f32());
}

}  // namespace gyre::SIMT_NAMESPACE
