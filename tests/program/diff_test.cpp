// gyre diff: what it says of two files of weights, and with which exit code.
#include <bit>
#include <cmath>
#include <limits>

#include "model/difference.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::model;
using namespace gyre::test;

namespace {

using Lines = std::vector<std::string>;

HostTensor tensor(const std::string& name, std::vector<std::int64_t> shape,
                  std::vector<float> values) {
    return {.name = name, .shape = std::move(shape), .values = std::move(values)};
}

// The float `ulps` places above a positive one.
float above(float value, std::uint32_t ulps) {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) + ulps);
}

}  // namespace

TEST_CASE("tensors are compared to the last bit") {
    const HostTensor a = tensor("w", {2, 3}, {1, 2, 3, 4, 5, 6});
    HostTensor b = a;
    CHECK(tensor_differences({a}, {b}).empty());
    CHECK(tensor_differences({}, {}).empty());

    b.values[4] = above(5.0f, 1);
    CHECK(tensor_differences({a}, {b}) ==
          Lines{"w [2, 3]: 1 of 6 values differ, the first at [1, 1]: 5 and 5.00000048, 1 ulp"});
    b.values[5] = above(6.0f, 7);
    CHECK(tensor_differences({b}, {a}) ==
          Lines{"w [2, 3]: 2 of 6 values differ, the first at [1, 1]: 5.00000048 and 5, 1 ulp, at "
                "most 7 ulps"});

    const float least = std::numeric_limits<float>::denorm_min();
    CHECK(tensor_differences({tensor("s", {}, {-least})}, {tensor("s", {}, {2 * least})}) ==
          Lines{"s []: 1 of 1 values differ, the first at []: -1.40129846e-45 and "
                "2.80259693e-45, 3 ulps"});
    CHECK(tensor_differences({tensor("z", {1}, {-0.0f})}, {tensor("z", {1}, {0.0f})}) ==
          Lines{"z [1]: 1 of 1 values differ, the first at [0]: -0 and 0, 0 ulps"});
    const float nan = std::nanf("");
    CHECK(tensor_differences({tensor("n", {1}, {nan})}, {tensor("n", {1}, {nan})}).empty());
    CHECK(tensor_differences({tensor("n", {2}, {1, nan})}, {tensor("n", {2}, {2, 0})}) ==
          Lines{"n [2]: 2 of 2 values differ, the first at [0]: 1 and 2; some are NaN"});
}

TEST_CASE("tensors that only one file has, or in another shape, are named") {
    const HostTensor a = tensor("a", {2}, {1, 2}), b = tensor("b", {2}, {1, 2}),
                     wide = tensor("a", {1, 2}, {1, 2});
    CHECK(tensor_differences({a, b}, {b, a}).empty());
    CHECK(tensor_differences({a}, {b}) ==
          Lines{"a [2]: only in the first", "b [2]: only in the second"});
    CHECK(tensor_differences({a}, {wide}) == Lines{"a [2]: [1, 2] in the second"});
}

TEST_CASE("gyre diff says whether two trainings have the same weights, and where they part") {
    const Training training;
    const std::string one = training.file("one"), two = training.file("two"),
                      other = training.file("other");
    const std::string flags = "--epochs 1 --optimizer adam --save ";
    training.run(1, flags + one + " --shards 2");
    training.run(2, flags + two + " --shards 2");
    training.run(1, flags + other + " --shards 2 --seed 2");

    const Outcome same = run_gyre(0, "diff " + one + " " + two + "/best.safetensors");
    INFO(same.output);
    CHECK(same.exit_code == 0);
    CHECK(count_of(same.output, "tensors of " + one + "/last.safetensors and " + two +
                                    "/best.safetensors are identical") == 1);

    const Outcome parted = run_gyre(0, "diff " + one + " " + other);
    INFO(parted.output);
    CHECK(parted.exit_code == 6);
    CHECK(count_of(parted.output, "seed: '1' and '2'") == 1);
    CHECK(count_of(parted.output, "conv1.weight [6, 1, 3, 3]: 54 of 54 values differ") == 1);

    // One bit of one parameter; without the hash of the file's content, as weights of others are.
    TensorFile file = read_safetensors(one + "/last.safetensors");
    HostTensor& planted = file.tensors.at(0);
    planted.values.at(5) = std::nextafter(planted.values[5], 10.0f);
    file.metadata.clear();
    std::erase_if(file.tensors,
                  [](const HostTensor& t) { return t.name.starts_with("optimizer."); });
    const std::string weights = training.file("planted.safetensors");
    write_safetensors(weights, file);
    const Outcome bit = run_gyre(0, "diff " + one + " " + weights);
    INFO(bit.output);
    CHECK(bit.exit_code == 6);
    CHECK(count_of(bit.output, "Only the first file has an optimiser's state") == 1);
    CHECK(count_of(bit.output, planted.name) == 1);
    CHECK(count_of(bit.output, "1 of ") == 1);
    CHECK(count_of(bit.output, ", 1 ulp\n") == 1);
    CHECK(count_of(bit.output, "1 tensor of ") == 1);

    const Outcome missing = run_gyre(0, "diff " + one + " " + training.file("none.safetensors"));
    INFO(missing.output);
    CHECK(missing.exit_code == 3);
    const Outcome alone = run_gyre(0, "diff " + one);
    INFO(alone.output);
    CHECK(alone.exit_code == 2);
}
