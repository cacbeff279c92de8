#include "kernels/cpu/winograd_weights.hpp"

#include <algorithm>

namespace gyre::cpu {
namespace {

constexpr std::ptrdiff_t kCacheFloats = 256 * 1024;  // of transformed tiles: 1 MiB

int tiles_at_once(std::ptrdiff_t floats_per_tile, int tiles) {
    return static_cast<int>(std::clamp<std::ptrdiff_t>(kCacheFloats / floats_per_tile, 1, tiles));
}

}  // namespace

template <int K>
WinogradWeights<K>::WinogradWeights(const Conv2dShape& shape, const Conv2dTail& tail,
                                    const WinogradTiles<K>& tiles)
    : channels_(shape.in.channels),
      in_(shape.in),
      out_(shape.out()),
      tail_(tail),
      tiles_(tiles),
      rows_(shape.out_channels, kTileRows),
      cols_(static_cast<int>(padded_channels() / kLanes), kTileCols),
      groups_(tiles.count(),
              tiles_at_once(kPoints * kLanes * (padded_channels() + shape.out_channels),
                            tiles.count())) {}

template <int K>
std::int64_t WinogradWeights<K>::shared_floats() const {
    return kPoints * (x_point() + dy_point() + sums_point()) + rows_.total * kLanes +
           unfused_floats();
}

template <int K>
typename WinogradWeights<K>::Memory WinogradWeights<K>::memory(float* shared) const {
    Memory at{};
    at.x = shared;
    at.dy = at.x + kPoints * x_point();
    at.sums = at.dy + kPoints * dy_point();
    at.bias = at.sums + kPoints * sums_point();
    at.unfused = at.bias + rows_.total * kLanes;
    return at;
}

template <int K>
void WinogradWeights<K>::run(const Context& context, int blocks, const OpIo& io) const {
    const Memory at = memory(context.workspace.shared());
    std::fill_n(at.sums, kPoints * sums_point() + rows_.total * kLanes, 0.0f);
    for (int block = 0; block < blocks; ++block) {
        if (tiles_.tail_apart()) {
            tail_.gradient_block(context, io, block, at.unfused);
        }
        for (int group = 0; group < groups_.parts; ++group) {
            transform(context, io, block, group, at);
            add_products(context, group, at);
        }
    }
    store_gradients(context, at, io);
}

template <int K>
void WinogradWeights<K>::transform(const Context& context, const OpIo& io, int block, int group,
                                   const Memory& at) const {
    const int first = groups_.begin(group), count = groups_.size(group);
    const std::ptrdiff_t plane = in_.plane_elems() * kLanes;
    const float* x = io.x.f32() + block * in_.channels * plane;
    const int lines = static_cast<int>(padded_channels() / kLanes);
    context.pool.parallel_for(lines + rows_.total, [&](std::int64_t task, int worker) {
        if (task < lines) {
            const int channel = static_cast<int>(task) * kLanes;
            for (int t = 0; t < count; ++t) {
                tiles_.input_by_channel(
                    x + channel * plane, std::min(kLanes, in_.channels - channel), first + t,
                    context.workspace.worker(worker),
                    at.x + t * kLanes * padded_channels() + channel, x_point(), padded_channels());
            }
            return;
        }
        const int o = static_cast<int>(task) - lines;
        const Conv2dTail::Gradient from =
            tiles_.tail_apart()
                ? Conv2dTail::Gradient{.dy = at.unfused + o * out_.plane_elems() * kLanes}
                : tail_.gradient(io, block, o);
        for (int t = 0; t < count; ++t) {
            tiles_.gradient(from, first + t, at.dy + o * dy_row() + t * kLanes, dy_point(),
                            at.bias + o * kLanes);
        }
    });
}

template <int K>
void WinogradWeights<K>::add_products(const Context& context, int group, const Memory& at) const {
    context.pool.parallel_for(kPoints, [&](std::int64_t point, int) {
        TileProduct product;
        product.w = at.dy + point * dy_point();
        product.w_row = dy_row();
        product.w_step = 1;
        product.x = at.x + point * x_point();
        product.x_step = padded_channels();
        product.y = at.sums + point * sums_point();
        product.y_row = padded_channels();
        product.depth = groups_.size(group) * kLanes;
        product.accumulate = true;
        product.run(rows_, 0, rows_.parts, cols_);
    });
}

template <int K>
void WinogradWeights<K>::store_gradients(const Context& context, const Memory& at,
                                         const OpIo& io) const {
    constexpr int kExtent = WinogradTiles<K>::kExtent;
    context.pool.parallel_for(rows_.total, [&](std::int64_t o, int) {
        const float* bias = at.bias + o * kLanes;
        float sum = 0.0f;
        for (int lane = 0; lane < kLanes; ++lane) {
            sum += bias[lane];
        }
        io.grads[1].f32()[o] = sum;
        for (int first = 0; first < channels_; first += kVec) {
            const float* from = at.sums + o * padded_channels() + first;
            float window[K * K][kVec];
            transform_2d<kExtent, K>(
                [&](int i, int j) { return load(from + (i * kExtent + j) * sums_point()); },
                Transforms<K>::weights_adjoint,
                [&](int i, int j, Vec v) { store(window[i * K + j], v); });
            float* to = io.grads[0].f32() + (o * channels_ + first) * K * K;
            for (int c = 0; c < std::min(kVec, channels_ - first); ++c) {
                for (int k = 0; k < K * K; ++k) {
                    *to++ = window[k][c];
                }
            }
        }
    });
}

template class WinogradWeights<3>;
template class WinogradWeights<5>;

}  // namespace gyre::cpu
