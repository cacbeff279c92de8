// gyre's own kernels as LayerKernels.
#include <algorithm>

#include "kernels/cuda/layer_kernels.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

// The calls in kernels.hpp have the same names; this makes them the namespace's.
namespace own = gyre::SIMT_NAMESPACE;

class OwnKernels final : public LayerKernels {
 public:
    explicit OwnKernels(const Context& context) : context_(context) {}
    std::string implementation() const override { return "gyre's own kernels"; }

    void prepare_conv2d(const std::string&, const Conv2dShape& shape, int n, bool) override {
        context_.workspace.floats(conv2d_workspace_elems(context_, shape, n));
    }
    void prepare_linear(const std::string&, const LinearShape& shape, int n, bool) override {
        context_.workspace.floats(linear_workspace_elems(context_, shape, n));
    }

    void conv2d_forward(const Conv2dShape& shape, int n, const float* x, const float* w,
                        const float* b, float* y) override {
        own::conv2d_forward(context_, shape, n, x, w, b, y);
    }
    void conv2d_backward_data(const Conv2dShape& shape, int n, const float* dy, const float* w,
                              float* dx) override {
        own::conv2d_backward_data(context_, shape, n, dy, w, dx);
    }
    void conv2d_backward_weights(const Conv2dShape& shape, int n, const float* x, const float* dy,
                                 float* dw, float* db) override {
        own::conv2d_backward_weights(context_, shape, n, x, dy, dw, db);
    }
    void maxpool2d_forward(const MaxPool2dShape& shape, int n, const float* x, float* y,
                           std::uint8_t* argmax) override {
        own::maxpool2d_forward(context_, shape, n, x, y, argmax);
    }
    void maxpool2d_backward(const MaxPool2dShape& shape, int n, const float*,
                            const std::uint8_t* argmax, const float* dy, float* dx) override {
        own::maxpool2d_backward(context_, shape, n, dy, argmax, dx);
    }
    void linear_forward(const LinearShape& shape, int n, const float* x, const float* w,
                        const float* b, float* y) override {
        own::linear_forward(context_, shape, n, x, w, b, y);
    }
    void linear_backward_data(const LinearShape& shape, int n, const float* dy, const float* w,
                              float* dx) override {
        own::linear_backward_data(context_, shape, n, dy, w, dx);
    }
    void linear_backward_weights(const LinearShape& shape, int n, const float* x, const float* dy,
                                 float* dw, float* db) override {
        own::linear_backward_weights(context_, shape, n, x, dy, dw, db);
    }
    void cross_entropy(const CrossEntropyArgs& args, int n) override {
        own::cross_entropy(context_, args, n);
    }

 private:
    const Context context_;
};

}  // namespace

std::unique_ptr<LayerKernels> make_own_kernels(const Context& context) {
    return std::make_unique<OwnKernels>(context);
}

}  // namespace gyre::SIMT_NAMESPACE
