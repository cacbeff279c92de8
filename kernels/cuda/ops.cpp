#include "kernels/cuda/ops.hpp"

#include <variant>

namespace gyre::SIMT_NAMESPACE {

Workspace::Workspace(Stream& stream)
    : stream_(stream),
      counts_(static_cast<std::uint32_t*>(allocate(kCounts * sizeof(std::uint32_t)))) {
    stream.fill_zero(counts_, kCounts * sizeof(std::uint32_t));
}
void Workspace::reserve(std::size_t count) {
    if (count > bytes_) {
        stream_.synchronize();
        if (captured_) {
            outgrown_.push_back(memory_);
            captured_ = false;
        } else {
            release(memory_);
        }
        memory_ = nullptr;
        bytes_ = 0;
        memory_ = allocate(count);
        bytes_ = count;
    }
}

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
