// The CPU's kernels compute the same bits with AVX2, AVX-512 and Neon, on any number of threads:
// the results of each case have the hash that stands here. SSE4 lacks fused multiply-adds, and so
// has other bits.
#include "kernels/choose_cpu_kernels.hpp"
#include "tests/kernels/chains.hpp"
#include "tests/support/bits_hash.hpp"

namespace gyre::test {
namespace {

struct Case {
    const char* name;
    std::function<void(Bench&, BitsHash&)> run;
    std::uint64_t hash;
};

// Several blocks of images, of which the last is not full.
constexpr int kImages = 37;

std::function<void(Bench&, BitsHash&)> chain(const std::vector<OpSpec>& specs, std::int64_t weights,
                                             int biases) {
    return [=](Bench& bench, BitsHash& hash) {
        const Results r = run_chain(
            bench, specs,
            random_operands(kImages, in_of(specs.front()), out_of(specs.back()), weights, biases));
        for (const Floats* values : {&r.y, &r.evaluated, &r.dw, &r.db, &r.dx}) {
            hash.add(*values);
        }
    };
}
std::function<void(Bench&, BitsHash&)> convolution(const Conv2dSpec& spec) {
    return chain({spec}, spec.shape.weight_elems(), spec.shape.out_channels);
}

constexpr Shape kConvolved{3, 8, 8};
std::function<void(Bench&, BitsHash&)> after_a_convolution(const OpSpec& spec) {
    return chain({Conv2dSpec{.shape = {{2, 8, 8}, 3, 1, 1, 0}}, spec}, 6, 3);
}

void normalise_batch(Bench& bench, BitsHash& hash) {
    const BatchNorm2dSpec spec{.in = {5, 6, 7}};
    const Operands on = random_operands(kImages, spec.in, spec.in, spec.in.channels, 5);
    const Guarded x = bench.activation(spec.in, kImages, on.x);
    const Guarded dy = bench.activation(spec.in, kImages, on.dy);
    const Guarded y = bench.empty_activation(spec.in, kImages);
    const Guarded dx = bench.empty_activation(spec.in, kImages);
    const Guarded w = bench.vector(on.w), b = bench.vector(on.b);
    const Guarded mean = bench.vector(Floats(5, 0.0f)), variance = bench.vector(Floats(5, 1.0f));
    const Guarded dw = bench.empty(5), db = bench.empty(5);
    RunOp op(bench.backend, spec, kImages);
    const OpIo io{.x = x.get(),
                  .y = y.get(),
                  .dy = dy.get(),
                  .dx = dx.get(),
                  .params = {w.get(), b.get()},
                  .grads = {dw.get(), db.get()},
                  .state = {mean.get(), variance.get()}};
    op.forward(io);
    op.backward(io);
    for (const Floats& values :
         {bench.read(spec.in, kImages, y), bench.read(spec.in, kImages, dx), dw.download(),
          db.download(), mean.download(), variance.download()}) {
        hash.add(values);
    }
}

void cross_entropy(Bench& bench, BitsHash& hash) {
    constexpr int kClasses = 11;
    const Shape shape{kClasses, 1, 1};
    std::vector<std::int32_t> labels;
    for (int i = 0; i < kImages; ++i) {
        labels.push_back(i * 7 % kClasses);
    }
    Floats logits = random_floats(kImages * kClasses, 5);
    for (float& logit : logits) {
        logit *= 9.0f;
    }
    const Guarded on_device = bench.activation(shape, kImages, logits);
    const Guarded gradient = bench.empty_activation(shape, kImages), sums = bench.empty(2);
    const auto labels_there = bench.array(labels);
    bench.backend.cross_entropy({.classes = kClasses,
                                 .logits = on_device.get(),
                                 .labels = labels_there.get(),
                                 .scale = 1.0f / kImages,
                                 .gradient = gradient.get(),
                                 .sums = sums.get(),
                                 .label_smoothing = 0.1f},
                                kImages);
    hash.add(bench.read(shape, kImages, gradient));
    hash.add(sums.download());
}

const Case kCases[] = {
    {"direct convolution", convolution({.shape = {{3, 9, 10}, 7, 5, 1, 2}}), 0x935087e7c053659d},
    {"direct convolution with a stride", convolution({.shape = {{2, 11, 11}, 9, 3, 2, 1}}),
     0x72bab6b85c6bc38e},
    {"direct convolution, ReLU, pooling",
     convolution(
         {.shape = {{1, 14, 14}, 8, 5, 1, 0}, .pool_kernel = 2, .pool_stride = 2, .relu = true}),
     0xe6d989deff06ccb7},
    {"Winograd's 3 x 3", convolution({.shape = {{19, 8, 9}, 17, 3, 1, 1}}), 0x262be7e526144b4},
    {"Winograd's 3 x 3, one tile", convolution({.shape = {{18, 4, 4}, 17, 3, 1, 1}}),
     0x49428a020c0a4019},
    {"Winograd's 3 x 3, many channels", convolution({.shape = {{150, 7, 6}, 146, 3, 1, 1}}),
     0x6cf3500a1b2b1443},
    {"Winograd's 5 x 5, ReLU, pooling",
     convolution(
         {.shape = {{8, 12, 12}, 9, 5, 1, 0}, .pool_kernel = 2, .pool_stride = 2, .relu = true}),
     0x92e34819bba558c2},
    {"depthwise convolution",
     chain({GroupedConv2dSpec{.shape = {{6, 9, 8}, 6, 3, 1, 1, 6}}}, 6 * 9, 6), 0xeac70889e61fcaf2},
    {"convolution in groups, with a stride",
     chain({GroupedConv2dSpec{.shape = {{4, 9, 9}, 6, 3, 2, 1, 2}}}, 6 * 2 * 9, 6),
     0x358b50df61ef669f},
    {"linear layer", chain({LinearSpec{.in = {300, 1, 1}, .shape = {300, 23}}}, 300 * 23, 23),
     0x472fc89969fac9e5},
    {"batch normalisation", normalise_batch, 0x8a8aaa0e33ab56f8},
    {"group normalisation", chain({GroupNormSpec{.in = {6, 5, 7}, .groups = 3}}, 6, 6),
     0xb043c6a3f3121ebb},
    {"average pooling", after_a_convolution(AvgPool2dSpec{.in = kConvolved}), 0x45e94563d3de0513},
    {"GELU", after_a_convolution(ActivationSpec{.in = kConvolved}), 0x4b3f0e2ef848404f},
    {"SiLU", after_a_convolution(ActivationSpec{kConvolved, Activation::silu}), 0x16ea2d1341219e16},
    {"cross-entropy", cross_entropy, 0x1a3699afdb45605f},
};

}  // namespace

TEST_CASE("operations have the same bits with AVX2, AVX-512 and Neon") {
    for (const CpuKernels* set : available_cpu_kernels()) {
        for (const int threads : {1, 3}) {
            if (set->name == std::string("sse4")) {
                continue;
            }
            const auto backend = make_cpu_backend(*set, threads);
            Bench bench(*backend);
            for (const Case& each : kCases) {
                BitsHash hash;
                each.run(bench, hash);
                INFO(each.name << " with " << set->title << ", threads " << threads << std::hex
                               << ": 0x" << hash.value());
                CHECK(hash.value() == each.hash);
            }
        }
    }
}

}  // namespace gyre::test
