// Conversion between the tensors of one block of images and the points of their tiles
// (winograd_transforms.hpp): the positions of the tiles of 4 x 4 outputs, zero padding around the
// image, and the fused tail, which is applied as outputs are written and as their gradients are
// read.
#pragma once

#include "kernels/cpu/conv2d_tail.hpp"
#include "kernels/cpu/winograd_transforms.hpp"

namespace gyre::cpu {

template <int K>
class WinogradTiles {
 public:
    static constexpr int kTile = Transforms<K>::kTile, kExtent = Transforms<K>::kExtent;
    static constexpr int kPoints = kExtent * kExtent;
    // Floats from one point to the next if each has `floats`: one line more, so that the points of
    // a tile do not all map to the same cache set.
    static constexpr std::ptrdiff_t point_step(std::ptrdiff_t floats) { return floats + kLanes; }

    // Keeps a reference to the tail.
    WinogradTiles(const Conv2dShape& shape, const Conv2dTail& tail);

    int down() const { return (out_.height + kTile - 1) / kTile; }
    int across() const { return (out_.width + kTile - 1) / kTile; }
    // The first input line that a row of tiles reads; may be in the padding.
    int first_line(int row) const { return row * kTile - padding_; }
    int count() const { return down() * across(); }
    // True if the tail's windows do not fit the tiles, so that it needs a channel's whole output.
    bool tail_apart() const { return place_ == Place::apart; }

    // points [kPoints][lane], `step` apart, = B^T x B of a tile of a channel's plane.
    void input(const float* plane, int tile, float* points, std::ptrdiff_t step) const;
    // The same for 16 channels, of which the first `channels` exist, with the channel as the
    // fastest dimension: points [kPoints][lane][channel], lanes `lane_step` apart.
    // scratch: [kScratch].
    static constexpr std::int64_t kScratch = std::int64_t{kPoints} * kLanes * kLanes;
    void input_by_channel(const float* planes, int channels, int tile, float* scratch,
                          float* points, std::ptrdiff_t step, std::ptrdiff_t lane_step) const;
    // points = A dy A^T, dy: the gradient of the convolution's outputs. sum [lane] += its sum.
    void gradient(const Conv2dTail::Gradient& from, int tile, float* points, std::ptrdiff_t step,
                  float* sum) const;
    // Computes a tile of one channel of the convolution's outputs, A^T points A + bias, and applies
    // the tail; if the tail is applied separately, the outputs are written to to.y unchanged.
    void output(const float* points, std::ptrdiff_t step, int tile, int channel, float bias,
                const Conv2dTail::Output& to) const;
    // plane += B points B^T.
    void input_gradient(const float* points, std::ptrdiff_t step, int tile, float* plane) const;

 private:
    // The operations applied to a tile: ReLU and dropout; also 2 x 2 pooling; or none.
    enum class Place { tile, window, apart };
    static Place place_of(const Conv2dTail& tail);
    // The position of a tile's inputs in a plane: offset in floats, and the lines and columns
    // outside the padding.
    struct Window {
        std::ptrdiff_t at;
        int i0, i1, j0, j1;
        bool whole() const { return i0 == 0 && i1 == kExtent && j0 == 0 && j1 == kExtent; }
        bool has(int i, int j) const { return i >= i0 && i < i1 && j >= j0 && j < j1; }
    };
    Window window(int tile) const;
    // Prefetches the same window of the next channel's plane.
    template <bool kForWriting>
    void prefetch_next_channel(const float* plane, const Window& in) const;
    std::ptrdiff_t line() const { return std::ptrdiff_t{in_.width} * kLanes; }

    const Shape in_, out_;
    const int padding_;
    const Conv2dTail& tail_;
    const Place place_;
};

extern template class WinogradTiles<3>;
extern template class WinogradTiles<5>;

}  // namespace gyre::cpu
