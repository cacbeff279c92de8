#include "kernels/cpu/conv2d_tail.hpp"

namespace gyre::cpu {

Conv2dTail::Conv2dTail(const Conv2dSpec& spec, int train_images)
    : dropout_(spec.dropout > 0.0f),
      pools_(spec.pool_kernel > 0),
      relu_(spec.relu),
      pool_(pools_ ? spec.pool() : MaxPool2dShape{spec.shape.out(), 1, 1}),
      out_(pool_.out()),
      covers_(windows_cover(pool_)),
      mask_(spec.dropout, spec.dropout_stream),
      pool_functions_{{pool_function<false, false>(pool_.kernel, relu_),
                       pool_function<false, true>(pool_.kernel, relu_)},
                      {pool_function<true, false>(pool_.kernel, relu_),
                       pool_function<true, true>(pool_.kernel, relu_)}},
      unpool_(unpool_function(pool_.kernel)) {
    const auto lanes = static_cast<std::size_t>(block_count(train_images) * kLanes);
    if (dropout_) {
        factor_bytes_ = lanes * static_cast<std::size_t>(out_.channels) * sizeof(float);
    }
    if (pools_) {
        argmax_bytes_ = lanes * static_cast<std::size_t>(out_.elems());
    }
}

void Conv2dTail::draw_factors(const Context& context, const Batch& batch, void* saved) const {
    if (!dropout_ || !batch.training) {
        return;
    }
    context.pool.parallel_for(block_count(batch.n), [&](std::int64_t block, int) {
        float* to = static_cast<float*>(saved) + block * out_.channels * kLanes;
        const RandomMask::Block mask(mask_, batch, static_cast<int>(block));
        for (int first = 0; first < out_.channels; first += 4) {
            float factor[4][kLanes];
            mask.draw(static_cast<std::uint32_t>(first / 4), factor);
            for (int i = 0; i < std::min(4, out_.channels - first); ++i) {
                std::copy_n(factor[i], kLanes, to + (first + i) * kLanes);
            }
        }
    });
}

Conv2dTail::Output Conv2dTail::output(const Batch& batch, const OpIo& io, int block) const {
    const std::ptrdiff_t first = block * out_.channels * plane_floats();
    return {.y = io.y.f32() + first,
            .argmax = pools_ && batch.training ? argmax(io) + first : nullptr,
            .factors = dropout_ && batch.training
                           ? factors(io) + std::ptrdiff_t{block} * out_.channels * kLanes
                           : nullptr};
}

void Conv2dTail::finish(const Output& to, int channel, int row, const Windows& windows,
                        const float* x) const {
    const std::ptrdiff_t at = channel * plane_floats() + std::ptrdiff_t{row} * out_.width * kLanes;
    const bool scales = to.factors != nullptr, keeps = to.argmax != nullptr;
    pool_functions_[scales][keeps](windows, x, scales ? to.factors + channel * kLanes : nullptr,
                                   to.y + at, keeps ? to.argmax + at : nullptr);
}

void Conv2dTail::gradient_plane(const OpIo& io, int block, int channel, float* to,
                                std::ptrdiff_t line) const {
    const std::ptrdiff_t plane = std::ptrdiff_t{block} * out_.channels + channel;
    const float* dy = io.dy.f32() + plane * plane_floats();
    const float* y = relu_ ? io.y.f32() + plane * plane_floats() : nullptr;
    const std::ptrdiff_t row_floats = std::ptrdiff_t{pool_.in.width} * kLanes;
    if (pools_) {
        for (int row = 0; !covers_ && row < pool_.in.height; ++row) {
            std::fill_n(to + row * line, row_floats, 0.0f);
        }
        unpool_(windows(line), dy, y, argmax(io) + plane * plane_floats(), to);
    } else {
        for (int row = 0; row < pool_.in.height; ++row) {
            const std::ptrdiff_t at = row * row_floats;
            for (std::ptrdiff_t i = 0; i < row_floats; i += kVec) {
                Vec d = load(dy + at + i);
                if (y != nullptr) {
                    d = load(y + at + i) <= 0.0f ? Vec{} : d;
                }
                store(to + row * line + i, d);
            }
        }
    }
    const float* factor = factors(io) + plane * kLanes;
    for (int row = 0; dropout_ && row < pool_.in.height; ++row) {
        for (std::ptrdiff_t i = 0; i < row_floats; i += kVec) {
            float* at = to + row * line + i;
            store(at, load(at) * load(factor + i % kLanes));
        }
    }
}

}  // namespace gyre::cpu
