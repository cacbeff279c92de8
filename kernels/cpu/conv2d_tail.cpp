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

void Conv2dTail::finish_block(const Context& context, const Output& to, const float* x) const {
    const std::ptrdiff_t line = std::ptrdiff_t{pool_.in.width} * kLanes;
    context.pool.parallel_for(out_.channels, [&](std::int64_t channel, int) {
        finish(to, static_cast<int>(channel), 0, windows(line),
               x + channel * pool_.in.height * line);
    });
}

Conv2dTail::Gradient Conv2dTail::gradient(const OpIo& io, int block, int channel) const {
    const std::ptrdiff_t plane = std::ptrdiff_t{block} * out_.channels + channel;
    const std::ptrdiff_t at = plane * plane_floats();
    return {.dy = io.dy.f32() + at,
            .y = relu_ ? io.y.f32() + at : nullptr,
            .argmax = pools_ ? argmax(io) + at : nullptr,
            .factors = dropout_ ? factors(io) + plane * kLanes : nullptr};
}

void Conv2dTail::gradient_plane(const OpIo& io, int block, int channel, float* to,
                                std::ptrdiff_t line) const {
    const Gradient from = gradient(io, block, channel);
    const std::ptrdiff_t row_floats = std::ptrdiff_t{pool_.in.width} * kLanes;
    if (pools_) {
        for (int row = 0; !covers_ && row < pool_.in.height; ++row) {
            std::fill_n(to + row * line, row_floats, 0.0f);
        }
        unpool_(windows(line), from.dy, from.y, from.argmax, to);
    } else {
        for (int row = 0; row < pool_.in.height; ++row) {
            for (std::ptrdiff_t i = 0; i < row_floats; i += kVec) {
                store(to + row * line + i, from.at(row * row_floats + i));
            }
        }
    }
    for (int row = 0; dropout_ && row < pool_.in.height; ++row) {
        for (std::ptrdiff_t i = 0; i < row_floats; i += kVec) {
            float* at = to + row * line + i;
            store(at, load(at) * load(from.factors + i % kLanes));
        }
    }
}

void Conv2dTail::gradient_block(const Context& context, const OpIo& io, int block,
                                float* to) const {
    const std::ptrdiff_t line = std::ptrdiff_t{pool_.in.width} * kLanes;
    context.pool.parallel_for(out_.channels, [&](std::int64_t channel, int) {
        gradient_plane(io, block, static_cast<int>(channel), to + channel * pool_.in.height * line,
                       line);
    });
}

}  // namespace gyre::cpu
