// The three directions of a convolution or linear layer, compared with the reference.
#pragma once

#include <string>

#include "tests/kernels/run_op.hpp"
#include "tests/support/backends.hpp"

namespace gyre::test {

inline std::string text_of(const Conv2dShape& s, int n) {
    return "conv " + std::to_string(s.in.channels) + "x" + std::to_string(s.in.height) + "x" +
           std::to_string(s.in.width) + " -> " + std::to_string(s.out_channels) + " k" +
           std::to_string(s.kernel) + " s" + std::to_string(s.stride) + " p" +
           std::to_string(s.padding) + " g" + std::to_string(s.groups) +
           ", n = " + std::to_string(n);
}

inline bool may_be_winograd(const Conv2dShape& s) {
    return s.groups == 1 && s.stride == 1 && s.padding < s.kernel &&
           ((s.kernel == 3 && s.in.channels >= 16) || (s.kernel == 5 && s.in.channels >= 8));
}

struct Layer {
    int n;
    Floats x, w, b, dy;
};

// Checks one layer's three directions. `s`: the layer as a convolution, for the reference.
inline void check_directions(Bench& bench, const OpSpec& spec, const Conv2dShape& s,
                             const Layer& on) {
    const auto& [n, x, w, b, dy] = on;
    RunOp op(bench.backend, spec, n);
    const Guarded dev_x = bench.activation(s.in, n, x);
    const Guarded dev_dy = bench.activation(s.out(), n, dy);
    const Guarded dev_w = bench.vector(w), dev_b = bench.vector(b);
    const bool filtered = may_be_winograd(s);

    const Guarded y = bench.empty_activation(s.out(), n);
    op.forward({.x = dev_x.get(), .y = y.get(), .params = {dev_w.get(), dev_b.get()}});
    bench.check_close(bench.read(s.out(), n, y), reference::conv_forward(s, n, x, w, b), filtered);
    const Guarded dx = bench.empty_activation(s.in, n);
    const Guarded dw = bench.empty(s.weight_elems()), db = bench.empty(s.out_channels);
    op.backward({.x = dev_x.get(),
                 .dy = dev_dy.get(),
                 .dx = dx.get(),
                 .params = {dev_w.get(), dev_b.get()},
                 .grads = {dw.get(), db.get()}});
    bench.check_close(bench.read(s.in, n, dx), reference::conv_backward_data(s, n, dy, w),
                      filtered);
    bench.check_close(dw.download(), reference::conv_backward_weights(s, n, x, dy), filtered);
    bench.check_close(db.download(), reference::bias_gradient(s.out(), n, dy));
}

// The same with random operands.
inline void check_directions(Bench& bench, const OpSpec& spec, const Conv2dShape& s, int n) {
    check_directions(bench, spec, s,
                     {n, random_floats(n * s.in.elems(), 1), random_floats(s.weight_elems(), 2),
                      random_floats(s.out_channels, 3), random_floats(n * s.out().elems(), 4)});
}

}  // namespace gyre::test
