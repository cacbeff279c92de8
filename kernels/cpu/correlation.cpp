#include "kernels/cpu/correlation.hpp"

namespace gyre::cpu {

void Correlation::append(const std::vector<Pixel>& pixels) {
    const Split cols(static_cast<int>(pixels.size()), kTileCols);
    for (int part = 0; part < cols.parts && !pixels.empty(); ++part) {
        const Pixel* pixel = pixels.data() + cols.begin(part);
        Group group{};
        group.count = cols.size(part);
        Pixel all = pixel[0];
        for (int c = 1; c < group.count; ++c) {
            all.i0 = std::min(all.i0, pixel[c].i0);
            all.i1 = std::max(all.i1, pixel[c].i1);
            all.j0 = std::min(all.j0, pixel[c].j0);
            all.j1 = std::max(all.j1, pixel[c].j1);
        }
        for (int c = 0; c < group.count; ++c) {
            group.x[c] = pixel[c].x + all.i0 * steps_.x_line + std::ptrdiff_t{all.j0} * kLanes;
            group.y[c] = pixel[c].y;
        }
        group.w = all.i0 * steps_.w_line + all.j0;
        group.lines = std::max(0, all.i1 - all.i0);
        group.columns = std::max(0, all.j1 - all.j0);
        groups_.push_back(group);
    }
}

void Correlation::share_out(int threads) {
    const auto groups = static_cast<int>(groups_.size());
    const Split chunks(groups, std::max(1, groups * rows_.parts / wanted_tasks(threads)));
    chunk_ends_.clear();
    for (int chunk = 0; chunk < chunks.parts; ++chunk) {
        chunk_ends_.push_back(chunks.begin(chunk + 1));
    }
}

void Correlation::run(const Part& part, const float* x, const float* w, const float* bias,
                      float* y) const {
    const auto chunk = static_cast<std::size_t>(part.chunk);
    TileLoops loops;
    loops.x_step = {steps_.x_channel, steps_.x_line, kLanes};
    loops.w_step = {steps_.w_channel, steps_.w_line, 1};
    TileOperands op;
    op.w_row = steps_.w_row;
    op.y_row = steps_.y_channel;
    op.start = bias ? bias + part.row : nullptr;
    op.relu = relu_;
    for (int i = chunk == 0 ? 0 : chunk_ends_[chunk - 1]; i < chunk_ends_[chunk]; ++i) {
        const Group& group = groups_[static_cast<std::size_t>(i)];
        for (int c = 0; c < group.count; ++c) {
            op.x[c] = x + group.x[c];
            op.y[c] = y + group.y[c];
        }
        op.w = w + part.row * steps_.w_row + group.w;
        loops.count = {in_channels_, group.lines, group.columns};
        tile_function(part.rows, group.count)(loops, op);
    }
}

}  // namespace gyre::cpu
