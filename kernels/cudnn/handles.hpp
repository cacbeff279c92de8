// Resources shared by cuDNN's and cuBLASLt's operations.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/native.hpp"
#include "kernels/cudnn/factory.hpp"
#include "kernels/cudnn/libraries.hpp"

#if defined(GYRE_WITH_LIBRARIES)
namespace gyre::cuda {

constexpr float kOne = 1.0f, kZero = 0.0f;

// The libraries' handles for one stream; owned by the factory, so they outlive the operations.
struct Handles {
    Handles(const Context& on, bool deterministic_) : context(on), deterministic(deterministic_) {
        GYRE_CALL(cudnn, cudnnSetStream(dnn.get(), native(context.stream)));
    }

    template <typename Handle, typename... Args>
    CublasOwned<Handle> own_lt(cublasStatus_t (*create)(Handle*, Args...),
                               cublasStatus_t (*destroy)(Handle),
                               std::type_identity_t<Args>... args) const {
        Handle handle = nullptr;
        lt.check(create(&handle, args...), "the creation of a cuBLASLt object", __FILE__, __LINE__);
        return {handle, destroy};
    }

    const Context context;
    const bool deterministic;
    const Cudnn cudnn{};
    const CublasLt lt{};
    const CudnnOwned<cudnnHandle_t> dnn =
        cudnn.own(cudnn.cudnnCreate, cudnn.cudnnDestroy, "cudnnCreate");
    const CublasOwned<cublasLtHandle_t> blas = own_lt(lt.cublasLtCreate, lt.cublasLtDestroy);
    std::size_t convolution_bytes = 0;  // largest workspace for a listed number of images
    std::string remarks;                // for -v
};

// A float32 tensor [n][channels][height][width].
class TensorDescriptor {
 public:
    TensorDescriptor(const Cudnn& cudnn, int n, const Shape& shape)
        : made_(cudnn.own(cudnn.cudnnCreateTensorDescriptor, cudnn.cudnnDestroyTensorDescriptor,
                          "cudnnCreateTensorDescriptor")) {
        GYRE_CALL(cudnn,
                  cudnnSetTensor4dDescriptor(made_.get(), CUDNN_TENSOR_NCHW, CUDNN_DATA_FLOAT, n,
                                             shape.channels, shape.height, shape.width));
    }
    cudnnTensorDescriptor_t get() const { return made_.get(); }

 private:
    CudnnOwned<cudnnTensorDescriptor_t> made_;
};

// A layer's bias: one value per channel of its output.
class Bias {
 public:
    Bias(Handles& handles, int channels)
        : handles_(handles), bias_(handles.cudnn, 1, {channels, 1, 1}) {}
    // y += b
    void add(const float* b, const TensorDescriptor& out, float* y) const {
        GYRE_CALL(handles_.cudnn,
                  cudnnAddTensor(handles_.dnn.get(), &kOne, bias_.get(), b, &kOne, out.get(), y));
    }
    // db = sum of dy
    void sum(const TensorDescriptor& out, const float* dy, float* db) const {
        GYRE_CALL(handles_.cudnn, cudnnConvolutionBackwardBias(handles_.dnn.get(), &kOne, out.get(),
                                                               dy, &kZero, bias_.get(), db));
    }

 private:
    Handles& handles_;
    const TensorDescriptor bias_;
};

// An operation's plans, one per number of images (Plan::n). A number that was not listed gets its
// plan in the first pass that uses it.
template <typename Plan>
class Plans {
 public:
    template <typename Make>
    const Plan& at(int n, const Make& make) {
        for (const auto& plan : made_) {
            if (plan->n == n) {
                return *plan;
            }
        }
        made_.push_back(std::make_unique<const Plan>(make()));
        return *made_.back();
    }

 private:
    std::vector<std::unique_ptr<const Plan>> made_;
};

std::unique_ptr<Op> make_op(Handles& handles, const std::string& layer, const Conv2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(Handles& handles, const std::string& layer, const LinearSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(Handles& handles, const std::string& layer, const MaxPool2dSpec& spec,
                            const OpSizes& sizes);
std::unique_ptr<Op> make_op(Handles& handles, const std::string& layer, const BatchNorm2dSpec& spec,
                            const OpSizes& sizes);

}  // namespace gyre::cuda
#endif
