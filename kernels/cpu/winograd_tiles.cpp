#include "kernels/cpu/winograd_tiles.hpp"

namespace gyre::cpu {
namespace {

constexpr int kTile = 4;

// Prefetches a window of a plane, as its lines are too short for the hardware to foresee the next
// channel's. Past the end of a tensor this has no effect.
template <bool kForWriting = false>
void prefetch_window(const float* first, std::ptrdiff_t line, int rows, int cols) {
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < cols; ++j) {
            __builtin_prefetch(first + i * line + j * kLanes, kForWriting ? 1 : 0);
        }
    }
}

// Reads the gradients of a tile of outputs if each is also an output of the operation.
void read_outputs(const Conv2dTail::Gradient& from, std::ptrdiff_t at, std::ptrdiff_t line,
                  int rows, int cols, Vec (&v)[kTile][kTile]) {
    for (int i = 0; i < kTile; ++i) {
        for (int j = 0; j < kTile; ++j) {
            v[i][j] = Vec{};
            if (i < rows && j < cols) {
                v[i][j] = from.at(at + i * line + j * kLanes);
            }
        }
    }
}

// Reads the gradients of a tile of outputs if the operation takes the maximum of each 2 x 2.
void read_windows(const Conv2dTail::Gradient& from, std::ptrdiff_t at, std::ptrdiff_t line,
                  int rows, int cols, Vec (&v)[kTile][kTile]) {
    for (int i = 0; i < kTile; i += 2) {
        for (int j = 0; j < kTile; j += 2) {
            const bool exists = i / 2 < rows && j / 2 < cols;
            const std::ptrdiff_t window = at + i / 2 * line + j / 2 * kLanes;
            const Vec d = exists ? from.at(window) : Vec{};
            const IntVec where = exists ? from.where(window) : IntVec{};
            for (int k = 0; k < 4; ++k) {
                v[i + k / 2][j + k % 2] = where == k ? d : Vec{};
            }
        }
    }
}

}  // namespace

template <int K>
WinogradTiles<K>::WinogradTiles(const Conv2dShape& shape, const Conv2dTail& tail)
    : in_(shape.in),
      out_(shape.out()),
      padding_(shape.padding),
      tail_(tail),
      place_(place_of(tail)) {}

template <int K>
typename WinogradTiles<K>::Place WinogradTiles<K>::place_of(const Conv2dTail& tail) {
    if (!tail.pools()) {
        return Place::tile;
    }
    const Windows windows = tail.windows(0);
    return windows.kernel == 2 && windows.stride == 2 ? Place::window : Place::apart;
}

template <int K>
typename WinogradTiles<K>::Window WinogradTiles<K>::window(int tile) const {
    const int top = tile / across() * kTile - padding_, left = tile % across() * kTile - padding_;
    return {top * line() + std::ptrdiff_t{left} * kLanes, std::max(0, -top),
            std::min(kExtent, in_.height - top), std::max(0, -left),
            std::min(kExtent, in_.width - left)};
}

template <int K>
template <bool kForWriting>
void WinogradTiles<K>::prefetch_next_channel(const float* plane, const Window& in) const {
    prefetch_window<kForWriting>(
        plane + in.at + in.i0 * line() + in.j0 * kLanes + in_.plane_elems() * kLanes, line(),
        in.i1 - in.i0, in.j1 - in.j0);
}

template <int K>
void WinogradTiles<K>::input(const float* plane, int tile, float* points,
                             std::ptrdiff_t step) const {
    const Window in = window(tile);
    prefetch_next_channel<false>(plane, in);
    for (int lane = 0; lane < kLanes; lane += kVec) {
        const auto read = [&](int i, int j) {
            return load(plane + (in.at + i * line() + j * kLanes + lane));
        };
        const auto put = [&](int i, int j, Vec v) {
            store(points + (i * kExtent + j) * step + lane, v);
        };
        if (in.whole()) {
            transform_2d<kExtent, kExtent>(read, Transforms<K>::input, put);
        } else {
            transform_2d<kExtent, kExtent>(
                [&](int i, int j) { return in.has(i, j) ? read(i, j) : Vec{}; },
                Transforms<K>::input, put);
        }
    }
}

template <int K>
void WinogradTiles<K>::input_by_channel(const float* planes, int channels, int tile, float* scratch,
                                        float* points, std::ptrdiff_t step,
                                        std::ptrdiff_t lane_step) const {
    const Window in = window(tile);
    for (int i = 0; i < kExtent; ++i) {
        for (int j = 0; j < kExtent; ++j) {
            float* to = scratch + (i * kExtent + j) * kLanes * kLanes;
            if (in.has(i, j)) {
                transpose(planes + (in.at + i * line() + j * kLanes), in_.plane_elems() * kLanes,
                          channels, to, kLanes);
            } else {
                std::fill_n(to, kLanes * kLanes, 0.0f);
            }
        }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int channel = 0; channel < kLanes; channel += kVec) {
            const float* from = scratch + lane * kLanes + channel;
            float* to = points + lane * lane_step + channel;
            transform_2d<kExtent, kExtent>(
                [&](int i, int j) { return load(from + (i * kExtent + j) * kLanes * kLanes); },
                Transforms<K>::input,
                [&](int i, int j, Vec v) { store(to + (i * kExtent + j) * step, v); });
        }
    }
}

template <int K>
void WinogradTiles<K>::gradient(const Conv2dTail::Gradient& from, int tile, float* points,
                                std::ptrdiff_t step, float* sum) const {
    const bool windows = place_ == Place::window;
    const Shape& shape = place_ == Place::apart ? out_ : tail_.out();
    const int extent = windows ? kTile / 2 : kTile;
    const int row = tile / across() * extent, col = tile % across() * extent;
    const std::ptrdiff_t pitch = std::ptrdiff_t{shape.width} * kLanes;
    const std::ptrdiff_t first = row * pitch + std::ptrdiff_t{col} * kLanes;
    prefetch_window(from.dy + first + shape.height * pitch, pitch,
                    std::min(extent, shape.height - row), std::min(extent, shape.width - col));
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec v[kTile][kTile];
        (windows ? read_windows : read_outputs)(from, first + lane, pitch, shape.height - row,
                                                shape.width - col, v);
        if (from.factors != nullptr) {
            const Vec factor = load(from.factors + lane);
            for (int k = 0; k < kTile * kTile; ++k) {
                v[k / kTile][k % kTile] *= factor;
            }
        }
        if (sum != nullptr) {
            Vec total[kTile] = {};
            for (int k = 0; k < kTile * kTile; ++k) {
                total[k % kTile] += v[k / kTile][k % kTile];
            }
            store(sum + lane, load(sum + lane) + ((total[0] + total[1]) + (total[2] + total[3])));
        }
        transform_2d<kTile, kExtent>([&](int i, int j) { return v[i][j]; },
                                     Transforms<K>::output_adjoint,
                                     [&](int i, int j, Vec point) {
                                         store(points + (i * kExtent + j) * step + lane, point);
                                     });
    }
}

template <int K>
void WinogradTiles<K>::output(const float* points, std::ptrdiff_t step, int tile, int channel,
                              float bias, const Conv2dTail::Output& to) const {
    const bool windows = place_ == Place::window, relu = tail_.relu() && !tail_apart();
    const Shape& shape = windows ? tail_.out() : out_;
    const int extent = windows ? kTile / 2 : kTile;
    const int row = tile / across() * extent, col = tile % across() * extent;
    const int rows = std::min(extent, shape.height - row);
    const int cols = std::min(extent, shape.width - col);
    const std::ptrdiff_t pitch = std::ptrdiff_t{shape.width} * kLanes;
    const std::ptrdiff_t first =
        channel * shape.height * pitch + row * pitch + std::ptrdiff_t{col} * kLanes;
    prefetch_window<true>(to.y + first + shape.height * pitch, pitch, rows, cols);
    const float* factors =
        to.factors != nullptr && !tail_apart() ? to.factors + channel * kLanes : nullptr;
    for (int lane = 0; lane < kLanes; lane += kVec) {
        Vec v[kTile][kTile];
        transform_2d<kExtent, kTile>(
            [&](int i, int j) { return load(points + (i * kExtent + j) * step + lane); },
            Transforms<K>::output, [&](int i, int j, Vec y) { v[i][j] = y + broadcast(bias); });
        if (factors != nullptr) {
            for (int k = 0; k < kTile * kTile; ++k) {
                v[k / kTile][k % kTile] *= load(factors + lane);
            }
        }
        for (int i = 0; i < rows; ++i) {
            for (int j = 0; j < cols; ++j) {
                const std::ptrdiff_t at = first + i * pitch + j * kLanes + lane;
                if (windows) {
                    Largest best{v[2 * i][2 * j]};
                    for (int k = 1; k < 4; ++k) {
                        best.take(v[2 * i + k / 2][2 * j + k % 2], k);
                    }
                    best.store_value(to.y + at, relu);
                    if (to.argmax != nullptr) {
                        best.store_where(to.argmax + at);
                    }
                } else {
                    store(to.y + at, relu ? clip_below_zero(v[i][j]) : v[i][j]);
                }
            }
        }
    }
}

template <int K>
void WinogradTiles<K>::input_gradient(const float* points, std::ptrdiff_t step, int tile,
                                      float* plane) const {
    const Window in = window(tile);
    prefetch_next_channel<true>(plane, in);
    for (int lane = 0; lane < kLanes; lane += kVec) {
        const auto add = [&](int i, int j, Vec v) {
            float* to = plane + (in.at + i * line() + j * kLanes + lane);
            store(to, load(to) + v);
        };
        const auto point = [&](int i, int j) {
            return load(points + (i * kExtent + j) * step + lane);
        };
        if (in.whole()) {
            transform_2d<kExtent, kExtent>(point, Transforms<K>::input_adjoint, add);
        } else {
            transform_2d<kExtent, kExtent>(point, Transforms<K>::input_adjoint,
                                           [&](int i, int j, Vec v) {
                                               if (in.has(i, j)) {
                                                   add(i, j, v);
                                               }
                                           });
        }
    }
}

template class WinogradTiles<3>;
template class WinogradTiles<5>;

}  // namespace gyre::cpu
