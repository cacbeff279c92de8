// 16-bit operations on tensor cores. Their operands are numbers of a few bits, whose sums are exact
// in any order, so results are those of float32, rounded once.
#include <cmath>
#include <utility>
#include <vector>

#include "tests/kernels/chains.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/typed_values.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

#if defined(SIMT_CHECKER) || defined(GYRE_SANITIZED)  // which are slow
constexpr auto kSchedules = {std::uint64_t{1}};
constexpr int kImages[] = {5}, kLinearImages[] = {70};
#else
constexpr auto kSchedules = {std::uint64_t{0}, std::uint64_t{1}};
constexpr int kImages[] = {1, 5}, kLinearImages[] = {1, 70, 130};
#endif

// A tensor [n][shape] in 16 bits, optionally channels last.
class Narrow {
 public:
    Narrow(Bench& bench, DataType type, const Shape& shape, bool last, const Floats& values)
        : shape_(shape), last_(last), device_(bench, type, placed(values)) {}
    Tensor tensor() const { return device_.tensor(); }
    Floats read() const {
        const Floats all = device_.read();
        Floats values(all.size());
        for (std::size_t i = 0; i < all.size(); ++i) {
            values[i] = all[place(i)];
        }
        return values;
    }

 private:
    Floats placed(const Floats& values) const {
        Floats all(values.size());
        for (std::size_t i = 0; i < all.size(); ++i) {
            all[place(i)] = values[i];
        }
        return all;
    }
    std::size_t place(std::size_t i) const {
        if (!last_) {
            return i;
        }
        const auto plane = static_cast<std::size_t>(shape_.plane_elems());
        const auto channels = static_cast<std::size_t>(shape_.channels);
        const std::size_t image = i / plane / channels, channel = i / plane % channels;
        return (image * plane + i % plane) * channels + channel;
    }
    Shape shape_;
    bool last_;
    TypedValues device_;
};

Results run_narrow(Bench& bench, const OpSpec& spec, DataType type, bool in_last, bool out_last,
                   const Operands& on) {
    const Shape in = in_of(spec), out = out_of(spec);
    const auto op =
        bench.backend.make("layer", spec, {.train_images = on.n, .eval_images = on.n}, type);
    REQUIRE(op != nullptr);
    const Floats none_in(on.x.size(), NAN), none_out(on.dy.size(), NAN);
    const Narrow x(bench, type, in, in_last, on.x), dx(bench, type, in, in_last, none_in);
    const Narrow y(bench, type, out, out_last, none_out), dy(bench, type, out, out_last, on.dy);
    const Guarded w = bench.vector(on.w), b = bench.vector(on.b);
    const Guarded dw = bench.empty(static_cast<std::int64_t>(on.w.size()));
    const Guarded db = bench.empty(static_cast<std::int64_t>(on.b.size()));
    const DeviceBuffer<std::byte> saved(bench.backend,
                                        static_cast<std::int64_t>(op->needs().saved_bytes));
    const OpIo io{.x = x.tensor(),
                  .y = y.tensor(),
                  .dy = dy.tensor(),
                  .dx = dx.tensor(),
                  .saved = saved.get(),
                  .params = {w.get(), b.get()},
                  .grads = {dw.get(), db.get()}};
    Batch batch{.n = on.n};
    Results results;
    op->forward(batch, io);
    results.evaluated = y.read();
    batch.training = true;
    op->forward(batch, io);
    results.y = y.read();
    op->backward_begin(batch, io);
    op->backward_params(batch, io);
    op->backward_input(batch, io);
    results.dx = dx.read();
    results.dw = dw.download();
    results.db = db.download();
    return results;
}

// Sets values to zero where `of` is not positive.
void mask(Floats& values, const Floats& of) {
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = of[i] > 0.0f ? values[i] : 0.0f;
    }
}

void check_narrow(const OpSpec& spec, const std::vector<OpSpec>& parts, bool in_last, bool out_last,
                  Operands on) {
    for (Floats* values : {&on.x, &on.w, &on.b, &on.dy}) {
        for (float& value : *values) {
            value = std::round(value * 2);
        }
    }
    if (in_last) {  // then it is a ReLU's output
        mask(on.x, on.x);
    }
    const auto exact = make_emulated_backend({});
    Bench exact_bench(*exact);
    if (out_last) {
        mask(on.dy, run_chain(exact_bench, parts, on).y);
    }
    const Results wide = run_chain(exact_bench, parts, on);
    for (const DataType type : {DataType::bfloat16, DataType::float16}) {
        INFO(name_of(type));
        Results expected = wide;
        for (Floats* values : {&expected.y, &expected.evaluated, &expected.dx}) {
            *values = rounded(type, *values);
        }
        if (in_last) {
            mask(expected.dx, on.x);
        }
        const auto check = [&](Bench& bench) {
            const Results found = run_narrow(bench, spec, type, in_last, out_last, on);
            check_equal(found.evaluated, expected.evaluated);
            check_equal(found.y, expected.y);
            check_equal(found.dw, expected.dw);
            check_equal(found.db, expected.db);
            check_equal(found.dx, expected.dx);
        };
        on_tensor_cores(check, kSchedules);
    }
}

}  // namespace

TEST_CASE("convolutions in 16 bits on tensor cores give float32's results, rounded", "[gpu]") {
    for (const Conv2dShape& shape : {Conv2dShape{{16, 6, 8}, 24, 3, 1, 1},
                                     {{64, 7, 5}, 40, 3, 1, 1},
                                     {{24, 6, 9}, 136, 3, 1, 0},
                                     {{72, 3, 4}, 16, 5, 1, 2}}) {
        for (const auto& [pool, relu, in_last, out_last] : {std::tuple{0, false, false, false},
                                                            {0, true, false, false},
                                                            {2, true, false, false},
                                                            {2, true, true, false},
                                                            {0, true, true, true},
                                                            {0, true, false, true}}) {
            for (const int n : kImages) {
                Conv2dSpec spec{
                    .shape = shape, .pool_kernel = pool, .pool_stride = pool, .relu = relu};
                const std::vector<OpSpec> parts = parts_of(spec);
                spec.in_channels_last = in_last;
                spec.out_channels_last = out_last;
                INFO("channels " << shape.in.channels << ", n " << n << ", pool " << pool
                                 << ", relu " << relu << ", last " << in_last << out_last);
                check_narrow(spec, parts, in_last, out_last,
                             random_operands(n, shape.in, spec.out(), shape.weight_elems(),
                                             shape.out_channels));
            }
        }
    }
}

TEST_CASE("a first convolution in 16 bits gives float32's results, rounded", "[gpu]") {
    for (const Conv2dShape& shape : {Conv2dShape{{1, 9, 8}, 16, 3, 1, 1},
                                     {{1, 12, 11}, 64, 5, 1, 0},
                                     {{3, 5, 7}, 40, 3, 1, 1}}) {
        Conv2dSpec spec{.shape = shape, .relu = true};
        const std::vector<OpSpec> parts = parts_of(spec);
        spec.out_channels_last = true;
        for (const int n : {1, 7}) {
            INFO("channels " << shape.in.channels << ", n " << n);
            check_narrow(
                spec, parts, false, true,
                random_operands(n, shape.in, spec.out(), shape.weight_elems(), shape.out_channels));
        }
    }
}

TEST_CASE("linear layers in 16 bits on tensor cores give float32's results, rounded", "[gpu]") {
    for (const LinearShape& shape : {LinearShape{32, 40}, {1040, 72}, {72, 264}}) {
        for (const int n : kLinearImages) {
            for (const bool relu : {false, true}) {
                INFO("linear " << shape.in_features << " -> " << shape.out_features << ", n " << n
                               << ", relu " << relu);
                LinearSpec spec{.in = {shape.in_features, 1, 1}, .shape = shape};
                std::vector<OpSpec> parts{spec};
                if (relu) {
                    parts.push_back(ReluSpec{spec.out()});
                }
                spec.relu = relu;
                check_narrow(spec, parts, false, false,
                             random_operands(n, spec.in, spec.out(), shape.weight_elems(),
                                             shape.out_features));
            }
        }
    }
}
