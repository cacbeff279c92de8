// Gradients clipped as an optimizer on one rank does it.
#pragma once

#include "kernels/ops/backend.hpp"

namespace gyre::test {

// facts: on the device.
inline void clip_norm(Backend& backend, GradientFacts* facts, std::int64_t elems, float most,
                      float* x, const FiniteCheck& finite = {}) {
    backend.fill_zero(&facts->squares, sizeof facts->squares);
    backend.sum_of_squares(elems, x, finite, &facts->squares);
    backend.scale_to_norm({.most = most, .of_ranks = facts}, elems, x);
}

}  // namespace gyre::test
