// Which program a step has, why, and that both find the images they are told.
#include "train/step_program.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::train;

namespace {

constexpr int kClasses = 5, kImages = 12, kBatch = 4;
const char* const kChain = "conv 3 k3\nrelu\nmaxpool 2\nlinear classes\n";

struct Fixture {
    explicit Fixture(bool emulated, const char* model = kChain, NetOptions options = {})
        : backend(emulated ? make_emulated_backend({}) : make_cpu_backend(1)),
          images(*backend, random_images(kImages, {1, 8, 8}, kClasses), {{0.5f}, {0.3f}}),
          net(*backend, parse_model(model, "mine"), {1, 8, 8}, kClasses,
              [&] {
                  options.train_batch = kBatch;
                  return options;
              }()),
          samples(*backend, kBatch),
          place(*backend, 1) {
        net.initialise(3);
    }
    std::string description(const AugmentSpec& augment = {}, bool fuse = true) {
        const StepProgram program(*backend, net, images, augment, fuse);
        CHECK(program.fused() == program.description().starts_with("fused: "));
        return program.description();
    }
    // Loss and gradients of a pass over these images.
    std::vector<float> run(const StepProgram& program, const std::vector<std::int32_t>& of,
                           const NextSamplesArgs* next = nullptr) {
        backend->upload(samples.get(), of.data(), of.size() * sizeof(std::int32_t));
        std::vector<std::int64_t> offsets;
        const auto ready = [&](std::int64_t offset) { offsets.push_back(offset); };
        program.run({.batch = {.n = kBatch, .training = true, .samples = samples.get(), .seed = 5},
                     .samples = samples.get(),
                     .next = next,
                     .scale = 0.25f,
                     .hooks = {.ready = ready}});
        CHECK(offsets.back() == 0);
        CHECK(std::is_sorted(offsets.rbegin(), offsets.rend()));
        std::vector<float> all(static_cast<std::size_t>(net.gradient_elems()));
        backend->download(all.data(), net.gradient_data(), all.size() * sizeof(float));
        return all;
    }

    const std::unique_ptr<Backend> backend;
    const DeviceImages images;
    Net net;
    const DeviceBuffer<std::int32_t> samples;
    const DeviceBuffer<EpochPlace> place;
};

}  // namespace

TEST_CASE("a step's program says why it is not fused", "[step_program]") {
    CHECK(Fixture(false).description() == "layer by layer: a CPU has no fused pass");
    Fixture chain(true);
    CHECK(chain.description().starts_with("fused: a training pass is one kernel"));
    CHECK(chain.description({}, false) == "layer by layer: a fused pass is not asked for");
    CHECK(chain.description({.flip = Flip::random}) ==
          "layer by layer: augmentation is not in the fused pass");
    CHECK(Fixture(true, kChain, {.loss = {.label_smoothing = 0.1f}}).description() ==
          "layer by layer: label smoothing is not in the fused pass");
    CHECK(Fixture(true, kChain, {.spec = {.precision = Precision::bf16}}).description() ==
          "layer by layer: the fused pass computes in float32 only");
    for (const char* const model : {"conv 3 k3 p1\nas a\nconv 3 k3 p1\nadd a\nlinear classes\n",
                                    "conv 3 k3\nbatchnorm\nlinear classes\n"}) {
        CHECK(Fixture(true, model).description() ==
              "layer by layer: the net is not a chain of layers without state");
    }
    CHECK(Fixture(true, "conv 3 k3 s2\nlinear classes\n").description() ==
          "layer by layer: the device's fused pass does not take such a net");
}

TEST_CASE("both programs find the images of the step that is next", "[step_program]") {
    for (const bool emulated : {false, true}) {
        for (const bool fuse : {false, true}) {
            Fixture fixture(emulated);
            const StepProgram program(*fixture.backend, fixture.net, fixture.images, {}, fuse);
            REQUIRE(program.fused() == (emulated && fuse));
            const std::vector<float> first = fixture.run(program, {0, 1, 2, 3});
            const std::vector<float> second = fixture.run(program, {4, 5, 6, 7});
            CHECK(first != second);
            const NextSamplesArgs next{.order = EpochOrder(1, kImages, false),
                                       .place = fixture.place.get(),
                                       .step_images = kBatch};
            const EpochPlace begin{.epoch = 1};
            fixture.backend->upload(fixture.place.get(), &begin, sizeof begin);
            CHECK(fixture.run(program, {9, 9, 9, 9}, &next) == first);
            CHECK(fixture.run(program, {9, 9, 9, 9}, &next) == second);
        }
    }
}
