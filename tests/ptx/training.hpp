// A short training on the emulated GPU.
#pragma once

#include "kernels/ops/shapes.hpp"
#include "model/net_spec.hpp"
#include "model/spec.hpp"

namespace gyre::test {

using model::Precision;

// Steps of as many images, in so many passes each, and an evaluation of two. Throws if a loss is
// not finite.
void train_emulated(const model::ModelSpec& model, const Shape& image, Precision precision,
                    int images, int steps, int accumulate = 1);

}  // namespace gyre::test
