// Channels of two values one after the other (formula: ConcatSpec). With F and S elements of an
// image in x2 and x:
//   y[n][i] = x2[n][i] for i < F, else x[n][i - F];  dx2 and dx are these parts of dy.
//
// Memory-bound: 8 bytes per element. One thread per element of y; 256 threads per block.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/ops.hpp"
#include "kernels/cuda/planes.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

struct Parts {
    std::int64_t first, second;  // elements of an image
};

// The element of a part that is element `index` of the whole; null: the part is not there.
template <typename T>
__device__ __forceinline__ T* part_of(const Parts& parts, std::int64_t index, T* first, T* second) {
    const std::int64_t image = index / (parts.first + parts.second);
    const std::int64_t at = index % (parts.first + parts.second);
    if (at < parts.first) {
        return first == nullptr ? nullptr : first + image * parts.first + at;
    }
    return second == nullptr ? nullptr : second + image * parts.second + at - parts.first;
}

__global__ void concat_forward_kernel(std::int64_t elems, Parts parts, const float* first,
                                      const float* second, float* whole) {
    const std::int64_t index = thread_index();
    if (index < elems) {
        whole[index] = *part_of(parts, index, first, second);
    }
}

__global__ void concat_backward_kernel(std::int64_t elems, Parts parts, const float* whole,
                                       float* first, float* second) {
    const std::int64_t index = thread_index();
    if (index < elems) {
        float* const to = part_of(parts, index, first, second);
        if (to != nullptr) {
            *to = whole[index];
        }
    }
}

class ConcatOp final : public Op {
 public:
    ConcatOp(const Context& context, const ConcatSpec& spec)
        : context_(context), parts_{spec.in2.elems(), spec.in.elems()} {}
    OpNeeds needs() const override { return {.backward_reads_x = false, .writes_dx2 = true}; }
    void forward(const Batch& batch, const OpIo& io) override {
        start("concat_forward", concat_forward_kernel, batch, io.x2.f32(), io.x.f32(), io.y.f32());
    }
    void backward_input(const Batch& batch, const OpIo& io) override {
        start("concat_backward", concat_backward_kernel, batch, io.dy.f32(), io.dx2.f32(),
              io.dx.f32());
    }

 private:
    template <typename... P, typename... A>
    void start(const char* name, void (*kernel)(std::int64_t, Parts, P...), const Batch& batch,
               A... arguments) const {
        const std::int64_t elems = batch.n * (parts_.first + parts_.second);
        if (elems > 0) {
            const std::int64_t blocks = (elems + kElementwiseBlock - 1) / kElementwiseBlock;
            launch(name, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kElementwiseBlock),
                   context_.stream, elems, parts_, arguments...);
        }
    }

    const Context context_;
    const Parts parts_;
};

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const ConcatSpec& spec, const OpSizes&) {
    return std::make_unique<ConcatOp>(context, spec);
}

}  // namespace gyre::SIMT_NAMESPACE
