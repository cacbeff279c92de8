#include "kernels/cpu/conv2d_bf16_weights.hpp"

#include <algorithm>

namespace gyre::cpu {
namespace {

constexpr std::int64_t kStripElems = 64 * 1024;  // that stay in the second-level cache

}  // namespace

Bf16WeightGradient::Bf16WeightGradient(const Conv2dShape& shape)
    : shape_(shape),
      out_(shape.out()),
      pixels_(shape.stride == 1 ? 2 : 1),
      out_steps_((out_.width + pixels_ - 1) / pixels_),
      in_rows_(shape.in.height + 2 * shape.padding),
      in_columns_(
          std::max(shape.in.width + 2 * shape.padding, out_steps_ * pixels_ - 1 + shape.kernel)),
      out_tiles_(tiles_of(shape.out_channels)),
      in_tiles_(tiles_of(shape.in.channels)) {
    const std::int64_t row = dy_row() + shape.kernel * x_row();  // of one tile of each
    strip_ = static_cast<int>(std::clamp<std::int64_t>(kStripElems / row, 1, out_.height));
    for (int y = 0; y < out_.height; ++y) {
        dy_rows_.push_back(y * dy_row());
        x_rows_.push_back(y * shape.stride * x_row());
    }
}

std::int64_t Bf16WeightGradient::shared_floats() const {
    return floats_of(dy_elems()) + floats_of(x_elems()) + sum_floats();
}

void Bf16WeightGradient::run(const Context& context, int blocks, const OpIo& io) const {
    auto* const dy = reinterpret_cast<Bfloat16*>(context.workspace.shared());
    auto* const x = dy + 2 * floats_of(dy_elems());
    auto* const sums = reinterpret_cast<float*>(x + 2 * floats_of(x_elems()));
    if (blocks == 0) {
        std::fill_n(io.grads[0].f32(), shape_.weight_elems(), 0.0f);
        std::fill_n(io.grads[1].f32(), shape_.out_channels, 0.0f);
        return;
    }
    const auto* const all_dy = values<Bfloat16>(io.dy);
    const auto* const all_x = values<Bfloat16>(io.x);
    for (int block = 0; block < blocks; ++block) {
        copy_dy(context.pool, all_dy + block * out_.elems() * kLanes, dy);
        copy_x(context.pool, all_x + block * shape_.in.elems() * kLanes, x);
        const int across = (in_tiles_ + 1) / 2;
        context.pool.parallel_for((out_tiles_ + 1) / 2 * across, [&](std::int64_t task, int) {
            add(2 * static_cast<int>(task / across), 2 * static_cast<int>(task % across), dy, x,
                block == 0, sums);
        });
    }
    context.pool.parallel_for(shape_.out_channels, [&](std::int64_t o, int) {
        write(static_cast<int>(o), sums, io.grads[0].f32());
        add_up_bias(static_cast<int>(o), blocks, all_dy, io.grads[1].f32());
    });
}

void Bf16WeightGradient::copy_dy(ThreadPool& pool, const Bfloat16* from, Bfloat16* to) const {
    pool.parallel_for(out_tiles_ * out_.height, [&](std::int64_t task, int) {
        const std::int64_t tile = task / out_.height, row = task % out_.height;
        Bfloat16* const line = to + task * dy_row();
        for (int i = 0; i < kTileExtent; ++i) {
            const std::int64_t channel = tile * kTileExtent + i;
            const bool exists = channel < shape_.out_channels;
            const Bfloat16* pixel = from + (channel * out_.height + row) * out_.width * kLanes;
            for (int column = 0; column < out_steps_ * pixels_; ++column, pixel += kLanes) {
                Bfloat16* const out = line + column / pixels_ * step_elems() +
                                      (std::ptrdiff_t{i} * pixels_ + column % pixels_) * kLanes;
                if (exists && column < out_.width) {
                    std::copy_n(pixel, kLanes, out);
                } else {
                    std::fill_n(out, kLanes, Bfloat16{0});
                }
            }
        }
    });
}

void Bf16WeightGradient::copy_x(ThreadPool& pool, const Bfloat16* from, Bfloat16* to) const {
    const Shape& in = shape_.in;
    const std::ptrdiff_t plane = in.plane_elems() * kLanes;
    pool.parallel_for(in_tiles_ * in_rows_, [&](std::int64_t task, int) {
        const int tile = static_cast<int>(task / in_rows_);
        const std::int64_t row = task % in_rows_ - shape_.padding;
        Bfloat16* const line = to + task * x_row();
        if (row < 0 || row >= in.height) {
            std::fill_n(line, x_row(), Bfloat16{0});
            return;
        }
        const std::ptrdiff_t left = shape_.padding * kPixelElems;
        const std::ptrdiff_t right = left + in.width * kPixelElems;
        std::fill_n(line, left, Bfloat16{0});
        std::fill_n(line + right, x_row() - right, Bfloat16{0});
        const int channels = std::min(kTileExtent, in.channels - tile * kTileExtent);
        const Bfloat16* pixel = from + tile * kTileExtent * plane + row * in.width * kLanes;
        auto* out = reinterpret_cast<float*>(line + left);
        int column = 0;
        for (; column + 1 < in.width; column += 2, pixel += 2 * kLanes, out += kPixelElems) {
            transpose(reinterpret_cast<const float*>(pixel), plane / 2, channels, out, kTileExtent);
        }
        for (int i = 0; column < in.width && i < kTileExtent; ++i) {
            for (int pair = 0; pair < kLanes / 2; ++pair) {
                float& both = out[pair * kTileExtent + i];
                both = 0.0f;
                if (i < channels) {
                    std::memcpy(&both, pixel + i * plane + 2 * pair, sizeof both);
                }
            }
        }
    });
}

void Bf16WeightGradient::add(int out_tile, int in_tile, const Bfloat16* dy, const Bfloat16* x,
                             bool first, float* sums) const {
    const Bf16Tiles products(pairs());
    Bf16Operands op;
    op.rows = std::min(2, out_tiles_ - out_tile);
    op.cols = std::min(2, in_tiles_ - in_tile);
    for (int row = 0; row < out_.height; row += strip_) {
        const Bf16Loops loops{.outer = std::min(strip_, out_.height - row),
                              .inner = out_steps_,
                              .a_outer = dy_rows_.data() + row,
                              .b_outer = x_rows_.data() + row,
                              .a_inner = step_elems(),
                              .b_inner = shape_.stride * pixels_ * kPixelElems};
        op.first = first && row == 0;
        for (int tap = 0; tap < taps(); ++tap) {
            const std::ptrdiff_t shift =
                tap / shape_.kernel * x_row() + tap % shape_.kernel * kPixelElems;
            for (int m = 0; m < 2; ++m) {
                op.a[m] = dy + std::ptrdiff_t{out_tile + m} * out_.height * dy_row();
                op.b[m] = x + std::ptrdiff_t{in_tile + m} * in_rows_ * x_row() + shift;
                for (int n = 0; n < 2; ++n) {
                    op.sums[m][n] = sums + sum(out_tile + m, in_tile + n, tap);
                }
            }
            products.add(loops, op);
        }
    }
}

void Bf16WeightGradient::write(int o, const float* sums, float* dw) const {
    for (int c = 0; c < shape_.in.channels; ++c) {
        for (int tap = 0; tap < taps(); ++tap) {
            dw[(std::ptrdiff_t{o} * shape_.in.channels + c) * taps() + tap] =
                sums[sum(o / kTileExtent, c / kTileExtent, tap) + o % kTileExtent * kTileExtent +
                     c % kTileExtent];
        }
    }
}

void Bf16WeightGradient::add_up_bias(int o, int blocks, const Bfloat16* dy, float* db) const {
    const std::ptrdiff_t plane = out_.plane_elems() * kLanes;
    float of_lanes[kLanes];
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec sum[4] = {};
        for (int block = 0; block < blocks; ++block) {
            add_in_turns(dy + (std::int64_t{block} * shape_.out_channels + o) * plane + lane, plane,
                         sum);
        }
        store(of_lanes + lane, (sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    db[o] = lane_sum(of_lanes);
}

}  // namespace gyre::cpu
