// The CPU's convolutions of bfloat16 values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "kernels/choose_cpu_kernels.hpp"
#include "tests/kernels/chains.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/typed_values.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

constexpr DataType kType = DataType::bfloat16;

// A tensor [n][shape] in the backend's layout.
class Values {
 public:
    Values(Backend& backend, const Shape& shape, int n, const Floats& values)
        : backend_(backend),
          shape_(shape),
          n_(n),
          elems_(backend.activation_elems(shape, n)),
          wide_(backend, elems_),
          narrow_(backend, elems_) {
        backend.import_activation(shape, n, values.data(), wide_.get());
        backend.narrow(kType, elems_, wide_.get(), narrow_.get());
    }
    Tensor tensor() const { return {narrow_.get(), kType}; }
    Floats read() const {
        backend_.widen(kType, elems_, narrow_.get(), wide_.get());
        Floats values(static_cast<std::size_t>(n_ * shape_.elems()));
        backend_.export_activation(shape_, n_, wide_.get(), values.data());
        return values;
    }

 private:
    Backend& backend_;
    Shape shape_;
    int n_;
    std::int64_t elems_;
    DeviceBuffer<float> wide_;
    DeviceBuffer<std::uint16_t> narrow_;
};

Results run(Backend& backend, const Conv2dSpec& spec, const Operands& on) {
    Bench bench(backend);
    const auto op = backend.make("layer", spec, {.train_images = on.n, .eval_images = on.n}, kType);
    REQUIRE(op != nullptr);
    const Floats lost_in(on.x.size(), NAN), lost_out(on.dy.size(), NAN);
    const Values x(backend, spec.shape.in, on.n, on.x), dx(backend, spec.shape.in, on.n, lost_in);
    const Values y(backend, spec.out(), on.n, lost_out), dy(backend, spec.out(), on.n, on.dy);
    const Guarded w = bench.vector(on.w), b = bench.vector(on.b);
    const Guarded dw = bench.empty(static_cast<std::int64_t>(on.w.size()));
    const Guarded db = bench.empty(static_cast<std::int64_t>(on.b.size()));
    const OpIo io{.x = x.tensor(),
                  .y = y.tensor(),
                  .dy = dy.tensor(),
                  .dx = dx.tensor(),
                  .params = {w.get(), b.get()},
                  .grads = {dw.get(), db.get()}};
    const Batch batch{.n = on.n, .training = true};
    op->forward(batch, io);
    Results results;
    results.y = y.read();
    op->backward_begin(batch, io);
    op->backward_params(batch, io);
    op->backward_input(batch, io);
    results.dw = dw.download();
    results.db = db.download();
    results.dx = dx.read();
    return results;
}

// Odd widths, channels that fill no tile, every stride with and without positions that no window
// reaches, windows that are larger than the padding allows.
const std::vector<Conv2dShape> kShapes = {
    {{64, 8, 8}, 64, 3, 1, 1},  {{40, 5, 7}, 24, 3, 1, 1}, {{16, 9, 6}, 72, 5, 1, 2},
    {{24, 7, 9}, 40, 3, 2, 1},  {{32, 6, 8}, 32, 1, 2, 0}, {{16, 10, 10}, 16, 2, 3, 0},
    {{48, 4, 4}, 112, 1, 1, 0}, {{17, 6, 5}, 19, 4, 2, 3}, {{16, 11, 3}, 16, 3, 3, 1},
    {{3, 7, 6}, 24, 3, 1, 1},   {{1, 9, 9}, 16, 5, 2, 2},
};

Operands operands_of(const Conv2dSpec& spec, int n) {
    return random_operands(n, spec.shape.in, spec.out(), spec.shape.weight_elems(),
                           spec.shape.out_channels);
}

}  // namespace

TEST_CASE("the CPU's convolutions of bfloat16 values are exact where float32 is, and round once") {
    for (const Conv2dShape& shape : kShapes) {
        for (const auto& [n, relu] : {std::pair{1, true}, {19, false}}) {
            INFO("shape " << &shape - kShapes.data() << ", n " << n);
            const Conv2dSpec spec{.shape = shape, .relu = relu};
            Operands on = operands_of(spec, n);
            for (Floats* values : {&on.x, &on.w, &on.b, &on.dy}) {
                for (float& value : *values) {
                    value = std::round(value * 2);
                }
            }
            const auto exact = [](const reference::Sums& sums) {
                return Floats(sums.value.begin(), sums.value.end());
            };
            Floats y = exact(reference::conv_forward(shape, n, on.x, on.w, on.b)), dy = on.dy;
            for (std::size_t i = 0; relu && i < y.size(); ++i) {
                dy[i] = y[i] > 0.0f ? dy[i] : 0.0f;
                y[i] = std::max(y[i], 0.0f);
            }
            const Floats dx = exact(reference::conv_backward_data(shape, n, dy, on.w));
            const Floats dw = exact(reference::conv_backward_weights(shape, n, on.x, dy));
            const Floats db = exact(reference::bias_gradient(shape.out(), n, dy));
            for (const CpuKernels* set : available_cpu_kernels()) {
                for (const int threads : {1, 3}) {
                    INFO(set->name << ", " << threads << " threads");
                    const auto backend = make_cpu_backend(*set, threads);
                    const Results found = run(*backend, spec, on);
                    check_equal(found.y, rounded(kType, y));
                    check_equal(found.dx, rounded(kType, dx));
                    check_equal(found.dw, dw);
                    check_equal(found.db, db);
                }
            }
        }
    }
}

namespace {

float flushed(float value) {
    return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

// y [n][shape.out()] in the order of the instruction TDPBF16PS, one value after another: for each
// position of the window, and there for each 32 channels, those of even and of odd number apart.
Floats forward_in_order(const Conv2dShape& shape, const Operands& on) {
    constexpr int kDepth = 32;
    const Shape in = shape.in, out = shape.out();
    const Floats x = rounded(kType, on.x), w = rounded(kType, on.w);
    const auto at = [](const Shape& of, std::int64_t image, int channel, int row, int column) {
        return static_cast<std::size_t>(
            ((image * of.channels + channel) * of.height + row) * of.width + column);
    };
    Floats y(static_cast<std::size_t>(on.n * out.elems()));
    for (std::size_t i = 0; i < y.size(); ++i) {
        const auto place = static_cast<int>(i);
        const int image = place / static_cast<int>(out.elems()), column = place % out.width;
        const int row = place / out.width % out.height;
        const int channel = place / (out.width * out.height) % out.channels;
        float sum = 0.0f;
        for (int tap = 0; tap < shape.kernel * shape.kernel; ++tap) {
            const int from_row = row * shape.stride - shape.padding + tap / shape.kernel;
            const int from_column = column * shape.stride - shape.padding + tap % shape.kernel;
            const bool inside =
                from_row >= 0 && from_row < in.height && from_column >= 0 && from_column < in.width;
            for (int step = 0; step < in.channels; step += kDepth) {
                float parts[2] = {0.0f, 0.0f};  // even, odd
                for (int c = step; c < std::min(step + kDepth, in.channels); ++c) {
                    const float of_x = inside ? x[at(in, image, c, from_row, from_column)] : 0.0f;
                    const float of_w = w[static_cast<std::size_t>(
                        (channel * in.channels + c) * shape.kernel * shape.kernel + tap)];
                    parts[c % 2] = flushed(std::fma(flushed(of_w), flushed(of_x), parts[c % 2]));
                }
                sum = flushed(sum + flushed(parts[0] + parts[1]));
            }
        }
        y[i] = sum + on.b[static_cast<std::size_t>(channel)];
    }
    return rounded(kType, y);
}

}  // namespace

TEST_CASE("the CPU's convolutions of bfloat16 values add up in the order of TDPBF16PS") {
    const Conv2dSpec spec{.shape = {{70, 6, 5}, 48, 3, 1, 1}};
    Operands on = operands_of(spec, 20);
    // From the smallest subnormal number to a large one, some negative, and zeros of both signs.
    for (Floats* values : {&on.x, &on.w, &on.dy}) {
        for (std::size_t i = 0; i < values->size(); ++i) {
            const int exponent = static_cast<int>(i * 37 % 160) - 140;
            (*values)[i] = i % 11 == 0  ? std::copysign(0.0f, (*values)[i])
                           : i % 3 == 0 ? std::ldexp((*values)[i], exponent)
                                        : (*values)[i];
        }
    }
    const Floats y = forward_in_order(spec.shape, on);
    std::optional<Results> first;
    for (const CpuKernels* set : available_cpu_kernels()) {
        if (set->name == std::string("sse4")) {
            continue;  // it rounds products that are subnormal
        }
        INFO(set->name);
        const auto backend = make_cpu_backend(*set, 2);
        const Results found = run(*backend, spec, on);
        CHECK(std::memcmp(found.y.data(), y.data(), y.size() * sizeof(float)) == 0);
        first = first ? first : found;
        for (const auto part : {&Results::y, &Results::dx, &Results::dw, &Results::db}) {
            const Floats &a = found.*part, &b = (*first).*part;
            REQUIRE(a.size() == b.size());
            CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
            CHECK(norm(a) > 0.0);
        }
    }
}
