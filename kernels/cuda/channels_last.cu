// Channels-last copies for products on tensor cores (channels_last.cuh has the shapes), all rounded
// to TF32.
//
// Memory-bound. Activations: a block of 32 x 8 threads turns a tile of 32 channels by 32 positions
// in shared memory, so that reads and writes are of 128 bytes; grid (tiles). 8 bytes an element, 12
// with a ReLU; of a pooled gradient 2.25 to 3.25 bytes are read and 4 written. Weights: one thread
// to an element of the result; 8 bytes each.
#include "kernels/cuda/channels_last.cuh"

#include "kernels/cuda/elementwise.cuh"

namespace gyre::SIMT_NAMESPACE {
namespace {

constexpr int kTile = 32, kTileRows = 8;

__device__ __forceinline__ float rounded(float value) {
    const std::uint32_t bits = to_tf32(value);
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Where a block's tile lies, and its threads in it.
struct TilePlace {
    int image, first_at, first_channel, lane, row;
};
__device__ __forceinline__ TilePlace tile_place(int tiles_at, int tiles_channels) {
    const int block = static_cast<int>(blockIdx.x);
    const int rest = block / tiles_channels;
    return {rest / tiles_at, rest % tiles_at * kTile, block % tiles_channels * kTile,
            static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
}

// kRelu: where y is not positive, zero. y may be null else.
template <bool kRelu>
__global__ void to_channels_last_kernel(int channels, int plane, int tiles_at, int tiles_channels,
                                        const float* x, const float* y, float* to) {
    SIMT_SHARED(float, tile, [kTile][kTile + 1]);  // [channel][position]
    const TilePlace p = tile_place(tiles_at, tiles_channels);
    const std::int64_t image = std::int64_t{p.image} * channels * plane;
    SIMT_UNROLL
    for (int c = p.row; c < kTile; c += kTileRows) {
        const int channel = p.first_channel + c, at = p.first_at + p.lane;
        if (channel < channels && at < plane) {
            const std::int64_t i = image + std::int64_t{channel} * plane + at;
            tile[c][p.lane] = kRelu && y[i] <= 0.0f ? 0.0f : rounded(x[i]);
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

// The same out of a pooled gradient. A cell is a window, or what is left of one at an odd edge,
// whose outputs nobody pooled: they get zeros.
struct PooledExtents {
    int channels, height, width;  // of the convolution's output
    int cells, cell_columns;      // of an image, of a row
    int tiles_cells, tiles_channels;
};
template <bool kRelu>
__global__ void unpool_kernel(PooledExtents e, const float* dy, const float* y,
                              const std::uint8_t* argmax, float* to) {
    SIMT_SHARED(float, tile, [kTile][kTile + 1]);  // [channel][cell]
    const TilePlace p = tile_place(e.tiles_cells, e.tiles_channels);
    const int rows = e.height / 2, columns = e.width / 2;
    const int my_cell = p.first_at + p.lane;
    const int my_row = my_cell / e.cell_columns, my_column = my_cell % e.cell_columns;
    const bool mine = my_row < rows && my_column < columns;
    SIMT_UNROLL
    for (int c = p.row; c < kTile; c += kTileRows) {
        const int channel = p.first_channel + c;
        float value = 0.0f;
        if (channel < e.channels && mine) {
            const std::int64_t i =
                ((std::int64_t{p.image} * e.channels + channel) * rows + my_row) * columns +
                my_column;
            value = kRelu && y[i] <= 0.0f ? 0.0f : rounded(dy[i]);
        }
        tile[c][p.lane] = value;
    }
    __syncthreads();
    for (int row = p.row; row < kTile; row += kTileRows) {
        const int channel = p.first_channel + p.lane, cell = p.first_at + row;
        const int h = cell / e.cell_columns, w = cell % e.cell_columns;
        if (channel >= e.channels || cell >= e.cells) {
            continue;
        }
        const int where =
            h < rows && w < columns
                ? argmax[((std::int64_t{p.image} * rows + h) * columns + w) * e.channels + channel]
                : 4;
        SIMT_UNROLL
        for (int part = 0; part < 4; ++part) {
            const int at_h = 2 * h + part / 2, at_w = 2 * w + part % 2;
            if (at_h < e.height && at_w < e.width) {
                to[((std::int64_t{p.image} * e.height + at_h) * e.width + at_w) * e.channels +
                   channel] = part == where ? tile[p.lane][row] : 0.0f;
            }
        }
    }
}

template <bool kTurned>
__global__ void pack_weights_kernel(int elems, int out_channels, int channels, int taps,
                                    const float* w, float* to) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < elems) {
        const int inner = kTurned ? out_channels : channels;
        const int last = i % inner, rest = i / inner, tap = rest % taps, first = rest / taps;
        const int o = kTurned ? last : first, c = kTurned ? first : last;
        to[i] =
            rounded(w[(std::int64_t{o} * channels + c) * taps + (kTurned ? taps - 1 - tap : tap)]);
    }
}

int tiles(int elems) {
    return (elems + kTile - 1) / kTile;
}

}  // namespace

void to_channels_last(const Context& context, int n, const Shape& shape, const float* x,
                      float* to) {
    gradient_to_channels_last(context, n, shape, nullptr, nullptr, x, to);
}

void gradient_to_channels_last(const Context& context, int n, const Shape& out, const float* y,
                               const std::uint8_t* argmax, const float* dy, float* to) {
    const int tiles_channels = tiles(out.channels);
    const dim3 block(kTile, kTileRows);
    if (argmax == nullptr) {
        const auto plane = static_cast<int>(out.plane_elems());
        launch(
            "to_channels_last",
            y == nullptr ? to_channels_last_kernel<false> : to_channels_last_kernel<true>,
            dim3(static_cast<unsigned>(n) * static_cast<unsigned>(tiles(plane) * tiles_channels)),
            block, context.stream, out.channels, plane, tiles(plane), tiles_channels, dy, y, to);
        return;
    }
    const int cell_columns = (out.width + 1) / 2, cells = (out.height + 1) / 2 * cell_columns;
    const PooledExtents e{out.channels, out.height,   out.width,     cells,
                          cell_columns, tiles(cells), tiles_channels};
    launch("unpool_channels_last", y == nullptr ? unpool_kernel<false> : unpool_kernel<true>,
           dim3(static_cast<unsigned>(n) * static_cast<unsigned>(tiles(cells) * tiles_channels)),
           block, context.stream, e, dy, y, argmax, to);
}

void pack_weights(const Context& context, const Conv2dShape& shape, bool turned, const float* w,
                  float* to) {
    const auto elems = static_cast<int>(shape.weight_elems());
    launch("pack_weights", turned ? pack_weights_kernel<true> : pack_weights_kernel<false>,
           dim3((static_cast<unsigned>(elems) + kElementwiseBlock - 1) / kElementwiseBlock),
           dim3(kElementwiseBlock), context.stream, elems, shape.out_channels, shape.in.channels,
           shape.kernel * shape.kernel, w, to);
}

}  // namespace gyre::SIMT_NAMESPACE
