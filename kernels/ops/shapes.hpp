// Layer shapes, shared by all backends. Extents count elements of one image; the number of images
// is passed separately.
#pragma once

#include <cstdint>

namespace gyre {

// One image's activation, logically [channels][height][width]; a vector of n features is {n, 1, 1}.
struct Shape {
    int channels = 1;
    int height = 1;
    int width = 1;

    std::int64_t plane_elems() const { return std::int64_t{height} * width; }
    std::int64_t elems() const { return channels * plane_elems(); }
    bool operator==(const Shape&) const = default;
};

// Output extent of a sliding window, as in PyTorch (floor mode); < 1 when the window does not fit.
constexpr int window_extent(int in, int kernel, int stride, int padding) {
    const int span = in + 2 * padding - kernel;
    return span < 0 ? 0 : span / stride + 1;
}

// Weights [out_channels][in.channels / groups][kernel][kernel], bias [out_channels]. Both numbers
// of channels are multiples of groups; output channel o reads the input channels of group o /
// (out_channels / groups) only.
struct Conv2dShape {
    Shape in;
    int out_channels = 1;
    int kernel = 1;
    int stride = 1;
    int padding = 0;
    int groups = 1;

    int group_inputs() const { return in.channels / groups; }
    int group_outputs() const { return out_channels / groups; }
    Shape out() const {
        return {out_channels, window_extent(in.height, kernel, stride, padding),
                window_extent(in.width, kernel, stride, padding)};
    }
    std::int64_t weight_elems() const {
        return std::int64_t{out_channels} * group_inputs() * kernel * kernel;
    }
    // FLOPs (two per multiply-add) of one direction for one image, by the direct formula.
    std::int64_t flop_per_image() const { return 2 * out().plane_elems() * weight_elems(); }
};

// Padding, of which there is at most kernel / 2, is less than any value.
struct MaxPool2dShape {
    Shape in;
    int kernel = 2;
    int stride = 2;
    int padding = 0;
    // PyTorch's ceil_mode: one more window if they leave a rest and it begins within the input
    // or the padding before it.
    bool ceil = false;

    Shape out() const { return {in.channels, extent(in.height), extent(in.width)}; }
    int extent(int side) const {
        const int whole = window_extent(side, kernel, stride, padding);
        const bool rest = whole > 0 && (side + 2 * padding - kernel) % stride != 0;
        return whole + (ceil && rest && whole * stride < side + padding ? 1 : 0);
    }
    // True if some window reaches beyond the input.
    bool clips() const {
        return padding > 0 || reach(out().height) > in.height || reach(out().width) > in.width;
    }
    // True if some window reaches beyond the padding behind the input.
    bool overhangs() const {
        return reach(out().height) > in.height + 2 * padding ||
               reach(out().width) > in.width + 2 * padding;
    }
    // Where the last of so many windows ends, counted from the padding before the input.
    int reach(int windows) const { return (windows - 1) * stride + kernel; }
};

// Weights [out_features][in_features], bias [out_features].
struct LinearShape {
    int in_features = 1;
    int out_features = 1;

    std::int64_t weight_elems() const { return std::int64_t{in_features} * out_features; }
    std::int64_t flop_per_image() const { return 2 * weight_elems(); }
};

}  // namespace gyre
