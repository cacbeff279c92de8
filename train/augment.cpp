#include "train/augment.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/base/error.hpp"

namespace gyre::train {

void check(const AugmentSpec& spec, const Shape& shape) {
    const int side = std::min(shape.height, shape.width);
    for (const auto& [name, pixels] :
         {std::pair{"shift", spec.shift}, {"crop", spec.crop}, {"cutout", spec.cutout}}) {
        if (pixels >= side) {
            throw usage_error(
                fmt::format("`augment` {}{}: images have {}x{} pixels (height x width); give fewer "
                            "than {}",
                            name, pixels, shape.height, shape.width, side));
        }
    }
}

}  // namespace gyre::train
