// Trainings whose launches are run a second time: the built-in nets in every precision.
#include "tests/ptx/training.hpp"
#include "tests/support/catch.hpp"

namespace gyre::test {
namespace {

// The nets take images of any size, and this one makes the launches of wide and resnet short.
constexpr Shape kSmall{1, 12, 12};

void train_in_all_precisions(const char* name, const Shape& image, int images, int steps) {
    for (const auto& [word, precision] : model::kPrecisions) {
        INFO(name << " in " << word);
        CHECK_NOTHROW(train_emulated(model::load_model(name), image, precision, images, steps));
    }
}

}  // namespace

TEST_CASE("net is trained in every precision", "[trainings]") {
    train_in_all_precisions("net", {1, 28, 28}, 5, 2);
}
TEST_CASE("net is trained with gradients of several passes", "[trainings]") {
    CHECK_NOTHROW(train_emulated(model::load_model("net"), {1, 28, 28}, Precision::fp32, 6, 1, 2));
}
TEST_CASE("wide is trained in every precision", "[trainings]") {
    train_in_all_precisions("wide", kSmall, 2, 1);
}
TEST_CASE("resnet is trained in every precision", "[trainings]") {
    train_in_all_precisions("resnet", kSmall, 2, 1);
}

}  // namespace gyre::test
