// The Winograd operation. Forward and input gradient process a few tiles at a time; at each point,
// the sum over the channels is a matrix product. There are as many tiles as fit the register tile,
// of several blocks of images if one has few of them: each reads all weights, which do not stay in
// a cache where there are many channels.
#include "kernels/cpu/winograd.hpp"

#include <algorithm>

#include "kernels/cpu/winograd_weights.hpp"

namespace gyre::cpu {
namespace {

// Transformed tiles of a block, 640 KiB. The order of the input gradient's sums follows from it.
constexpr std::ptrdiff_t kInputFloats = 160 * 1024;
constexpr std::ptrdiff_t kOutputFloats = 48 * 1024;  // products at a time: 192 KiB
constexpr int kMostTiles = 4;                        // of all blocks

template <int K>
class WinogradOp final : public Op {
 public:
    WinogradOp(const Context& context, const Conv2dSpec& spec, const OpSizes& sizes)
        : context_(context),
          in_(spec.shape.in),
          out_(spec.shape.out()),
          tail_(spec, sizes.train_images),
          tiles_(spec.shape, tail_),
          weights_(context, spec.shape, tail_, tiles_, block_count(sizes.train_images)),
          most_blocks_(std::max(1, block_count(sizes.most()))),
          forward_(in_.channels, out_.channels, forward_group()),
          backward_(out_.channels, in_.channels, backward_group()),
          band_rows_(std::clamp(backward_.group.of_block / tiles_.across(), 1, tiles_.down())) {
        const std::int64_t apart = tiles_.tail_apart() ? out_.elems() * kLanes : 0;
        context.workspace.reserve(
            std::max(weights_.shared_floats(),
                     kPoints * std::max(forward_.weight_point(), backward_.weight_point()) + apart),
            std::max(
                {weights_.worker_floats(), forward_.worker_floats(), backward_.worker_floats()}));
    }

    OpNeeds needs() const override {
        return {.saved_bytes = tail_.saved_bytes(), .backward_reads_y = tail_.relu()};
    }
    void forward(const Batch& batch, const OpIo& io) override;
    void backward_params(const Batch& batch, const OpIo& io) override {
        weights_.run(block_count(batch.n), io);
    }
    void backward_input(const Batch& batch, const OpIo& io) override;

 private:
    static constexpr int kPoints = WinogradTiles<K>::kPoints;

    struct Blocks {
        int first, count;
    };
    // Tiles that are processed together: so many of each of several blocks.
    struct TileGroup {
        int of_block, blocks;
        int tiles() const { return of_block * blocks; }
    };
    // Sums over the channels `from` for the channels `to`, for a group of tiles. The weights are
    // [point][to][from].
    struct Direction {
        Direction(int from_, int to, const TileGroup& most)
            : from(from_), group(most), rows(to, kTileRows) {
            const std::ptrdiff_t floats = kPoints * kTileRows * channel();
            row_parts =
                static_cast<int>(std::clamp<std::ptrdiff_t>(kOutputFloats / floats, 1, rows.parts));
        }
        std::ptrdiff_t channel() const { return std::ptrdiff_t{group.tiles()} * kLanes; }
        std::ptrdiff_t weight_row() const { return whole_lines(from); }
        std::ptrdiff_t weight_point() const {
            return WinogradTiles<K>::point_step(rows.total * weight_row());
        }
        std::ptrdiff_t input_point() const {
            return WinogradTiles<K>::point_step(from * channel());
        }
        std::ptrdiff_t output_point() const {
            return WinogradTiles<K>::point_step(row_parts * kTileRows * channel());
        }
        std::int64_t worker_floats() const { return kPoints * (input_point() + output_point()); }
        const int from;
        const TileGroup group;  // the largest
        const Split rows;
        int row_parts;  // row parts processed at a time
    };
    static int tiles_at_once(int channels) {
        return static_cast<int>(std::clamp<std::ptrdiff_t>(
            kInputFloats / (std::ptrdiff_t{kPoints} * channels * kLanes), 1, kMostTiles));
    }
    // Adds blocks until the register tile is full, if all of their tiles are in it; fewer if there
    // would be too few tasks for the threads, of which `most` tiles of a block are one at least.
    TileGroup with_blocks(int of_block, int most) const {
        const int blocks = tiles_.tail_apart() ? 1 : most_blocks_;
        const int wanted = kMostTiles / of_block;
        const int tasks = blocks * std::max(1, tiles_.count() / most);
        const int threads = context_.pool.threads();
        return {
            of_block,
            std::clamp(threads == 1 ? wanted : std::min(wanted, tasks / (2 * threads)), 1, blocks)};
    }
    TileGroup forward_group() const {
        const int threads = context_.pool.threads();
        const int all = tiles_.count() * most_blocks_;
        const int most = std::min(kMostTiles, tiles_.count());
        const int of_block = threads == 1 ? most : std::clamp(all / (2 * threads), 1, most);
        return with_blocks(of_block, of_block);
    }
    // The order of sums where tiles overlap depends on the tiles of a block.
    TileGroup backward_group() const {
        const int of_block = std::min(tiles_at_once(out_.channels), tiles_.count());
        return with_blocks(of_block, std::max(of_block, tiles_.across()));
    }
    // to [point][row][from] of a direction = G w G^T; w of row r and channel f begins at
    // r * w_row + f * w_from.
    void transform_weights(const Direction& direction, const float* w, std::ptrdiff_t w_row,
                           std::ptrdiff_t w_from, float* to) const;
    // Calls finish(row, its points) for each row, computed from `count` transformed tiles at
    // `input`, which is followed by memory for the products.
    template <typename Finish>
    void multiply(const Direction& direction, int count, const float* weights, float* input,
                  Finish&& finish) const;
    void input_gradient_band(const OpIo& io, const Blocks& of_blocks, int band,
                             const float* weights, const float* unfused, float* memory) const;

    const Context context_;
    const Shape in_, out_;  // of the convolution without its tail
    const Conv2dTail tail_;
    const WinogradTiles<K> tiles_;
    const WinogradWeights<K> weights_;
    const int most_blocks_;
    const Direction forward_, backward_;
    // Lines of tiles whose input gradients one task adds to dx. Tiles of neighbouring bands
    // overlap, so even bands go first and the order of summation does not depend on the threads.
    const int band_rows_;
};

template <int K>
void WinogradOp<K>::transform_weights(const Direction& direction, const float* w,
                                      std::ptrdiff_t w_row, std::ptrdiff_t w_from,
                                      float* to) const {
    constexpr int kExtent = WinogradTiles<K>::kExtent;
    context_.pool.parallel_for(direction.rows.total, [&](std::int64_t row, int) {
        for (int first = 0; first < direction.from; first += kVec) {
            float window[K * K][kVec] = {};
            for (int c = 0; c < std::min(kVec, direction.from - first); ++c) {
                const float* const from = w + row * w_row + (first + c) * w_from;
                for (int k = 0; k < K * K; ++k) {
                    window[k][c] = from[k];
                }
            }
            float* points = to + row * direction.weight_row() + first;
            transform_2d<K, kExtent>(
                [&](int i, int j) { return load(window[i * K + j]); }, Transforms<K>::weights,
                [&](int i, int j, Vec v) {
                    store(points + (i * kExtent + j) * direction.weight_point(), v);
                });
        }
    });
}

template <int K>
template <typename Finish>
void WinogradOp<K>::multiply(const Direction& direction, int count, const float* weights,
                             float* input, Finish&& finish) const {
    const Split cols(count, kTileCols);
    const Split& rows = direction.rows;
    float* const output = input + kPoints * direction.input_point();
    TileProduct product;
    product.w_row = direction.weight_row();
    product.w_step = 1;
    product.x_step = product.y_row = direction.channel();
    product.depth = direction.from;
    for (int part = 0; part < rows.parts; part += direction.row_parts) {
        const int end = std::min(rows.parts, part + direction.row_parts);
        const int first = rows.begin(part);
        for (int point = 0; point < kPoints; ++point) {
            product.w = weights + point * direction.weight_point() + first * product.w_row;
            product.x = input + point * direction.input_point();
            product.y = output + point * direction.output_point();
            product.run(rows, part, end, cols);
        }
        for (int row = first; row < rows.begin(end); ++row) {
            finish(row, output + (row - first) * direction.channel());
        }
    }
}

template <int K>
void WinogradOp<K>::forward(const Batch& batch, const OpIo& io) {
    tail_.draw_factors(context_, batch, io.saved);
    float* const weights = context_.workspace.shared();
    // The outputs of one block before the tail, if that is applied apart.
    float* const outputs = weights + kPoints * forward_.weight_point();
    constexpr std::ptrdiff_t kWindow = std::ptrdiff_t{K} * K;
    transform_weights(forward_, io.params[0].f32(), in_.channels * kWindow, kWindow, weights);
    const Split groups(tiles_.count(), forward_.group.of_block);
    const std::ptrdiff_t plane = in_.plane_elems() * kLanes;
    const auto run_group = [&](const Blocks& of_blocks, int group, float* points) {
        const int first = groups.begin(group), count = groups.size(group);
        Conv2dTail::Output to[kMostTiles];
        for (int b = 0; b < of_blocks.count; ++b) {
            const int block = of_blocks.first + b;
            const float* x = io.x.f32() + std::ptrdiff_t{block} * in_.channels * plane;
            for (int c = 0; c < in_.channels; ++c) {
                for (int t = 0; t < count; ++t) {
                    tiles_.input(x + c * plane, first + t,
                                 points + c * forward_.channel() + (b * count + t) * kLanes,
                                 forward_.input_point());
                }
            }
            to[b] = tiles_.tail_apart() ? Conv2dTail::Output{.y = outputs}
                                        : tail_.output(batch, io, block);
        }
        multiply(forward_, of_blocks.count * count, weights, points, [&](int o, const float* at) {
            for (int i = 0; i < of_blocks.count * count; ++i) {
                tiles_.output(at + i * kLanes, forward_.output_point(), first + i % count, o,
                              io.params[1].f32()[o], to[i / count]);
            }
        });
    };
    const int blocks = block_count(batch.n);
    const int at_once = tiles_.tail_apart() ? 1 : blocks;
    for (int first = 0; first < blocks; first += at_once) {
        const Split joined(at_once, forward_.group.blocks);
        context_.pool.parallel_for(
            std::int64_t{joined.parts} * groups.parts, [&](std::int64_t task, int worker) {
                const auto part = static_cast<int>(task / groups.parts);
                run_group({first + joined.begin(part), joined.size(part)},
                          static_cast<int>(task % groups.parts), context_.workspace.worker(worker));
            });
        if (tiles_.tail_apart()) {
            tail_.finish_block(context_, tail_.output(batch, io, first), outputs);
        }
    }
}

template <int K>
void WinogradOp<K>::backward_input(const Batch& batch, const OpIo& io) {
    float* const weights = context_.workspace.shared();
    // The gradients of one block before the tail, if that is applied apart.
    float* const unfused = weights + kPoints * backward_.weight_point();
    constexpr std::ptrdiff_t kWindow = std::ptrdiff_t{K} * K;
    transform_weights(backward_, io.params[0].f32(), kWindow, in_.channels * kWindow, weights);
    const int blocks = block_count(batch.n);
    const int at_once = tiles_.tail_apart() ? 1 : blocks;
    const int bands = (tiles_.down() + band_rows_ - 1) / band_rows_;
    for (int first = 0; first < blocks; first += at_once) {
        if (tiles_.tail_apart()) {
            tail_.gradient_block(context_, io, first, unfused);
        }
        const Split joined(at_once, backward_.group.blocks);
        for (int odd = 0; odd < std::min(2, bands); ++odd) {
            const int of_block = (bands - odd + 1) / 2;
            context_.pool.parallel_for(
                std::int64_t{joined.parts} * of_block, [&](std::int64_t task, int worker) {
                    const auto part = static_cast<int>(task / of_block);
                    input_gradient_band(io, {first + joined.begin(part), joined.size(part)},
                                        2 * static_cast<int>(task % of_block) + odd, weights,
                                        unfused, context_.workspace.worker(worker));
                });
        }
    }
}

template <int K>
void WinogradOp<K>::input_gradient_band(const OpIo& io, const Blocks& of_blocks, int band,
                                        const float* weights, const float* unfused,
                                        float* points) const {
    const std::ptrdiff_t plane = in_.plane_elems() * kLanes;
    const std::ptrdiff_t planes = of_blocks.count * std::ptrdiff_t{in_.channels};
    float* const dx = io.dx.f32() + std::ptrdiff_t{of_blocks.first} * in_.channels * plane;
    const int top = band * band_rows_, bottom = std::min(tiles_.down(), top + band_rows_);
    if (band % 2 == 0) {
        // Zeroes dx of this band and the next before anything is added.
        const auto line_of = [&](int row) {
            return row == 0               ? 0
                   : row >= tiles_.down() ? in_.height
                                          : std::clamp(tiles_.first_line(row), 0, in_.height);
        };
        const int begin = line_of(top), end = line_of(top + 2 * band_rows_);
        const std::ptrdiff_t line = std::ptrdiff_t{in_.width} * kLanes;
        for (std::ptrdiff_t c = 0; c < planes; ++c) {
            std::fill_n(dx + c * plane + begin * line, (end - begin) * line, 0.0f);
        }
    }
    const Split groups((bottom - top) * tiles_.across(), backward_.group.of_block);
    for (int group = 0; group < groups.parts; ++group) {
        const int first = top * tiles_.across() + groups.begin(group);
        const int count = groups.size(group);
        for (int b = 0; b < of_blocks.count; ++b) {
            for (int o = 0; o < out_.channels; ++o) {
                const Conv2dTail::Gradient from =
                    tiles_.tail_apart()
                        ? Conv2dTail::Gradient{.dy = unfused + o * out_.plane_elems() * kLanes}
                        : tail_.gradient(io, of_blocks.first + b, o);
                for (int t = 0; t < count; ++t) {
                    tiles_.gradient(from, first + t,
                                    points + o * backward_.channel() + (b * count + t) * kLanes,
                                    backward_.input_point(), nullptr);
                }
            }
        }
        multiply(backward_, of_blocks.count * count, weights, points, [&](int c, const float* at) {
            for (int i = 0; i < of_blocks.count * count; ++i) {
                tiles_.input_gradient(at + i * kLanes, backward_.output_point(), first + i % count,
                                      dx + (i / count * std::ptrdiff_t{in_.channels} + c) * plane);
            }
        });
    }
}

}  // namespace

std::unique_ptr<Op> make_winograd(const Context& context, const Conv2dSpec& spec,
                                  const OpSizes& sizes) {
    if (spec.shape.kernel == 3) {
        return std::make_unique<WinogradOp<3>>(context, spec, sizes);
    }
    return std::make_unique<WinogradOp<5>>(context, spec, sizes);
}

}  // namespace gyre::cpu
