// On the CPU a pass allocates nothing: every allocation of this program is counted.
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/make_backend.hpp"
#include "tests/kernels/run_op.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/clip_norm.hpp"
#include "train/session.hpp"

namespace {
std::atomic<std::int64_t> allocations{0};
}

// The C library's functions under other names; operator new goes through malloc. A sanitizer has
// its own instead, so there this program is not built.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) {
    ++allocations;
    return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
    ++allocations;
    return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
    ++allocations;
    return __libc_realloc(memory, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
    ++allocations;
    return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    ++allocations;
    *memory = __libc_memalign(alignment, bytes);
    return *memory == nullptr ? ENOMEM : 0;
}
}

using namespace gyre;
using namespace gyre::comm;
using namespace gyre::test;

namespace {

template <typename Work>
std::int64_t allocations_of(Work&& work) {
    const std::int64_t before = allocations;
    work();
    return allocations - before;
}

struct Case {
    std::string name;
    OpSpec spec;
    std::int64_t weights = 0, biases = 0;
};
Case conv(const std::string& name, const Conv2dSpec& spec) {
    return {name, spec, spec.shape.weight_elems(), spec.shape.out_channels};
}
Case linear(const std::string& name, const LinearSpec& spec) {
    return {name, spec, spec.shape.weight_elems(), spec.shape.out_features};
}

const std::vector<Case>& cases() {
    static const std::vector<Case> all = {
        conv("conv", {.shape = {{3, 9, 9}, 7, 5, 1, 0}}),
        conv("conv with strides and padding", {.shape = {{3, 9, 9}, 7, 3, 2, 1}}),
        conv("conv by Winograd", {.shape = {{16, 7, 7}, 17, 3, 1, 1}}),
        conv("conv, dropout2d, max-pooling, relu", {.shape = {{3, 9, 9}, 7, 3, 1, 1},
                                                    .dropout = 0.5f,
                                                    .pool_kernel = 2,
                                                    .pool_stride = 2,
                                                    .relu = true}),
        conv("conv by Winograd, dropout2d, max-pooling, relu", {.shape = {{16, 7, 7}, 17, 3, 1, 1},
                                                                .dropout = 0.5f,
                                                                .pool_kernel = 3,
                                                                .pool_stride = 2,
                                                                .relu = true}),
        linear("linear, relu", {.in = {300, 1, 1}, .shape = {300, 41}, .relu = true}),
        linear("linear", {.in = {300, 1, 1}, .shape = {300, 41}}),
        {"grouped conv", GroupedConv2dSpec{{{6, 9, 9}, 12, 3, 2, 1, 6}}, 12 * 9, 12},
        {"max-pooling", MaxPool2dSpec{{{5, 9, 8}, 2, 2}}},
        {"relu", ReluSpec{{5, 9, 8}}},
        {"silu", ActivationSpec{.in = {5, 9, 8}, .function = Activation::silu}},
        {"add", AddSpec{{5, 9, 8}}},
        {"mul", MulSpec{{5, 1, 1}, {5, 9, 8}}},
        {"concat", ConcatSpec{{5, 9, 8}, {2, 9, 8}}},
        {"channels", ChannelsSpec{{5, 9, 8}, 2, 2}},
        {"groupnorm", GroupNormSpec{{6, 9, 8}, 2}},
        {"dropout", DropoutSpec{.in = {5, 9, 8}}},
        {"dropout2d", DropoutSpec{.in = {5, 9, 8}, .by_channel = true}},
    };
    return all;
}

constexpr int kMost = 40;

// Memory that an operation reads and writes, with room for the largest of cases().
struct Buffers {
    explicit Buffers(Backend& backend) {
        for (int i = 0; i < 8; ++i) {
            all.emplace_back(backend, 1 << 16);
        }
        samples = {backend, kMost};
    }
    float* at(std::size_t i) const { return all[i].get(); }
    std::vector<DeviceBuffer<float>> all;
    DeviceBuffer<std::int32_t> samples;
};

}  // namespace

TEST_CASE("operations of the CPU allocate as they are made, and not in a pass") {
    for (const int threads : {1, 3}) {
        const auto backend = make_cpu_backend(threads);
        const Buffers buffers(*backend);
        for (const Case& c : cases()) {
            INFO(c.name << ", threads: " << threads);
            CHECK(allocations_of([&] { RunOp(*backend, c.spec, kMost); }) > 0);
            RunOp op(*backend, c.spec, kMost);
            op.batch.samples = buffers.samples.get();
            const bool in_place = op.needs().in_place;
            const OpIo io{.x = buffers.at(0),
                          .y = buffers.at(in_place ? 0 : 1),
                          .x2 = buffers.at(1),
                          .dy = buffers.at(2),
                          .dx = buffers.at(in_place ? 2 : 3),
                          .dx2 = op.needs().writes_dx2 ? buffers.at(4) : nullptr,
                          .params = {buffers.at(4), buffers.at(5)},
                          .grads = {c.weights > 0 ? buffers.at(6) : nullptr, buffers.at(7)}};
            const std::int64_t found = allocations_of([&] {
                for (const int n : {kMost, 1, 17, 0}) {
                    op.batch.n = n;
                    for (const bool training : {true, false}) {
                        op.batch.training = training;
                        op.forward(io);
                    }
                    op.backward(io);
                }
            });
            CHECK(found == 0);
        }
    }
}

TEST_CASE("what a step calls beside operations allocates in the first at most") {
    for (const int threads : {1, 3}) {
        INFO("threads: " << threads);
        const auto backend = make_cpu_backend(threads);
        const Buffers buffers(*backend);
        constexpr std::int64_t kElems = 1 << 16;
        const Shape shape{1, 28, 28};
        const DeviceBuffer<std::uint8_t> pixels(*backend, shape.elems());
        const DeviceBuffer<std::int32_t> labels(*backend, kMost);
        const DeviceBuffer<StepScalars> scalars(*backend, 1);
        const DeviceBuffer<GradientFacts> facts(*backend, 1);
        const auto step = [&] {
            backend->gather({.pixels = pixels.get(),
                             .labels = labels.get(),
                             .samples = buffers.samples.get(),
                             .shape = shape,
                             .scale = buffers.at(0),
                             .shift = buffers.at(1)},
                            kMost, buffers.at(2), labels.get());
            backend->cross_entropy({.classes = 10,
                                    .logits = buffers.at(2),
                                    .labels = labels.get(),
                                    .gradient = buffers.at(3),
                                    .sums = buffers.at(4)},
                                   kMost);
            backend->add(kElems, buffers.at(0), buffers.at(1));
            clip_norm(*backend, facts.get(), kElems, 1.0f, buffers.at(1));
            for (const Formula formula : {Formula::sgd_momentum, Formula::adam}) {
                backend->update({.formula = formula,
                                 .scalars = scalars.get(),
                                 .states = {buffers.at(2), buffers.at(3)}},
                                kElems, buffers.at(0), buffers.at(1));
            }
        };
        step();
        CHECK(allocations_of(step) == 0);
    }
}

TEST_CASE("a training step on one CPU rank allocates nothing") {
    const auto comm = make_single_communicator();
    const auto backend = make_cpu_backend(2);
    for (const auto rule : {train::UpdateRule::sgd, train::UpdateRule::adam}) {
        train::Session session(*comm, *backend,
                               {.batch = {.global_batch = 20}, .optimizer = {.rule = rule}},
                               {.model = model::load_model("net")},
                               train::random_images(200, {1, 28, 28}, 10), {{0.5f}, {0.3f}});
        session.initialise();
        session.trainer().begin_epoch(1);
        for (int step = 0; step < 3; ++step) {
            session.trainer().step(step, false);
        }
        CHECK(allocations_of([&] {
                  for (int step = 3; step < 10; ++step) {
                      session.trainer().step(step, false);
                  }
              }) == 0);
    }
}
