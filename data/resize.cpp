#include "data/resize.hpp"

#include <algorithm>
#include <cmath>

namespace gyre::data {
namespace {

constexpr int kFractionBits = 22;

// Output i is the sum over k < count[i] of weights[i * most + k] times input first[i] + k.
struct Filter {
    std::vector<int> first, count;
    std::vector<std::int32_t> weights;
    int most = 0;
};

Filter make_filter(int from, int to) {
    const double scale = static_cast<double>(from) / to, reach = std::max(scale, 1.0);
    Filter filter;
    filter.most = 2 * static_cast<int>(std::ceil(reach)) + 1;
    filter.weights.resize(static_cast<std::size_t>(to) * static_cast<std::size_t>(filter.most));
    for (int i = 0; i < to; ++i) {
        const double centre = (i + 0.5) * scale;
        const int first = std::max(static_cast<int>(centre - reach + 0.5), 0);
        const int end = std::min(static_cast<int>(centre + reach + 0.5), from);
        std::vector<double> shares;
        double sum = 0.0;
        for (int at = first; at < end; ++at) {
            shares.push_back(std::max(1.0 - std::abs((at - centre + 0.5) / reach), 0.0));
            sum += shares.back();
        }
        for (std::size_t k = 0; k < shares.size(); ++k) {
            filter.weights[static_cast<std::size_t>(i * filter.most) + k] =
                static_cast<std::int32_t>(std::lround(shares[k] / sum * (1 << kFractionBits)));
        }
        filter.first.push_back(first);
        filter.count.push_back(end - first);
    }
    return filter;
}

// Filters `blocks` blocks of `stride` lines each from `from` to filter.first.size() values per
// line. The values of a line are `stride` apart, neighbouring lines are 1 apart.
void apply(const Filter& filter, const std::uint8_t* in, std::uint8_t* out, int blocks, int from,
           int stride) {
    const auto to = filter.first.size();
    const auto lines = static_cast<std::size_t>(stride);
    for (int block = 0; block < blocks; ++block) {
        for (std::size_t i = 0; i < to; ++i) {
            const std::int32_t* weights =
                filter.weights.data() + i * static_cast<std::size_t>(filter.most);
            const std::uint8_t* at = in + static_cast<std::size_t>(filter.first[i]) * lines;
            for (std::size_t line = 0; line < lines; ++line) {
                std::int32_t sum = 1 << (kFractionBits - 1);
                for (int k = 0; k < filter.count[i]; ++k) {
                    sum += weights[k] * at[static_cast<std::size_t>(k) * lines + line];
                }
                out[i * lines + line] =
                    static_cast<std::uint8_t>(std::clamp(sum >> kFractionBits, 0, 255));
            }
        }
        in += static_cast<std::size_t>(from) * lines;
        out += to * lines;
    }
}

}  // namespace

std::vector<std::uint8_t> resize_image(const std::uint8_t* pixels, int channels, int height,
                                       int width, ImageSize size) {
    const auto bytes = [&](int h, int w) {
        return static_cast<std::size_t>(h) * static_cast<std::size_t>(w) *
               static_cast<std::size_t>(channels);
    };
    std::vector<std::uint8_t> narrow(bytes(height, size.width));
    apply(make_filter(width, size.width), pixels, narrow.data(), height, width, channels);
    std::vector<std::uint8_t> result(bytes(size.height, size.width));
    apply(make_filter(height, size.height), narrow.data(), result.data(), 1, height,
          size.width * channels);
    return result;
}

void resize_images(ImageSet& set, ImageSize size) {
    if (set.height == size.height && set.width == size.width) {
        return;
    }
    const auto planes = static_cast<std::size_t>(set.count * set.channels);
    const auto from = static_cast<std::size_t>(set.height) * static_cast<std::size_t>(set.width);
    const auto to = static_cast<std::size_t>(size.height) * static_cast<std::size_t>(size.width);
    std::vector<std::uint8_t> resized(planes * to);
    const std::uint8_t* pixels = std::as_const(set.pixels).data();
    for (std::size_t plane = 0; plane < planes; ++plane) {
        const auto one = resize_image(pixels + plane * from, 1, set.height, set.width, size);
        std::copy(one.begin(), one.end(),
                  resized.begin() + static_cast<std::ptrdiff_t>(plane * to));
    }
    set.pixels = std::move(resized);
    set.height = size.height;
    set.width = size.width;
}

}  // namespace gyre::data
