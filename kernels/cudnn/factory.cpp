#include "kernels/cudnn/factory.hpp"

#include <fmt/format.h>

#include <variant>

#include "kernels/cudnn/handles.hpp"

namespace gyre::cuda {
#if defined(GYRE_WITH_LIBRARIES)
namespace {

class LibraryFactory final : public KernelFactory {
 public:
    LibraryFactory(const Context& context, bool deterministic) : handles_(context, deterministic) {}

    std::string description() const override {
        const std::size_t cudnn = handles_.cudnn.cudnnGetVersion(),
                          lt = handles_.lt.cublasLtGetVersion();
        return fmt::format("cuDNN {}.{}.{} and cuBLASLt {}.{}.{}", cudnn / 10000, cudnn / 100 % 100,
                           cudnn % 100, lt / 10000, lt / 100 % 100, lt % 100);
    }
    std::string choices() const override { return handles_.remarks; }

    std::unique_ptr<Op> make(const std::string& name, const OpSpec& spec, const OpSizes& sizes,
                             DataType type) override {
        if (type != DataType::float32) {
            return nullptr;
        }
        return std::visit(
            [&](const auto& each) -> std::unique_ptr<Op> {
                if constexpr (requires { make_op(handles_, name, each, sizes); }) {
                    return make_op(handles_, name, each, sizes);
                } else {
                    return nullptr;
                }
            },
            spec);
    }

 private:
    Handles handles_;
};

}  // namespace

std::unique_ptr<KernelFactory> make_library_factory(const Context& context, bool deterministic) {
    return std::make_unique<LibraryFactory>(context, deterministic);
}

#else  // no libraries

namespace {

Error not_built_in() {
    return usage_error(
        "this gyre was built without cuDNN, because cudnn.h (cuDNN 9 or newer) or cublasLt.h was "
        "not found; install cuDNN's headers and build again, or use `kernels` ours");
}

}  // namespace

struct LogSoftmax::State {};
LogSoftmax::LogSoftmax(const Context&) {
    throw not_built_in();
}
LogSoftmax::~LogSoftmax() = default;
void LogSoftmax::forward_backward(int, int, const float*, float*, const float*, float*) {}

std::unique_ptr<KernelFactory> make_library_factory(const Context&, bool) {
    throw not_built_in();
}

#endif
}  // namespace gyre::cuda
