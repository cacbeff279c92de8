#include "kernels/cpu/winograd_weights.hpp"

#include <algorithm>

namespace gyre::cpu {
namespace {

constexpr std::ptrdiff_t kCacheFloats = 160 * 1024;      // transformed x: 640 KiB, or
constexpr int kLeastTiles = 4;                           // so many tiles, for which sums are read
constexpr std::ptrdiff_t kSumsFloats = 4 * 1024 * 1024;  // all sums: 16 MiB
constexpr int kMostSums = 16, kMostParts = 4;

}  // namespace

template <int K>
WinogradWeights<K>::WinogradWeights(const Context& context, const Conv2dShape& shape,
                                    const Conv2dTail& tail, const WinogradTiles<K>& tiles,
                                    int most_blocks)
    : context_(context),
      channels_(shape.in.channels),
      in_(shape.in),
      out_(shape.out()),
      tail_(tail),
      tiles_(tiles),
      rows_(shape.out_channels, kTileRows),
      cols_(static_cast<int>(padded_channels() / kLanes), kTileCols),
      groups_(tiles.count(), static_cast<int>(std::clamp<std::ptrdiff_t>(
                                 kCacheFloats / (kPoints * kLanes * padded_channels()),
                                 std::min(kLeastTiles, tiles.count()), tiles.count()))),
      joined_(std::clamp(kLeastTiles / tiles.count(), 1, std::max(1, most_blocks))),
      row_parts_(std::min(rows_.parts, kMostParts)),
      most_sums_(std::clamp(static_cast<int>(kSumsFloats / sums_floats()), 1,
                            std::clamp(most_blocks, 1, kMostSums))) {}

template <int K>
std::int64_t WinogradWeights<K>::worker_floats() const {
    return kPoints * (x_point() + dy_point()) +
           std::max<std::int64_t>(WinogradTiles<K>::kScratch,
                                  tiles_.tail_apart() ? plane_floats() : 0);
}

template <int K>
void WinogradWeights<K>::run(int blocks, const OpIo& io) const {
    float* const sums = context_.workspace.shared();
    const Split shares(blocks, std::max(1, (blocks + most_sums_ - 1) / most_sums_));
    // If there are fewer shares than threads, rows are divided too; each part transforms x itself.
    const int wanted = (context_.pool.threads() + shares.parts - 1) / shares.parts;
    const Split parts(rows_.parts, std::max(1, rows_.parts / wanted));
    context_.pool.parallel_for(
        std::int64_t{shares.parts} * parts.parts, [&](std::int64_t task, int worker) {
            const auto share = static_cast<int>(task / parts.parts);
            const auto part = static_cast<int>(task % parts.parts);
            run_task(io, {shares.begin(share), shares.begin(share + 1), parts.begin(part),
                          parts.begin(part + 1), sums + share * sums_floats(),
                          context_.workspace.worker(worker)});
        });
    store_gradients(shares.parts, sums, io);
}

template <int K>
void WinogradWeights<K>::run_task(const OpIo& io, const Task& task) const {
    const std::ptrdiff_t plane = in_.plane_elems() * kLanes;
    const int row = rows_.begin(task.first_part), rows = rows_.begin(task.last_part) - row;
    for (int point = 0; point < kPoints; ++point) {
        std::fill_n(task.sums + point * sums_point() + row * padded_channels(),
                    rows * padded_channels(), 0.0f);
    }
    std::fill_n(task.sums + kPoints * sums_point() + row * kLanes, rows * kLanes, 0.0f);
    float* const scratch = task.memory + kPoints * (x_point() + dy_point());
    for (int block = task.first_block; block < task.last_block; block += joined_) {
        const int blocks = std::min(joined_, task.last_block - block);
        for (int group = 0; group < groups_.parts; ++group) {
            const int count = groups_.size(group);
            for (int i = 0; i < blocks * count; ++i) {
                const float* x = io.x.f32() + (block + i / count) * in_.channels * plane;
                for (int channel = 0; channel < channels_; channel += kLanes) {
                    tiles_.input_by_channel(x + channel * plane,
                                            std::min(kLanes, channels_ - channel),
                                            groups_.begin(group) + i % count, scratch,
                                            task.memory + i * kLanes * padded_channels() + channel,
                                            x_point(), padded_channels());
                }
            }
            for (int part = task.first_part; part < task.last_part; part += row_parts_) {
                add_products(io, block, blocks, group, part,
                             std::min(task.last_part, part + row_parts_), task);
            }
        }
    }
}

template <int K>
void WinogradWeights<K>::add_products(const OpIo& io, int first_block, int blocks, int group,
                                      int first_part, int last_part, const Task& task) const {
    const int first = rows_.begin(first_part), last = rows_.begin(last_part);
    const int count = groups_.size(group);
    float* const dy = task.memory + kPoints * x_point();
    float* const unfused = dy + kPoints * dy_point();
    float* const bias = task.sums + kPoints * sums_point();
    for (int block = 0; block < blocks; ++block) {
        for (int o = first; o < last; ++o) {
            Conv2dTail::Gradient from = tail_.gradient(io, first_block + block, o);
            if (tiles_.tail_apart()) {
                tail_.gradient_plane(io, first_block + block, o, unfused,
                                     std::ptrdiff_t{out_.width} * kLanes);
                from = {.dy = unfused};
            }
            for (int t = 0; t < count; ++t) {
                tiles_.gradient(from, groups_.begin(group) + t,
                                dy + (o - first) * dy_row() + (block * count + t) * kLanes,
                                dy_point(), bias + o * kLanes);
            }
        }
    }
    TileProduct product;
    product.w_row = dy_row();
    product.w_step = 1;
    product.x_step = product.y_row = padded_channels();
    product.depth = blocks * count * kLanes;
    product.accumulate = true;
    for (int point = 0; point < kPoints; ++point) {
        product.w = dy + point * dy_point();
        product.x = task.memory + point * x_point();
        product.y = task.sums + point * sums_point() + first * padded_channels();
        product.run(rows_, first_part, last_part, cols_);
    }
}

template <int K>
void WinogradWeights<K>::store_gradients(int sums, const float* from, const OpIo& io) const {
    constexpr int kExtent = WinogradTiles<K>::kExtent;
    const auto total = [&](std::ptrdiff_t at) {
        Vec v = load(from + at);
        for (int i = 1; i < sums; ++i) {
            v += load(from + i * sums_floats() + at);
        }
        return v;
    };
    context_.pool.parallel_for(rows_.total, [&](std::int64_t o, int) {
        float bias[kLanes];
        for (int lane = 0; lane < kLanes; lane += kVec) {
            store(bias + lane, total(kPoints * sums_point() + o * kLanes + lane));
        }
        io.grads[1].f32()[o] = lane_sum(bias);
        for (int first = 0; first < channels_; first += kVec) {
            float window[K * K][kVec];
            transform_2d<kExtent, K>(
                [&](int i, int j) {
                    return total((i * kExtent + j) * sums_point() + o * padded_channels() + first);
                },
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
