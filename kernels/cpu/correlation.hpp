// The correlation of one block of images with windows of weights, by the register tile: the core of
// a convolution's forward pass and input gradient.
//
//   y[o][pixel] = bias[o] + sum over c and the pixel's window of w[o][c][line][column] * x[c][...]
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/thread_pool.hpp"
#include "kernels/cpu/tile.hpp"

namespace gyre::cpu {

// An output pixel: the offsets in floats at which it reads (for window position 0, 0) and writes,
// and the window positions [i0, i1) x [j0, j1) outside the padding.
struct Pixel {
    std::ptrdiff_t x, y;
    int i0, i1, j0, j1;
};

class Correlation {
 public:
    // Strides in floats.
    struct Steps {
        std::ptrdiff_t w_row, w_channel, w_line;  // w_row: from one output channel to the next
        std::ptrdiff_t x_channel, x_line;
        std::ptrdiff_t y_channel;
    };
    // relu: y = max(y, 0) at the end.
    Correlation(int in_channels, int out_channels, const Steps& steps, bool relu = false)
        : in_channels_(in_channels), rows_(out_channels, kTileRows), steps_(steps), relu_(relu) {}

    // Adds pixels; neighbouring ones share a register tile.
    void append(const std::vector<Pixel>& pixels);
    // A task is one row tile over one chunk of the pixels: those appended since the last
    // end_chunk(), or those of share_out(), which divides all pixels among the threads.
    void end_chunk() { chunk_ends_.push_back(static_cast<int>(groups_.size())); }
    void share_out(int threads);
    static int wanted_tasks(int threads) { return threads == 1 ? 1 : 4 * threads; }

    // bias: [output channels], or null.
    void run(ThreadPool& pool, const float* x, const float* w, const float* bias, float* y) const {
        pool.parallel_for(tasks(), [&](std::int64_t task, int) {
            const Part which = part(task);
            run(which, x, w, bias, y + which.row * steps_.y_channel);
        });
    }

    // The part computed by a task: output channels [row, row + rows) of a chunk of pixels.
    struct Part {
        int row, rows, chunk;
    };
    std::int64_t tasks() const { return std::int64_t{rows_.parts} * chunks(); }
    Part part(std::int64_t task) const {
        const int tile = static_cast<int>(task / chunks());
        return {rows_.begin(tile), rows_.size(tile), static_cast<int>(task % chunks())};
    }
    // y: the start of the part's first channel.
    void run(const Part& part, const float* x, const float* w, const float* bias, float* y) const;

 private:
    struct Group {
        int count;
        std::ptrdiff_t x[kTileCols], y[kTileCols];
        std::ptrdiff_t w;
        int lines, columns;  // of the window
    };
    int chunks() const { return static_cast<int>(chunk_ends_.size()); }

    int in_channels_;
    Split rows_;
    Steps steps_;
    bool relu_;
    std::vector<Group> groups_;
    std::vector<int> chunk_ends_;  // end of each chunk, in groups
};

}  // namespace gyre::cpu
