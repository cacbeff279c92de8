#include "data/resize.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace gyre::data {
namespace {

constexpr int kFractionBits = 22;
constexpr int kMostExtent = 1 << 14;

// Output i is the sum over k < count[i] of weights[i * most + k] times input first[i] + k.
struct Filter {
    std::vector<int> first, count;
    std::vector<std::int32_t> weights;
    int most = 0;
};

// The middle `count` of the values that result if `from` values are resized to `to`. As
// torchvision, it rounds the middle to the nearest even number.
Filter make_filter(int from, std::int64_t to, int count) {
    const double scale = static_cast<double>(from) / static_cast<double>(to);
    const double reach = std::max(scale, 1.0);
    const std::int64_t rest = to - count, skipped = rest / 2 + (rest % 4 == 3 ? 1 : 0);
    Filter filter;
    filter.most = 2 * static_cast<int>(std::ceil(reach)) + 1;
    filter.weights.resize(static_cast<std::size_t>(count) * static_cast<std::size_t>(filter.most));
    for (int i = 0; i < count; ++i) {
        const double centre = (static_cast<double>(skipped + i) + 0.5) * scale;
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

bool has_size(const Resize& to, int height, int width) {
    return to.shorter == 0 && height == to.height && width == to.width;
}

}  // namespace

std::vector<std::uint8_t> resize_image(const std::uint8_t* pixels, int channels, int height,
                                       int width, const Resize& to) {
    if (has_size(to, height, width)) {
        return {pixels, pixels + std::ptrdiff_t{1} * height * width * channels};
    }
    const int shorter = std::min(height, width);
    const auto whole = [&](int extent, int without_crop) {
        return to.shorter > 0 ? std::int64_t{to.shorter} * extent / shorter
                              : std::int64_t{without_crop};
    };
    const auto bytes = [&](int h, int w) {
        return static_cast<std::size_t>(h) * static_cast<std::size_t>(w) *
               static_cast<std::size_t>(channels);
    };
    std::vector<std::uint8_t> narrow(bytes(height, to.width));
    apply(make_filter(width, whole(width, to.width), to.width), pixels, narrow.data(), height,
          width, channels);
    std::vector<std::uint8_t> result(bytes(to.height, to.width));
    apply(make_filter(height, whole(height, to.height), to.height), narrow.data(), result.data(), 1,
          height, to.width * channels);
    return result;
}

void resize_images(ImageSet& set, const Resize& to) {
    if (has_size(to, set.height, set.width)) {
        return;
    }
    const auto planes = static_cast<std::size_t>(set.count * set.channels);
    const auto from = static_cast<std::size_t>(set.height) * static_cast<std::size_t>(set.width);
    const auto area = static_cast<std::size_t>(to.height) * static_cast<std::size_t>(to.width);
    std::vector<std::uint8_t> resized(planes * area);
    const std::uint8_t* pixels = std::as_const(set.pixels).data();
    for (std::size_t plane = 0; plane < planes; ++plane) {
        const auto one = resize_image(pixels + plane * from, 1, set.height, set.width, to);
        std::copy(one.begin(), one.end(),
                  resized.begin() + static_cast<std::ptrdiff_t>(plane * area));
    }
    set.pixels = std::move(resized);
    set.height = to.height;
    set.width = to.width;
}

std::string read_resize(const std::string& text, Resize& to) {
    Resize read;
    int used = 0, cut = 0;
    const auto whole = [&] { return used == static_cast<int>(text.size()); };
    if (std::sscanf(text.c_str(), "%dx%d%n", &read.height, &read.width, &used) != 2 || !whole()) {
        used = 0;
        cut = std::sscanf(text.c_str(), "%d,centercrop%d%n", &read.shorter, &read.height, &used);
        read.width = read.height;
        if (cut == 2 && !whole()) {
            used = 0;
            std::sscanf(text.c_str(), "%*d,centercrop%*dx%d%n", &read.width, &used);
        }
    }
    if (!whole() || std::min(read.height, read.width) < 1 ||
        std::max({read.height, read.width, read.shorter}) > kMostExtent) {
        return fmt::format(
            "'{}' must be rows and columns from 1 to {}, such as 64x64, or the shorter side and "
            "the middle of the image, such as 256,centercrop224",
            text, kMostExtent);
    }
    if (cut > 0 && std::max(read.height, read.width) > read.shorter) {
        return fmt::format("'{}': the middle is larger than the shorter side; give at most {}",
                           text, read.shorter);
    }
    to = read;
    return {};
}

std::string resize_text(const Resize& to) {
    const std::string size = fmt::format("{}x{}", to.height, to.width);
    return to.shorter == 0
               ? size
               : fmt::format("{},centercrop{}", to.shorter,
                             to.height == to.width ? fmt::format("{}", to.height) : size);
}

}  // namespace gyre::data
