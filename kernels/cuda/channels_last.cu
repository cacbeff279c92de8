// Channels-last copies for tensor-core products (shapes: channels_last.cuh), rounded as operands.
//
// Memory-bound. Activations: a block of 32 x 8 threads transposes a tile of 32 channels by 32
// positions in shared memory, so that reads and writes are of 128 bytes; grid (tiles). 8 bytes per
// element, 12 with a ReLU; for a pooled gradient, 2.25 to 3.25 bytes are read and 4 written per
// element. Weights: one thread per element of the result; 8 bytes each.
#include "kernels/cuda/channels_last.cuh"

#include "kernels/cuda/elementwise.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kTile = 32, kTileRows = 8;

// dy as an operand; zero where y is not positive. y is read only with kRelu.
template <typename Math, bool kRelu>
__device__ __forceinline__ typename Math::Elem counted(const typename Math::Elem* dy,
                                                       const typename Math::Elem* y,
                                                       std::int64_t i) {
    const bool counts = !kRelu || !(Math::load(y[i]) <= 0.0f);
    return counts ? Math::operand(Math::load(dy[i])) : typename Math::Elem{};
}

// The position of a block's tile, and of its threads within the tile.
struct TilePlace {
    int image, first_at, first_channel, lane, row;
};
__device__ __forceinline__ TilePlace tile_place(int tiles_at, int tiles_channels) {
    const int block = static_cast<int>(blockIdx.x);
    const int rest = block / tiles_channels;
    return {rest / tiles_at, rest % tiles_at * kTile, block % tiles_channels * kTile,
            static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
}

// kRelu: the result is zero where y is not positive. Without it y may be null.
template <typename Math, bool kRelu>
__global__ void to_channels_last_kernel(int channels, int plane, int tiles_at, int tiles_channels,
                                        const typename Math::Elem* x, const typename Math::Elem* y,
                                        typename Math::Elem* to) {
    using Elem = typename Math::Elem;
    SIMT_SHARED(Elem, tile, [kTile][kTile + 4 / sizeof(Elem)]);  // [channel][position]
    const TilePlace p = tile_place(tiles_at, tiles_channels);
    const std::int64_t image = std::int64_t{p.image} * channels * plane;
    SIMT_UNROLL
    for (int c = p.row; c < kTile; c += kTileRows) {
        const int channel = p.first_channel + c, at = p.first_at + p.lane;
        if (channel < channels && at < plane) {
            const std::int64_t i = image + std::int64_t{channel} * plane + at;
            tile[c][p.lane] = counted<Math, kRelu>(x, y, i);
        }
    }
    __syncthreads();
    SIMT_UNROLL
    for (int row = p.row; row < kTile; row += kTileRows) {
        const int channel = p.first_channel + p.lane, at = p.first_at + row;
        if (channel < channels && at < plane) {
            to[image + std::int64_t{at} * channels + channel] = tile[p.lane][row];
        }
    }
}

// The same from a pooled gradient. A cell is a window, or the rest of one at an odd edge, whose
// outputs are not pooled and get zero gradients.
struct PooledExtents {
    int channels, height, width;  // of the convolution's output
    int cells, cell_columns;      // per image, per row
    int tiles_cells, tiles_channels;
};
__device__ __forceinline__ std::uint32_t bits_of(float value) {
    return narrow::bits_of(value);
}
__device__ __forceinline__ std::uint32_t bits_of(std::uint16_t value) {
    return value;
}
// A thread stores one word of channels; the number of channels of 16 bits must be even.
template <typename Math, bool kRelu>
__global__ void unpool_kernel(PooledExtents e, const typename Math::Elem* dy,
                              const typename Math::Elem* y, const std::uint8_t* argmax,
                              typename Math::Elem* to) {
    using Elem = typename Math::Elem;
    constexpr int kEach = 4 / static_cast<int>(sizeof(Elem)), kWords = kTile / kEach;
    SIMT_SHARED(Elem, tile, [kTile][kTile + kEach]);  // [channel][cell]
    const TilePlace p = tile_place(e.tiles_cells, e.tiles_channels);
    const int rows = e.height / 2, columns = e.width / 2;
    const int my_cell = p.first_at + p.lane;
    const int my_row = my_cell / e.cell_columns, my_column = my_cell % e.cell_columns;
    const bool mine = my_row < rows && my_column < columns;
    SIMT_SHARED(int, row_of_cell, [kTile]);  // so that the division is done only once
    SIMT_SHARED(int, column_of_cell, [kTile]);
    if (p.row == 0) {
        row_of_cell[p.lane] = my_row;
        column_of_cell[p.lane] = my_column;
    }
    SIMT_UNROLL
    for (int c = p.row; c < kTile; c += kTileRows) {
        const int channel = p.first_channel + c;
        Elem value{};
        if (channel < e.channels && mine) {
            const std::int64_t i =
                ((std::int64_t{p.image} * e.channels + channel) * rows + my_row) * columns +
                my_column;
            value = counted<Math, kRelu>(dy, y, i);
        }
        tile[c][p.lane] = value;
    }
    __syncthreads();
    const int thread = p.row * kTile + p.lane, column = thread % kWords * kEach;
    const int channel = p.first_channel + column;
    for (int row = thread / kWords; row < kTile; row += kTileRows * kEach) {
        if (channel >= e.channels || p.first_at + row >= e.cells) {
            continue;
        }
        const int h = row_of_cell[row], w = column_of_cell[row];
        std::uint32_t words[4] = {};
        if (h < rows && w < columns) {
            const std::uint8_t* const where =
                argmax + ((std::int64_t{p.image} * rows + h) * columns + w) * e.channels + channel;
            SIMT_UNROLL
            for (int j = 0; j < kEach; ++j) {
                const std::uint32_t bits = bits_of(tile[column + j][row]) << j * 16;
                SIMT_UNROLL
                for (int part = 0; part < 4; ++part) {
                    words[part] |= part == where[j] ? bits : 0;
                }
            }
        }
        SIMT_UNROLL
        for (int part = 0; part < 4; ++part) {
            const int at_h = 2 * h + part / 2, at_w = 2 * w + part % 2;
            if (at_h < e.height && at_w < e.width) {
                const std::int64_t at = (std::int64_t{p.image} * e.height + at_h) * e.width + at_w;
                store_vector(to + at * e.channels + channel, words[part]);
            }
        }
    }
}

// Elements of `to`, followed by those of `turned`.
template <typename Math>
__global__ void pack_weights_kernel(int elems, int all_elems, int out_channels, int channels,
                                    int taps, const float* w, typename Math::Elem* to,
                                    typename Math::Elem* turned) {
    const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (index < all_elems) {
        const bool turn = to == nullptr || index >= elems;
        const int i = index >= elems ? index - elems : index;
        const int inner = turn ? out_channels : channels;
        const int last = i % inner, rest = i / inner, tap = rest % taps, first = rest / taps;
        const int o = turn ? last : first, c = turn ? first : last;
        (turn ? turned : to)[i] = Math::operand(
            w[(std::int64_t{o} * channels + c) * taps + (turn ? taps - 1 - tap : tap)]);
    }
}

int tiles(int elems) {
    return (elems + kTile - 1) / kTile;
}

}  // namespace

template <typename Math>
void to_channels_last(const Context& context, int n, const Shape& shape,
                      const typename Math::Elem* x, typename Math::Elem* to) {
    gradient_to_channels_last<Math>(context, n, shape, nullptr, nullptr, x, to);
}

template <typename Math>
void gradient_to_channels_last(const Context& context, int n, const Shape& out,
                               const typename Math::Elem* y, const std::uint8_t* argmax,
                               const typename Math::Elem* dy, typename Math::Elem* to) {
    const int tiles_channels = tiles(out.channels);
    const dim3 block(kTile, kTileRows);
    if (argmax == nullptr) {
        const auto plane = static_cast<int>(out.plane_elems());
        launch(
            "to_channels_last",
            y == nullptr ? to_channels_last_kernel<Math, false>
                         : to_channels_last_kernel<Math, true>,
            dim3(static_cast<unsigned>(n) * static_cast<unsigned>(tiles(plane) * tiles_channels)),
            block, context.stream, out.channels, plane, tiles(plane), tiles_channels, dy, y, to);
        return;
    }
    const int cell_columns = (out.width + 1) / 2, cells = (out.height + 1) / 2 * cell_columns;
    const PooledExtents e{out.channels, out.height,   out.width,     cells,
                          cell_columns, tiles(cells), tiles_channels};
    launch("unpool_channels_last",
           y == nullptr ? unpool_kernel<Math, false> : unpool_kernel<Math, true>,
           dim3(static_cast<unsigned>(n) * static_cast<unsigned>(tiles(cells) * tiles_channels)),
           block, context.stream, e, dy, y, argmax, to);
}

template <typename Math>
void pack_weights(const Context& context, const Conv2dShape& shape, const float* w,
                  typename Math::Elem* to, typename Math::Elem* turned) {
    const auto elems = static_cast<int>(shape.weight_elems());
    const int all_elems = elems * ((to != nullptr) + (turned != nullptr));
    launch("pack_weights", pack_weights_kernel<Math>,
           dim3((static_cast<unsigned>(all_elems) + kElementwiseBlock - 1) / kElementwiseBlock),
           dim3(kElementwiseBlock), context.stream, elems, all_elems, shape.out_channels,
           shape.in.channels, shape.kernel * shape.kernel, w, to, turned);
}

#define GYRE_CHANNELS_LAST(Math)                                                               \
    template void to_channels_last<Math>(const Context&, int, const Shape&, const Math::Elem*, \
                                         Math::Elem*);                                         \
    template void gradient_to_channels_last<Math>(const Context&, int, const Shape&,           \
                                                  const Math::Elem*, const std::uint8_t*,      \
                                                  const Math::Elem*, Math::Elem*);             \
    template void pack_weights<Math>(const Context&, const Conv2dShape&, const float*,         \
                                     Math::Elem*, Math::Elem*);
GYRE_CHANNELS_LAST(Tf32Math)
GYRE_CHANNELS_LAST(Bf16Math)
GYRE_CHANNELS_LAST(F16Math)
#undef GYRE_CHANNELS_LAST

}  // namespace gyre::SIMT_NAMESPACE
