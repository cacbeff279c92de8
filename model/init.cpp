#include "model/init.hpp"

#include <algorithm>
#include <cmath>

namespace gyre::model {
namespace {

// U(-bound, bound)
void fill_uniform(const RandomStream& stream, float bound, std::vector<float>& values) {
    for (std::size_t i = 0; i < values.size(); i += 4) {
        const Philox4 random = stream.group(0, static_cast<std::uint32_t>(i / 4));
        for (std::size_t j = 0; j < std::min<std::size_t>(4, values.size() - i); ++j) {
            values[i + j] = (2.0f * uniform01(random.word[j]) - 1.0f) * bound;
        }
    }
}

// N(0, deviation^2), by pairs (Box and Muller 1958).
void fill_normal(const RandomStream& stream, float deviation, std::vector<float>& values) {
    constexpr double kTwoPi = 6.283185307179586;
    for (std::size_t i = 0; i < values.size(); i += 4) {
        const Philox4 random = stream.group(0, static_cast<std::uint32_t>(i / 4));
        for (std::size_t j = 0; j < std::min<std::size_t>(4, values.size() - i); ++j) {
            const std::uint32_t* pair = random.word + j / 2 * 2;
            // 1 - u is in (0, 1].
            const double radius = std::sqrt(-2.0 * std::log(1.0 - double{uniform01(pair[0])}));
            const double angle = kTwoPi * double{uniform01(pair[1])};
            values[i + j] = deviation * static_cast<float>(radius * (j % 2 == 0 ? std::cos(angle)
                                                                                : std::sin(angle)));
        }
    }
}

// values [filters][channels][height][width]: filter c has a one in the middle of its channel c.
void fill_dirac(const std::vector<std::int64_t>& shape, std::vector<float>& values) {
    const std::int64_t area = shape[2] * shape[3], filter = shape[1] * area;
    const std::int64_t middle = shape[2] / 2 * shape[3] + shape[3] / 2;
    for (std::int64_t c = 0; c < std::min(shape[0], shape[1]); ++c) {
        const auto begin = values.begin() + c * filter;
        std::fill(begin, begin + filter, 0.0f);
        *(begin + c * area + middle) = 1.0f;
    }
}

}  // namespace

Init init_of(const Parameter& parameter, WeightInit weights) {
    if (weights == WeightInit::automatic || parameter.init != Init::fan_in_uniform) {
        return parameter.init;
    }
    if (weights == WeightInit::dirac) {
        return parameter.shape.size() == 4 ? Init::dirac : parameter.init;
    }
    const bool bias = parameter.shape.size() == 1;
    return bias                                    ? Init::zeros
           : weights == WeightInit::kaiming_normal ? Init::kaiming_normal
                                                   : Init::kaiming_uniform;
}

std::vector<float> initial_values(const Parameter& parameter, const RandomStream& stream) {
    std::vector<float> values(static_cast<std::size_t>(parameter.elems));
    switch (parameter.init) {
        case Init::fan_in_uniform:
        case Init::dirac:
            fill_uniform(stream, 1.0f / std::sqrt(static_cast<float>(parameter.fan_in)), values);
            if (parameter.init == Init::dirac) {
                fill_dirac(parameter.shape, values);
            }
            break;
        case Init::kaiming_normal:
            fill_normal(stream, std::sqrt(2.0f / static_cast<float>(parameter.fan_in)), values);
            break;
        case Init::kaiming_uniform:
            fill_uniform(stream, std::sqrt(6.0f / static_cast<float>(parameter.fan_in)), values);
            break;
        case Init::zeros:
            break;
        case Init::ones:
            std::fill(values.begin(), values.end(), 1.0f);
            break;
    }
    return values;
}

}  // namespace gyre::model
