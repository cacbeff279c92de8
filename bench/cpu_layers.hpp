// A backend's operations as functions, each made for one call: the reference of the GPU's
// benchmark.
#pragma once

#include "kernels/backend.hpp"

namespace gyre::bench {

class CpuLayers {
 public:
    CpuLayers(Backend& backend) : backend_(backend) {}  // NOLINT: it is the backend
    Backend* operator->() const { return &backend_; }

    void conv2d_forward(const Conv2dShape& s, int n, const float* x, const float* w, const float* b,
                        float* y) const {
        make(Conv2dSpec{.shape = s}, n)->forward({.n = n}, {.x = x, .y = y, .params = {w, b}});
    }
    void conv2d_backward_data(const Conv2dShape& s, int n, const float* dy, const float* w,
                              float* dx) const {
        make(Conv2dSpec{.shape = s}, n)
            ->backward_input({.n = n}, {.dy = dy, .dx = dx, .params = {w}});
    }
    void conv2d_backward_weights(const Conv2dShape& s, int n, const float* x, const float* dy,
                                 float* dw, float* db) const {
        make(Conv2dSpec{.shape = s}, n)
            ->backward_params({.n = n}, {.x = x, .dy = dy, .grads = {dw, db}});
    }
    void linear_forward(const LinearShape& s, int n, const float* x, const float* w, const float* b,
                        float* y) const {
        make(spec_of(s), n)->forward({.n = n}, {.x = x, .y = y, .params = {w, b}});
    }
    void linear_backward_data(const LinearShape& s, int n, const float* dy, const float* w,
                              float* dx) const {
        make(spec_of(s), n)->backward_input({.n = n}, {.dy = dy, .dx = dx, .params = {w}});
    }
    void linear_backward_weights(const LinearShape& s, int n, const float* x, const float* dy,
                                 float* dw, float* db) const {
        make(spec_of(s), n)->backward_params({.n = n}, {.x = x, .dy = dy, .grads = {dw, db}});
    }
    void maxpool2d_forward(const MaxPool2dShape& s, int n, const float* x, float* y,
                           std::uint8_t* argmax) const {
        make(MaxPool2dSpec{s}, n)
            ->forward({.n = n, .training = argmax != nullptr}, {.x = x, .y = y, .saved = argmax});
    }
    void maxpool2d_backward(const MaxPool2dShape& s, int n, const float* x, std::uint8_t* argmax,
                            const float* dy, float* dx) const {
        make(MaxPool2dSpec{s}, n)
            ->backward_input({.n = n}, {.x = x, .dy = dy, .dx = dx, .saved = argmax});
    }
    void relu_forward(const Shape& shape, int n, float* y) const {
        make(ReluSpec{shape}, n)->forward({.n = n}, {.x = y, .y = y});
    }
    void relu_backward(const Shape& shape, int n, const float* y, float* dy) const {
        make(ReluSpec{shape}, n)->backward_input({.n = n}, {.y = y, .dy = dy, .dx = dy});
    }
    void dropout(const DropoutArgs& args, int n, float* x) const {
        make(DropoutSpec{args.shape, args.probability, args.by_channel, args.stream.index}, n)
            ->forward({.n = n,
                       .training = true,
                       .samples = args.samples,
                       .seed = args.stream.seed,
                       .epoch = args.epoch},
                      {.x = x, .y = x});
    }
    void cross_entropy(const CrossEntropyArgs& args, int n) const {
        backend_.cross_entropy(args, n);
    }

 private:
    static LinearSpec spec_of(const LinearShape& s) {
        return {.in = {s.in_features, 1, 1}, .shape = s};
    }
    std::unique_ptr<Op> make(const OpSpec& spec, int n) const {
        return backend_.make("reference", spec, {.train_images = n});
    }
    Backend& backend_;
};

}  // namespace gyre::bench
