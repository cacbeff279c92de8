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

}  // namespace

std::vector<float> initial_values(const Parameter& parameter, const RandomStream& stream) {
    std::vector<float> values(static_cast<std::size_t>(parameter.elems));
    switch (parameter.init) {
        case Init::fan_in_uniform:
            fill_uniform(stream, 1.0f / std::sqrt(static_cast<float>(parameter.fan_in)), values);
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
