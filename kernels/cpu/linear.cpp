// Linear layer on the CPU: y = x w^T + b and its gradients, cache-blocked.
//
//   forward:  y[n][o]  = b[o] + sum_f w[o][f] x[n][f]
//   data:     dx[n][f] = sum_o w[o][f] dy[n][o]
//   weights:  dw[o][f] = sum_n dy[n][o] x[n][f],  db[o] = sum_n dy[n][o]
//
// Optionally with a fused ReLU: y = max(y, 0), and backward starts by setting dy = 0 where y <= 0.
//
// Several leaves (Op::forward_leaves) are one product, whose blocks of images lie apart; their
// weight gradients are added up tile by tile, and only the sums go to memory.
//
// All three use the register tile of tile.hpp; n counts blocks of kLanes images. Large weight
// matrices are read (or written) once from memory, and the smaller operand stays in the level-2
// cache.
#include <algorithm>

#include "base/sum_tree.hpp"
#include "kernels/cpu/ops.hpp"
#include "kernels/cpu/tile.hpp"

namespace gyre::cpu {
namespace {

constexpr int kCacheFloats =
    128 * 1024;                  // the part of a level-2 cache an operand may take: 512 KiB
constexpr int kPanelRows = 256;  // of w, packed at a time for the input gradient
constexpr int kPanelCols = 256;
constexpr int kGradientCols = 4 * kLanes;  // columns of dw per task
constexpr int kLineFloats = 16;            // floats in a cache line

// Prefetches rows of a matrix, as their strides defeat the hardware prefetcher.
template <bool kForWriting>
void prefetch_rows(const float* first, std::ptrdiff_t row_step, int rows, int cols) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; c += kLineFloats) {
            __builtin_prefetch(first + r * row_step + c, kForWriting ? 1 : 0, 2);
        }
    }
}

int all_blocks(const Leaves& leaves) {
    int blocks = 0;
    for (const Batch& batch : leaves.batches) {
        blocks += block_count(batch.n);
    }
    return blocks;
}

// Goes through the blocks of all leaves: set(c, io, block) for the columns c of a group, then
// run(group, columns).
template <typename Set, typename Run>
void for_column_groups(const Leaves& leaves, const Split& groups, const Set& set, const Run& run) {
    int group = 0, c = 0;
    for (std::size_t leaf = 0; leaf < leaves.batches.size(); ++leaf) {
        for (int block = 0; block < block_count(leaves.batches[leaf].n); ++block) {
            set(c++, *leaves.io[leaf], block);
            if (c == groups.size(group)) {
                run(group++, c);
                c = 0;
            }
        }
    }
}

class LinearOp final : public Op {
 public:
    LinearOp(const Context& context, const LinearSpec& spec, const OpSizes& sizes)
        : context_(context),
          in_(spec.shape.in_features),
          out_(spec.shape.out_features),
          relu_(spec.relu),
          // Whatever is larger than the cache would come from memory for each leaf.
          together_(std::int64_t{in_} * out_ > kCacheFloats),
          rows_(out_, kTileRows),
          gradient_blocks_(std::max(1, block_count(sizes.train_images))) {
        const std::int64_t images = std::int64_t{gradient_blocks_} * kLanes;
        const int leaves = together_ ? sizes.leaves : 1;
        const std::int64_t shared = together_ ? tree_slots(leaves) * std::int64_t{out_} : 0;
        const std::int64_t tiles =
            together_ ? tree_slots(leaves) * std::int64_t{kTileRows} * kGradientCols : 0;
        context.workspace.reserve(
            shared, std::max<std::int64_t>(kPanelRows * kPanelCols,
                                           leaves * images * kGradientCols + kSpillFloats + tiles));
    }

    OpNeeds needs() const override { return {.backward_reads_y = relu_, .together = together_}; }
    void forward(const Batch& batch, const OpIo& io) override {
        const OpIo* const ios[] = {&io};
        forward_leaves({{&batch, 1}, ios});
    }
    // dy = 0 where y <= 0.
    void backward_begin(const Batch& batch, const OpIo& io) override;
    void backward_params(const Batch& batch, const OpIo& io) override;
    void backward_input(const Batch& batch, const OpIo& io) override {
        const OpIo* const ios[] = {&io};
        backward_input_leaves({{&batch, 1}, ios});
    }
    void forward_leaves(const Leaves& leaves) override;
    void backward_params_leaves(const Leaves& leaves, const LeafSums& sums) override;
    void backward_input_leaves(const Leaves& leaves) override;

 private:
    // For the last columns of a row tile of dw, if they do not fill a vector.
    static constexpr std::int64_t kSpillFloats = kTileRows * kLanes;

    void input_gradient_panel(const Leaves& leaves, int blocks, int first, int width,
                              float* panel) const;
    void transpose_columns(int first, int width, int first_block, int blocks, const float* x,
                           float* panel) const;
    void weight_gradient_panel(int first, int width, int first_block, int blocks, float* panel,
                               const OpIo& io) const;
    void weight_sums_panel(const Leaves& leaves, const LeafSums& sums, const LeafSums::Node& node,
                           int first, int width, float* memory) const;
    void bias_gradient(int blocks, const float* dy, float* db) const;

    const Context context_;
    const int in_, out_;
    const bool relu_;
    const bool together_;
    const Split rows_;           // of w, in the forward pass and the weight gradient
    const int gradient_blocks_;  // blocks whose x fits in the workspace
};

void LinearOp::forward_leaves(const Leaves& leaves) {
    const int blocks = all_blocks(leaves);
    const OpIo& io = *leaves.io[0];  // for what all have in common
    const int depth = std::max(64, kCacheFloats / (kLanes * std::max(1, blocks)));
    const Split cols(blocks, kTileCols), depths(in_, depth);
    for (int part = 0; part < depths.parts && blocks > 0; ++part) {
        const int k = depths.begin(part);
        context_.pool.parallel_for(rows_.parts, [&](std::int64_t task, int) {
            const int row = rows_.begin(static_cast<int>(task));
            const int row_count = rows_.size(static_cast<int>(task));
            TileLoops loops;
            loops.count = {1, 1, depths.size(part)};
            loops.x_step = {0, 0, kLanes};
            loops.w_step = {0, 0, 1};
            TileOperands op;
            op.w = io.params[0].f32() + std::ptrdiff_t{row} * in_ + k;
            op.w_row = in_;
            op.y_row = kLanes;
            op.start = io.params[1].f32() + row;
            op.accumulate = part > 0;
            op.relu = relu_ && part + 1 == depths.parts;
            for_column_groups(
                leaves, cols,
                [&](int c, const OpIo& of_leaf, std::ptrdiff_t block) {
                    op.x[c] = of_leaf.x.f32() + (block * in_ + k) * kLanes;
                    op.y[c] = of_leaf.y.f32() + (block * out_ + row) * kLanes;
                },
                [&](int, int count) { tile_function(row_count, count)(loops, op); });
        });
    }
}

void LinearOp::backward_begin(const Batch& batch, const OpIo& io) {
    if (relu_) {
        context_.for_ranges(
            std::int64_t{block_count(batch.n)} * out_ * kLanes,
            [y = io.y.f32(), dy = io.dy.f32()](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                    dy[i] = y[i] <= 0.0f ? 0.0f : dy[i];
                }
            });
    }
}

void LinearOp::backward_input_leaves(const Leaves& leaves) {
    const int blocks = all_blocks(leaves);
    if (blocks == 0) {
        return;
    }
    const Split panels(in_, kPanelCols);
    context_.pool.parallel_for(panels.parts, [&](std::int64_t task, int worker) {
        input_gradient_panel(leaves, blocks, panels.begin(static_cast<int>(task)),
                             panels.size(static_cast<int>(task)),
                             context_.workspace.worker(worker));
    });
}

// Computes dx of input features [first, first + width); `panel` holds a copy of their weights.
void LinearOp::input_gradient_panel(const Leaves& leaves, int blocks, int first, int width,
                                    float* panel) const {
    const float* const w = leaves.io[0]->params[0].f32();
    const Split depths(out_, kPanelRows), cols(blocks, kTileCols), rows(width, kTileRows);
    for (int part = 0; part < depths.parts; ++part) {
        const int k = depths.begin(part);
        const int depth = depths.size(part);
        for (int r = 0; r < depth; ++r) {
            std::copy_n(w + std::ptrdiff_t{k + r} * in_ + first, width, panel + r * width);
        }
        TileLoops loops;
        loops.count = {1, 1, depth};
        loops.x_step = {0, 0, kLanes};
        loops.w_step = {0, 0, width};
        TileOperands op;
        op.w_row = 1;
        op.y_row = kLanes;
        op.accumulate = part > 0;
        const auto run = [&](int group, int count) {
            const TileOperands of_group = op;
            for (int tile = 0; tile < rows.parts; ++tile) {
                const int row = rows.begin(tile);
                if (group == 0) {
                    // Prefetch this tile's share of the next panel.
                    const bool last = part + 1 == depths.parts;
                    const int next_row = last ? 0 : k + depth;
                    const int next_first = last ? first + width : first;
                    const int begin = kPanelRows * tile / rows.parts;
                    const int end = kPanelRows * (tile + 1) / rows.parts;
                    prefetch_rows<false>(w + std::ptrdiff_t{next_row + begin} * in_ + next_first,
                                         in_, std::min(end, out_ - next_row) - begin,
                                         std::min(width, in_ - next_first));
                }
                op.w = panel + row;
                for (int c = 0; c < count; ++c) {
                    op.y[c] = of_group.y[c] + std::ptrdiff_t{row} * kLanes;
                }
                tile_function(rows.size(tile), count)(loops, op);
            }
        };
        for_column_groups(
            leaves, cols,
            [&](int c, const OpIo& of_leaf, std::ptrdiff_t block) {
                op.x[c] = of_leaf.dy.f32() + (block * out_ + k) * kLanes;
                op.y[c] = of_leaf.dx.f32() + (block * in_ + first) * kLanes;
            },
            run);
    }
}

void LinearOp::backward_params(const Batch& batch, const OpIo& io) {
    const int blocks = block_count(batch.n);
    const int panel_count = (in_ + kGradientCols - 1) / kGradientCols;
    // More images than in an ordinary pass occur only if they are those of all ranks (Net::Take).
    // They are then processed in several parts, each adding to the sums of those before it.
    context_.pool.parallel_for(panel_count, [&](std::int64_t task, int worker) {
        const int first = static_cast<int>(task) * kGradientCols;
        int done = 0;
        do {
            const int part = std::min(gradient_blocks_, blocks - done);
            weight_gradient_panel(first, std::min(kGradientCols, in_ - first), done, part,
                                  context_.workspace.worker(worker), io);
            done += part;
        } while (done < blocks);
    });
    bias_gradient(blocks, io.dy.f32(), io.grads[1].f32());
}

// Computes dw of input features [first, first + width) over `blocks` blocks from first_block on,
// and adds it to the sums so far unless first_block = 0.
void LinearOp::weight_gradient_panel(int first, int width, int first_block, int blocks,
                                     float* panel, const OpIo& io) const {
    transpose_columns(first, width, first_block, blocks, io.x.f32(), panel);
    float* spill = panel + std::ptrdiff_t{gradient_blocks_} * kLanes * kGradientCols;
    TileLoops loops;
    loops.count = {1, blocks, kLanes};
    loops.x_step = {0, std::ptrdiff_t{kLanes} * kGradientCols, kGradientCols};
    loops.w_step = {0, std::ptrdiff_t{out_} * kLanes, 1};
    const int whole = width / kLanes;
    const int rest = width % kLanes;
    for (int tile = 0; tile < rows_.parts; ++tile) {
        const int row = rows_.begin(tile);
        const int row_count = rows_.size(tile);
        TileOperands op;
        op.w = io.dy.f32() + (std::ptrdiff_t{first_block} * out_ + row) * kLanes;
        op.w_row = kLanes;
        op.y_row = in_;
        op.accumulate = first_block > 0;
        float* to = io.grads[0].f32() + std::ptrdiff_t{row} * in_ + first;
        if (tile + 1 < rows_.parts) {
            prefetch_rows<true>(to + std::ptrdiff_t{row_count} * in_, in_, rows_.size(tile + 1),
                                width);
        }
        const Split groups(whole, kTileCols);
        for (int group = 0; whole > 0 && group < groups.parts; ++group) {
            for (int c = 0; c < groups.size(group); ++c) {
                op.x[c] = panel + (groups.begin(group) + c) * kLanes;
                op.y[c] = to + (groups.begin(group) + c) * kLanes;
            }
            tile_function(row_count, groups.size(group))(loops, op);
        }
        if (rest > 0) {
            float* const end = to + whole * kLanes;
            for (int r = 0; op.accumulate && r < row_count; ++r) {
                std::copy_n(end + std::ptrdiff_t{r} * in_, rest, spill + r * kLanes);
            }
            op.x[0] = panel + whole * kLanes;
            op.y[0] = spill;
            op.y_row = kLanes;
            tile_function(row_count, 1)(loops, op);
            for (int r = 0; r < row_count; ++r) {
                std::copy_n(spill + r * kLanes, rest, end + std::ptrdiff_t{r} * in_);
            }
        }
    }
}

// panel: x of these features, as [images][kGradientCols].
void LinearOp::transpose_columns(int first, int width, int first_block, int blocks, const float* x,
                                 float* panel) const {
    for (int block = 0; block < blocks; ++block) {
        const float* from = x + (std::ptrdiff_t{first_block + block} * in_ + first) * kLanes;
        float* to = panel + std::ptrdiff_t{block} * kLanes * kGradientCols;
        for (int f = 0; f < kGradientCols; f += kLanes) {
            transpose(from + f * kLanes, kLanes, std::clamp(width - f, 0, kLanes), to + f,
                      kGradientCols);
        }
    }
}

void LinearOp::backward_params_leaves(const Leaves& leaves, const LeafSums& sums) {
    const int panel_count = (in_ + kGradientCols - 1) / kGradientCols;
    const OpIo& io = *leaves.io[0];
    context_.pool.parallel_for(panel_count, [&](std::int64_t task, int worker) {
        const int first = static_cast<int>(task) * kGradientCols;
        for (const LeafSums::Node& node : sums.nodes) {
            weight_sums_panel(leaves, sums, node, first, std::min(kGradientCols, in_ - first),
                              context_.workspace.worker(worker));
        }
    });
    float* const slots = context_.workspace.shared();
    const auto slot = [&](int i) { return slots + std::ptrdiff_t{i} * out_; };
    for (const LeafSums::Node& node : sums.nodes) {
        add_in_tree(
            node.last - node.first,
            [&](int term, int to) {
                const auto leaf = static_cast<std::size_t>(node.first + term);
                bias_gradient(block_count(leaves.batches[leaf].n), leaves.io[leaf]->dy.f32(),
                              slot(to));
            },
            [&](int left, int right) {
                for (int o = 0; o < out_; ++o) {
                    slot(left)[o] += slot(right)[o];
                }
            });
        std::copy_n(slot(0), out_, sums.place(node, io.grads[1]));
    }
}

// Computes the sum of dw of input features [first, first + width) over the leaves of a node.
void LinearOp::weight_sums_panel(const Leaves& leaves, const LeafSums& sums,
                                 const LeafSums::Node& node, int first, int width,
                                 float* memory) const {
    constexpr std::ptrdiff_t kTileFloats = std::ptrdiff_t{kTileRows} * kGradientCols;
    const int terms = node.last - node.first;
    float* const tiles = memory;
    float* const panels = tiles + tree_slots(terms) * kTileFloats;
    const std::ptrdiff_t panel_floats = std::ptrdiff_t{gradient_blocks_} * kLanes * kGradientCols;
    for (int term = 0; term < terms; ++term) {
        const auto leaf = static_cast<std::size_t>(node.first + term);
        transpose_columns(first, width, 0, block_count(leaves.batches[leaf].n),
                          leaves.io[leaf]->x.f32(), panels + term * panel_floats);
    }
    TileLoops loops;
    loops.x_step = {0, std::ptrdiff_t{kLanes} * kGradientCols, kGradientCols};
    loops.w_step = {0, std::ptrdiff_t{out_} * kLanes, 1};
    const Split groups((width + kLanes - 1) / kLanes, kTileCols);
    float* const sum = sums.place(node, leaves.io[0]->grads[0]);
    for (int tile = 0; tile < rows_.parts; ++tile) {
        const int row = rows_.begin(tile);
        const int row_count = rows_.size(tile);
        float* const to = sum + std::ptrdiff_t{row} * in_ + first;
        prefetch_rows<true>(to, in_, row_count, width);
        add_in_tree(
            terms,
            [&](int term, int slot) {
                const auto leaf = static_cast<std::size_t>(node.first + term);
                loops.count = {1, block_count(leaves.batches[leaf].n), kLanes};
                TileOperands op;
                op.w = leaves.io[leaf]->dy.f32() + std::ptrdiff_t{row} * kLanes;
                op.w_row = kLanes;
                op.y_row = kGradientCols;
                for (int group = 0; group < groups.parts; ++group) {
                    for (int c = 0; c < groups.size(group); ++c) {
                        const std::ptrdiff_t at = std::ptrdiff_t{groups.begin(group) + c} * kLanes;
                        op.x[c] = panels + term * panel_floats + at;
                        op.y[c] = tiles + slot * kTileFloats + at;
                    }
                    tile_function(row_count, groups.size(group))(loops, op);
                }
            },
            [&](int left, int right) {
                float* const y = tiles + left * kTileFloats;
                const float* const x = tiles + right * kTileFloats;
                for (std::ptrdiff_t i = 0; i < std::ptrdiff_t{row_count} * kGradientCols; ++i) {
                    y[i] += x[i];
                }
            });
        for (int r = 0; r < row_count; ++r) {
            std::copy_n(tiles + r * kGradientCols, width, to + std::ptrdiff_t{r} * in_);
        }
    }
}

void LinearOp::bias_gradient(int blocks, const float* dy, float* db) const {
    for (int o = 0; o < out_; ++o) {
        float sum = 0.0f;
        for (int block = 0; block < blocks; ++block) {
            const float* d = dy + (std::ptrdiff_t{block} * out_ + o) * kLanes;
            for (int lane = 0; lane < kLanes; ++lane) {
                sum += d[lane];
            }
        }
        db[o] = sum;
    }
}

}  // namespace

std::unique_ptr<Op> make_op(const Context& context, const LinearSpec& spec, const OpSizes& sizes) {
    if (spec.dropout > 0.0f || spec.dy_masked || spec.dx_factor > 0.0f) {
        return nullptr;
    }
    return std::make_unique<LinearOp>(context, spec, sizes);
}

}  // namespace gyre::cpu
