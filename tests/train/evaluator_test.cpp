// Evaluations of several views of each image.
#include "train/evaluator.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/make_backend.hpp"
#include "model/spec.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

constexpr int kImages = 23, kClasses = 5, kBatch = 10;
const Shape kShape{3, 6, 5};

ImageSet mirrored(const ImageSet& set) {
    ImageSet other = random_images(kImages, kShape, kClasses);
    std::vector<std::uint8_t> pixels(set.pixels.data(), set.pixels.data() + set.pixels.size());
    for (auto row = pixels.begin(); row != pixels.end(); row += kShape.width) {
        std::reverse(row, row + kShape.width);
    }
    other.pixels = std::move(pixels);
    return other;
}

struct Result {
    Evaluation evaluation;
    std::vector<float> logits;
};

Result result_of(Backend& backend, Net& net, ImageSet&& set, Views views) {
    const DeviceImages images(backend, std::move(set), {{0.5f, 0.4f, 0.3f}, {0.25f, 0.25f, 0.5f}});
    const auto alone = make_single_communicator();
    Result result;
    result.evaluation =
        evaluate(*alone, backend, net, images, {.batch = kBatch, .views = views},
                 [&](std::int64_t, int, const std::vector<float>& logits) {
                     result.logits.insert(result.logits.end(), logits.begin(), logits.end());
                 });
    return result;
}

void check_views(Backend& backend, Precision precision) {
    Net net(backend, parse_model("conv 8 k3\nrelu\nlinear classes\n", "mine"), kShape, kClasses,
            {.train_batch = 0, .eval_batch = kBatch, .spec = {.precision = precision}});
    net.initialise(1);
    const ImageSet set = random_images(kImages, kShape, kClasses);
    const auto look = [&](ImageSet&& images, Views views) {
        return result_of(backend, net, std::move(images), views);
    };
    const Result plain = look(random_images(kImages, kShape, kClasses), Views::plain);
    const Result other = look(mirrored(set), Views::plain);
    const Result both = look(random_images(kImages, kShape, kClasses), Views::mirrored);
    REQUIRE(both.logits.size() == static_cast<std::size_t>(kImages * kClasses));
    CHECK(plain.logits != other.logits);
    // The mean of two numbers is rounded once, and again to 16 bits where the net has those.
    const float epsilon = precision == Precision::bf16 ? 0x1p-8f : 0.0f;
    std::int64_t correct = 0;
    for (std::size_t i = 0; i < both.logits.size(); ++i) {
        const float mean = 0.5f * (plain.logits[i] + other.logits[i]);
        CHECK(std::abs(both.logits[i] - mean) <= epsilon * std::abs(mean));
    }
    for (std::size_t i = 0; i < static_cast<std::size_t>(kImages); ++i) {
        const auto row = both.logits.begin() + static_cast<std::ptrdiff_t>(i * kClasses);
        correct += std::max_element(row, row + kClasses) - row == set.labels[i];
    }
    CHECK(both.evaluation.images == kImages);
    if (precision == Precision::fp32) {  // 16 bits may be equal
        CHECK(both.evaluation.correct == correct);
    }
    CHECK(both.evaluation.loss != plain.evaluation.loss);
    // By convexity, the loss of the mean is at most the mean of the losses.
    CHECK(both.evaluation.loss <=
          0.5 * (plain.evaluation.loss + other.evaluation.loss) * (1.0 + 4.0 * double{epsilon}) +
              1e-6);
}

}  // namespace

TEST_CASE("the logits of mirrored views are the mean of an image's and its mirror image's",
          "[gpu]") {
    on_every_backend([](Bench& bench) { check_views(bench.backend, Precision::fp32); });
}

TEST_CASE("mirrored views of a net in 16 bits on a CPU") {
    check_views(*make_cpu_backend(2), Precision::bf16);
}
