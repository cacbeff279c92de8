// A net's last linear layer with the loss as one operation, compared with the reference and with
// the separate loss.
#include <cmath>
#include <vector>

#include "kernels/ops/converted_op.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/typed_values.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

// x has the type; w and b are float32, as in a net.
struct Head {
    LinearShape shape;
    int n = 0;
    DataType type = DataType::float32;
    float scale = 0.25f, loss_scale = 1.0f;
    Floats x, w, b;
    std::vector<std::int32_t> labels;

    Head(const LinearShape& s, int images, DataType of)
        : shape(s),
          n(images),
          type(of),
          x(rounded(of, random_floats(n * std::int64_t{s.in_features}, 1))),
          w(random_floats(s.weight_elems(), 2)),
          b(random_floats(s.out_features, 3)) {
        for (int i = 0; i < n; ++i) {
            labels.push_back(i * 7 % s.out_features);
        }
    }
};

struct Found {
    Floats sums, dy, dx, dw, db;
};

Found run_head(Bench& bench, LossHead& head, const Head& on) {
    const auto none = [&](int features) {
        return Floats(static_cast<std::size_t>(on.n * features), NAN);
    };
    const TypedValues x(bench, on.type, on.x), dx(bench, on.type, none(on.shape.in_features));
    const TypedValues dy(bench, on.type, none(on.shape.out_features));
    const Guarded w = bench.vector(on.w), b = bench.vector(on.b);
    const Guarded dw = bench.empty(on.shape.weight_elems());
    const Guarded db = bench.empty(on.shape.out_features);
    const Guarded sums = bench.empty(2), loss_scale = bench.vector({on.loss_scale});
    const auto labels = bench.array(on.labels);
    OpIo io{.x = x.tensor(),
            .dy = dy.tensor(),
            .dx = dx.tensor(),
            .params = {w.get(), b.get()},
            .grads = {dw.get(), db.get()}};
    const CrossEntropyArgs loss{.classes = on.shape.out_features,
                                .labels = labels.get(),
                                .scale = on.scale,
                                .sums = sums.get()};
    const float* const times = on.loss_scale == 1.0f ? nullptr : loss_scale.get();
    head.run({.n = on.n, .training = true}, io, loss, times);
    Found found{sums.download(), dy.read(), dx.read(), dw.download(), db.download()};
    io.dx = {};
    head.run({.n = on.n, .training = true}, io, loss, times);  // as for a net's first layer
    CHECK(sums.download() == found.sums);
    return found;
}

// Unit roundoff of a type; 0 for float32, whose values are not rounded again.
double unit_of(DataType type) {
    return type == DataType::bfloat16 ? 0x1p-8 : type == DataType::float16 ? 0x1p-11 : 0.0;
}
// The spacing of a type's numbers next to zero.
double least_of(DataType type) {
    return type == DataType::float16 ? 0x1p-24 : 0.0;
}

// Checks sums in float32 that are stored in a type.
void check_stored(DataType type, const Floats& found, const Sums& expected) {
    REQUIRE(found.size() == expected.value.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
        const double bound =
            expected.bound(i) * 1.01 + unit_of(type) * std::abs(expected.value[i]) + least_of(type);
        CHECK(std::abs(double{found[i]} - expected.value[i]) <= bound);
    }
}

void check_loss(const Head& on, const Found& found, const Sums& logits) {
    const auto classes = static_cast<std::size_t>(on.shape.out_features);
    const double unit = unit_of(on.type), scale = double{on.scale};
    double loss = 0.0, error = 0.0, correct = 0.0, unsure = 0.0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(on.n); ++i) {
        const auto first = i * classes;
        const auto label = static_cast<std::size_t>(on.labels[i]);
        std::size_t best = 0;
        double sum = 0.0, off = 0.0;
        for (std::size_t k = 0; k < classes; ++k) {
            const double logit = logits.value[first + k];
            best = logit > logits.value[first + best] ? k : best;
            sum += std::exp(logit);
            off = std::max(off, logits.bound(first + k) + 1.01 * unit * std::abs(logit));
        }
        // An error of `off` in the logits scales a softmax value by up to exp(2 off).
        const double factor = std::expm1(2 * off);
        for (std::size_t k = 0; k < classes; ++k) {
            const double share = std::exp(logits.value[first + k]) / sum;
            const double expected = scale * (share - (k == label ? 1.0 : 0.0));
            // A few roundings for exp and the sum.
            const double bound =
                scale * (1.05 * share * factor + 0x1p-24 * (on.shape.out_features + 16)) +
                1.01 * unit * std::abs(expected);
            CHECK(std::abs(double{found.dy[first + k]} / double{on.loss_scale} - expected) <=
                  bound * (1 + unit) + least_of(on.type));
            const bool close =
                std::abs(logits.value[first + k] - logits.value[first + best]) <= 2 * off;
            unsure += k != best && close ? 1.0 : 0.0;
        }
        loss += scale * (std::log(sum) - logits.value[first + label]);
        error += scale * (2.1 * off + 0x1p-24 * (on.shape.out_features + 64));
        correct += best == label ? 1.0 : 0.0;
    }
    CHECK(std::abs(double{found.sums[0]} - loss) <= error + 0x1p-23 * std::abs(loss));
    CHECK(std::abs(double{found.sums[1]} - correct) <= unsure);
}

constexpr DataType kTypes[] = {DataType::float32, DataType::bfloat16, DataType::float16};
#if defined(SIMT_CHECKER)  // which is slow
constexpr int kImages[] = {0, 1, 9};
#else
constexpr int kImages[] = {0, 1, 64, 67};
#endif

}  // namespace

TEST_CASE("a linear layer fused with the loss gives the gradients and sums of both", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const LinearShape& s : {LinearShape{1024, 10}, {36, 3}, {4, 64}, {1032, 33}}) {
            for (const DataType type : kTypes) {
                LinearSpec spec{.in = {s.in_features, 1, 1}, .shape = s};
                const auto head = bench.backend.make_loss_head(spec, 67, type);
                if (head == nullptr) {
                    return;  // this backend has no such operation
                }
                spec.dx_factor = 2.0f;
                const auto masked = bench.backend.make_loss_head(spec, 67, type);
                for (const int n : kImages) {
                    INFO("linear " << s.in_features << " -> " << s.out_features << ", "
                                   << name_of(type) << ", n = " << n);
                    Head on(s, n, type);
                    on.loss_scale = type == DataType::float16 ? 1024.0f : 1.0f;
                    const Found found = run_head(bench, *head, on);
                    const Conv2dShape conv = reference::as_conv(s);
                    const Floats w = rounded(type, on.w);
                    check_stored(type, found.dx,
                                 reference::conv_backward_data(conv, n, found.dy, w));
                    bench.check_close(found.dw,
                                      reference::conv_backward_weights(conv, n, on.x, found.dy));
                    bench.check_close(found.db, reference::bias_gradient(conv.out(), n, found.dy));
                    check_loss(on, found, reference::conv_forward(conv, n, on.x, w, on.b));

                    const Found other = run_head(bench, *masked, on);
                    for (std::size_t i = 0; i < found.dx.size(); ++i) {
                        const float expected = on.x[i] > 0.0f ? found.dx[i] * 2.0f : 0.0f;
                        CHECK(std::abs(double{other.dx[i]} - double{expected}) <= least_of(type));
                    }
                    CHECK(other.dw == found.dw);
                }
            }
        }
        LinearSpec large{.in = {1024, 1, 1}, .shape = {1024, 65}};
        CHECK(bench.backend.make_loss_head(large, 8, DataType::float32) == nullptr);
    });
}

// Operands have few bits, so that the order of sums does not matter, but logits must be rounded.
TEST_CASE("in 16 bits a linear layer fused with the loss rounds like both in sequence", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const LinearShape& s : {LinearShape{1024, 10}, {36, 3}}) {
            for (const DataType type : {DataType::bfloat16, DataType::float16}) {
                INFO("linear " << s.in_features << " -> " << s.out_features << ", "
                               << name_of(type));
                const LinearSpec spec{.in = {s.in_features, 1, 1}, .shape = s};
                const auto head = bench.backend.make_loss_head(spec, 9, type);
                if (head == nullptr) {
                    return;
                }
                Head on(s, 9, type);
                on.loss_scale = 512.0f;
                for (Floats* values : {&on.x, &on.w, &on.b}) {
                    for (float& value : *values) {
                        value = std::round(value * 8) * 0.0625f;
                    }
                }
                const Floats w_rounded = on.w;
                for (float& value : on.w) {
                    value += value == 0.0f ? 0.0f : 0x1p-16f;  // a value that no operand can have
                }
                REQUIRE(rounded(type, on.w) == w_rounded);
                const Found found = run_head(bench, *head, on);

                WideMemory memory(bench.backend);
                const auto op = make_op(memory, "layer", spec, {.train_images = 9}, type);
                memory.allocate();
                const TypedValues x(bench, type, on.x), y(bench, type, found.dy);
                const Guarded w = bench.vector(on.w), b = bench.vector(on.b);
                op->forward({.n = 9},
                            {.x = x.tensor(), .y = y.tensor(), .params = {w.get(), b.get()}});
                const Guarded logits = bench.vector(y.read());
                const Guarded gradient = bench.vector(found.dy), sums = bench.empty(2);
                const auto labels = bench.array(on.labels);
                bench.backend.cross_entropy({.classes = s.out_features,
                                             .logits = logits.get(),
                                             .labels = labels.get(),
                                             .scale = on.scale,
                                             .gradient = gradient.get(),
                                             .sums = sums.get()},
                                            9);
                Floats expected = gradient.download();
                for (float& value : expected) {
                    value *= on.loss_scale;
                }
                CHECK(found.dy == rounded(type, expected));
                CHECK(found.sums == sums.download());
                const Floats exact = [&] {
                    const Sums all =
                        reference::conv_forward(reference::as_conv(s), 9, on.x, w_rounded, on.b);
                    return Floats(all.value.begin(), all.value.end());
                }();
                CHECK((y.read() != exact) == (s.in_features == 1024 || type == DataType::bfloat16));
            }
        }
    });
}
