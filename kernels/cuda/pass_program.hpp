// A net's training pass as data for the pass kernel and the reduce kernel (training_pass.cu,
// pass_reduce.cu), created once on the host (pass_plan.cpp) and passed by value. Places in shared
// memory are counted in floats from its beginning, places in device memory in elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/runtime.hpp"
#include "kernels/ops/backend.hpp"

namespace gyre::SIMT_NAMESPACE {

constexpr int kPassBlock = 256;  // threads
constexpr int kPassWarps = kPassBlock / 32;
constexpr int kMostPassLayers = 12, kMostPassConvs = 4, kMostPassLinears = 6;
constexpr int kMostPassPools = 2, kMostPassDropouts = 4;
constexpr int kTilePixels = 8, kTileChannels = 4;  // per thread, in a correlation
// Per block of the reduce kernel: elements of a convolution's tensor, or rows and columns of a
// linear layer's gradient.
constexpr int kReduceElems = 32, kReduceRows = 16, kReduceColumns = 32;

// Computes i / divisor as a product, for i and divisor below 2^16: with inverse = 2^32 / divisor,
// rounded up, the error is below i / 2^32. inverse = 0: the divisor is 1.
struct Divisor {
    std::uint32_t inverse = 0;
    int divisor = 1;
};

// The layout of one image's value: element (c, h, w) is at begin + c * plane + h * pitch + w.
struct Planes {
    int channels = 0, height = 0, width = 0;
    int begin = 0, plane = 0, pitch = 0;
    int elems = 0;
    Divisor by_plane, by_width;  // of a plane and a row without padding
};

// sums[s][o][h][w] = sum over kh, kw and the channels c of split s of
//   weights[c][kh * kernel + kw][o] * x[c][h + kh][w + kw]
// for `height` rows and `columns` tiles of 8 pixels: [splits][4 * groups][height][sums_pitch].
struct Correlation {
    int kernel = 0, channels = 0, groups = 0, height = 0, columns = 0;
    int splits = 0, split_channels = 0;
    int x = 0, x_plane = 0, x_pitch = 0;
    int weights = 0, weights_pitch = 0;
    int sums = 0, sums_pitch = 0, sums_plane = 0;
    int items = 0;  // tiles of all splits
    Divisor by_height, by_columns, by_groups;
};

// A correlation's weights, read from the parameter [outs][ins][taps], optionally with outs and ins
// exchanged and the taps rotated by 180 degrees.
struct CorrelationWeights {
    int ins = 0, outs = 0, taps = 0, in_stride = 0, out_stride = 0;
    bool turned = false;
    Divisor by_taps, by_ins;
};

// Max-pooling of a source of height x width; kernel 1: none. where[i], an int32: the source
// position of output i, row << 16 | column.
struct Windows {
    int height = 0, width = 0, kernel = 1, stride = 1;
    int where = 0;
    Divisor by_stride;
};

// For non-overlapping 2 x 2 windows: which of the four is the maximum, lower * 2 + right, as one
// byte each, in rows of `pitch`, a multiple of 4.
struct WindowWays {
    int begin = 0, pitch = 0, words = 0;  // pitch 0: none
};

// An image's random words: the factor is `keep` if a word > largest_dropped, else 0.
struct PassDropout {
    int factors = 0;  // [words]
    int words = 0;    // 0: no dropout
    std::uint32_t stream = 0, largest_dropped = 0;
    float keep = 1.0f;
    Divisor by_word;  // elements per word
};

// dy of a convolution, spread over the convolution's output: zero except at the windows' maxima,
// with a border of `padding` zeros.
struct SpreadPlanes {
    int begin = 0, plane = 0, pitch = 0, padding = 0;
    int elems = 0;  // of all planes
    Divisor by_plane, by_pitch;
};

// How a convolution's dw is summed. A thread takes an item: kWeightOuts output channels, a pair
// (input channel, kernel row) and a split of the rows of dy, spread.
constexpr int kWeightOuts = 5;
struct WeightSums {
    int outs = 0, taps = 0, pairs = 0;  // taps: channels * kernel^2, pairs: channels * kernel
    int splits = 1, split_rows = 0;
    int items = 0;
    int height = 0, columns = 0;  // of the output, columns in tiles of 8 pixels
    SpreadPlanes dy;
    Divisor by_splits, by_pairs;
    int sums = 0, sums_pitch = 0;  // [splits][outs * (taps + 1)]: dw, then db
};

// dx of a convolution with 2 x 2 windows, window by window, using the forward pass's weights. A
// warp takes a unit (row of windows, four windows of it, 32 of the (input channel, kernel row)
// pairs). A lane sums the two input rows that the windows' rows meet under its kernel row,
// [2][kSpreadPitch].
constexpr int kSpreadWindows = 4, kSpreadPitch = 12, kSpreadItem = 28;
struct WindowSpread {
    int pairs = 0;                // input channels * kernel; 0: dx is a correlation
    int chunks = 0, columns = 0;  // of pairs, of windows
    int sums = 0;                 // [rows of windows][columns][pairs][kSpreadItem]
};

struct PassConv {
    std::int64_t weight = 0, bias = 0;  // parameters
    int biases = 0;                     // [outs], in shared memory
    int partial = 0;  // offset of its gradient in the block's partial: dw, then db
    bool relu = false;
    Correlation forward, backward;
    CorrelationWeights forward_weights, backward_weights;
    int padding = 0;  // of the input
    SpreadPlanes dy;  // input of `backward`
    WindowSpread spread;
    WeightSums weights;
    Windows windows;
    WindowWays ways;
    PassDropout dropout;
};

constexpr int kMostKeptWeights = 1024;
struct PassLinear {
    std::int64_t weight = 0, bias = 0;         // parameters
    std::int64_t x_factor = 0, dy_factor = 0;  // [images][in], [images][out], in `factors`
    int in = 0, out = 0;
    bool relu = false;
    int biases = 0;                  // [out], in shared memory
    int kept = -1;                   // the weights in shared memory if they are few; -1: not kept
    int splits = 1, split_outs = 0;  // of dx
    Divisor by_quads;                // or of single elements, if `in` is not a multiple of 4
    int sums = 0;                    // [splits][in]
};

enum class PassKind : int { conv, linear, relu, maxpool, dropout };

struct PassProgram {
    struct Layer {
        PassKind kind = PassKind::relu;
        int index = 0;        // in the array of its kind
        int dy = 0, dx = -1;  // gradients [out elems], [in elems], without padding; -1: not needed
    };
    int layers = 0, convs = 0, linears = 0, classes = 0;
    int first = 0;          // first layer with a backward pass
    int value_floats = 0;   // shared memory initialised to zero: values with their padding
    int partial_elems = 0;  // per block
    bool quads = false;     // rows of the input are multiples of 4 pixels
    Planes values[kMostPassLayers + 1];  // the input, and each layer's output
    Layer layer[kMostPassLayers];
    PassConv conv[kMostPassConvs];
    PassLinear linear[kMostPassLinears];
    Windows maxpool[kMostPassPools];
    PassDropout dropout[kMostPassDropouts];
};

// Arguments that differ between passes.
struct PassArgs {
    int n = 0;
    float scale = 1.0f;
    GatherArgs images;  // if samples is null, those of `next` are used
    NextSamplesArgs next;
    std::uint64_t seed = 0;
    const std::uint32_t* epoch = nullptr;
    const float* params = nullptr;
    float* partials = nullptr;  // [blocks][partial_elems]
    float* factors = nullptr;
    double* sums = nullptr;  // [2][blocks]: losses and numbers of correct images
};
static_assert(sizeof(PassProgram) + sizeof(PassArgs) <= 4096, "the limit of a kernel's arguments");

// The reduce kernel's work on partials and factors: a block takes 32 elements of a convolution's
// tensor, or a tile of a linear layer's gradient; the last block computes the sums.
struct ReduceProgram {
    struct Tensor {
        std::int64_t to = 0;  // position in the flat buffers
        int partial = 0, elems = 0;
        int last_block = 0;  // the first block after it
    };
    struct Linear {
        std::int64_t weight = 0, bias = 0, x_factor = 0, dy_factor = 0;
        int in = 0, out = 0, column_tiles = 0;
        int last_block = 0;
    };
    int tensors = 0, linears = 0, blocks = 0, partial_elems = 0;
    Tensor tensor[2 * kMostPassConvs];
    Linear linear[kMostPassLinears];
};

struct PassPlan {
    PassProgram program;
    ReduceProgram reduce;
    std::size_t shared_bytes = 0;
    std::int64_t factor_elems = 0;  // of the largest batch
};

// The number of blocks, and of partial gradients, for a pass of n images. It depends only on n, so
// that sums are the same on every GPU.
constexpr int pass_blocks(int n) {
    return n < 256 ? n : 256;
}

// Returns whether the net has a program that fits in this much shared memory, and sets `plan`.
bool plan_pass(const TrainingPassSpec& spec, std::size_t most_shared_bytes, PassPlan& plan);

// The second kernel's arguments, and its launch (pass_reduce.cu).
struct ReduceArgs {
    int n = 0, groups = 0;
    float scale = 1.0f;
    const float* partials = nullptr;
    const float* factors = nullptr;
    const double* losses = nullptr;
    float* grads = nullptr;
    float* sums = nullptr;
    EpochPlace* place = nullptr;  // whose step is advanced; may be null
};
struct Context;
void reduce_pass(const Context& context, const ReduceProgram& program, const ReduceArgs& args,
                 float* params, const UpdateArgs* update);

}  // namespace gyre::SIMT_NAMESPACE
