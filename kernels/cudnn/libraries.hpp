// cuDNN and cuBLASLt, loaded with dlopen so that the program starts without them; every call is
// checked. GYRE_WITH_LIBRARIES is defined if their headers were found.
#pragma once

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <memory>
#include <string>
#include <type_traits>

#include "base/error.hpp"
#include "base/host_name.hpp"

#if __has_include(<cudnn.h>) && __has_include(<cublasLt.h>)
#include <cublasLt.h>
#include <cudnn.h>
#if CUDNN_MAJOR >= 9
#define GYRE_WITH_LIBRARIES
#endif
#endif

#if defined(GYRE_WITH_LIBRARIES)
namespace gyre::cuda {

// Never unloaded, as the libraries have threads and exit handlers of their own.
class SharedLibrary {
 public:
    SharedLibrary(std::string file, const char* product)
        : file_(std::move(file)), product_(product), handle_(dlopen(file_.c_str(), RTLD_NOW)) {
        if (handle_ == nullptr) {
            throw usage_error(
                fmt::format("{} could not be loaded on {}: {}; install {}, add the folder of {} to "
                            "LD_LIBRARY_PATH, or use `kernels` ours",
                            product_, host_name(), dlerror(), product_, file_));
        }
    }

    template <typename Function>
    Function find(const char* name) const {
        void* const address = dlsym(handle_, name);
        if (address == nullptr) {
            throw usage_error(
                fmt::format("{} on {} lacks the function {}: it is too old or too new; install the "
                            "{} that gyre was built with, or use `kernels` ours",
                            file_, host_name(), name, product_));
        }
        return reinterpret_cast<Function>(address);
    }

 private:
    std::string file_;
    const char* product_;
    void* handle_;
};

// A handle or descriptor, destroyed by its library's function.
template <typename Handle, typename Status>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Status (*)(Handle)>;
template <typename Handle>
using CudnnOwned = Owned<Handle, cudnnStatus_t>;
template <typename Handle>
using CublasOwned = Owned<Handle, cublasStatus_t>;

// Calls a function of one of the tables below and checks its status.
#define GYRE_CALL(table, ...) (table).check((table).__VA_ARGS__, #__VA_ARGS__, __FILE__, __LINE__)
#define GYRE_FUNCTION(name) decltype(&::name) name = library.find<decltype(&::name)>(#name)

struct Cudnn {
    SharedLibrary library{fmt::format("libcudnn.so.{}", CUDNN_MAJOR), "cuDNN"};
    GYRE_FUNCTION(cudnnGetVersion);
    GYRE_FUNCTION(cudnnGetErrorString);
    GYRE_FUNCTION(cudnnGetLastErrorString);
    GYRE_FUNCTION(cudnnCreate);
    GYRE_FUNCTION(cudnnDestroy);
    GYRE_FUNCTION(cudnnSetStream);
    GYRE_FUNCTION(cudnnCreateTensorDescriptor);
    GYRE_FUNCTION(cudnnDestroyTensorDescriptor);
    GYRE_FUNCTION(cudnnSetTensor4dDescriptor);
    GYRE_FUNCTION(cudnnCreateFilterDescriptor);
    GYRE_FUNCTION(cudnnDestroyFilterDescriptor);
    GYRE_FUNCTION(cudnnSetFilter4dDescriptor);
    GYRE_FUNCTION(cudnnCreateConvolutionDescriptor);
    GYRE_FUNCTION(cudnnDestroyConvolutionDescriptor);
    GYRE_FUNCTION(cudnnSetConvolution2dDescriptor);
    GYRE_FUNCTION(cudnnSetConvolutionMathType);
    GYRE_FUNCTION(cudnnFindConvolutionForwardAlgorithmEx);
    GYRE_FUNCTION(cudnnFindConvolutionBackwardDataAlgorithmEx);
    GYRE_FUNCTION(cudnnFindConvolutionBackwardFilterAlgorithmEx);
    GYRE_FUNCTION(cudnnGetConvolutionForwardAlgorithm_v7);
    GYRE_FUNCTION(cudnnGetConvolutionBackwardDataAlgorithm_v7);
    GYRE_FUNCTION(cudnnGetConvolutionBackwardFilterAlgorithm_v7);
    GYRE_FUNCTION(cudnnGetConvolutionForwardWorkspaceSize);
    GYRE_FUNCTION(cudnnGetConvolutionBackwardDataWorkspaceSize);
    GYRE_FUNCTION(cudnnGetConvolutionBackwardFilterWorkspaceSize);
    GYRE_FUNCTION(cudnnConvolutionForward);
    GYRE_FUNCTION(cudnnConvolutionBackwardData);
    GYRE_FUNCTION(cudnnConvolutionBackwardFilter);
    GYRE_FUNCTION(cudnnConvolutionBackwardBias);
    GYRE_FUNCTION(cudnnAddTensor);
    GYRE_FUNCTION(cudnnCreatePoolingDescriptor);
    GYRE_FUNCTION(cudnnDestroyPoolingDescriptor);
    GYRE_FUNCTION(cudnnSetPooling2dDescriptor);
    GYRE_FUNCTION(cudnnPoolingForward);
    GYRE_FUNCTION(cudnnPoolingBackward);
    GYRE_FUNCTION(cudnnBatchNormalizationForwardTraining);
    GYRE_FUNCTION(cudnnBatchNormalizationForwardInference);
    GYRE_FUNCTION(cudnnBatchNormalizationBackward);
    GYRE_FUNCTION(cudnnSoftmaxForward);
    GYRE_FUNCTION(cudnnSoftmaxBackward);

    void check(cudnnStatus_t status, const char* expression, const char* file, int line) const {
        if (status != CUDNN_STATUS_SUCCESS) {
            std::array<char, 1024> details{};
            cudnnGetLastErrorString(details.data(), details.size());
            throw Error(ExitCode::internal,
                        fmt::format("{} failed: {} ({}:{} on {}; cuDNN says: '{}'); to avoid "
                                    "cuDNN, use `kernels` ours",
                                    expression, cudnnGetErrorString(status), file, line,
                                    host_name(), details.data()));
        }
    }
    template <typename Handle>
    CudnnOwned<Handle> own(cudnnStatus_t (*create)(Handle*), cudnnStatus_t (*destroy)(Handle),
                           const char* what) const {
        Handle handle = nullptr;
        check(create(&handle), what, __FILE__, __LINE__);
        return {handle, destroy};
    }
};

struct CublasLt {
    SharedLibrary library{fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR), "cuBLASLt"};
    GYRE_FUNCTION(cublasLtGetVersion);
    GYRE_FUNCTION(cublasLtGetStatusString);
    GYRE_FUNCTION(cublasLtCreate);
    GYRE_FUNCTION(cublasLtDestroy);
    GYRE_FUNCTION(cublasLtMatmulDescCreate);
    GYRE_FUNCTION(cublasLtMatmulDescDestroy);
    GYRE_FUNCTION(cublasLtMatmulDescSetAttribute);
    GYRE_FUNCTION(cublasLtMatrixLayoutCreate);
    GYRE_FUNCTION(cublasLtMatrixLayoutDestroy);
    GYRE_FUNCTION(cublasLtMatmulPreferenceCreate);
    GYRE_FUNCTION(cublasLtMatmulPreferenceDestroy);
    GYRE_FUNCTION(cublasLtMatmulPreferenceSetAttribute);
    GYRE_FUNCTION(cublasLtMatmulAlgoGetHeuristic);
    GYRE_FUNCTION(cublasLtMatmul);

    void check(cublasStatus_t status, const char* expression, const char* file, int line) const {
        if (status != CUBLAS_STATUS_SUCCESS) {
            throw Error(
                ExitCode::internal,
                fmt::format("{} failed: {} ({}:{} on {}); to avoid cuBLASLt, use `kernels` ours",
                            expression, cublasLtGetStatusString(status), file, line, host_name()));
        }
    }
};

}  // namespace gyre::cuda
#endif
