// The timings by which --kernels auto chooses, and the file that keeps them.
#include "kernels/gpu/choices.hpp"

#include <fstream>
#include <sstream>

#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using gyre::test::expect_error;
using gyre::test::file_bytes;
using gyre::test::TempDir;
namespace fs = std::filesystem;

namespace {

const Operation kConv{"conv2d forward", "1x28x28 -> 10x24x24, kernel 5", 64};
const Operation kLinear{"linear backward data", "320 -> 50", 64};

void write(const fs::path& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

// A file with one timing, in which one field can be replaced.
std::string file_with(const std::string& n, const std::string& ours) {
    return R"({"format": "gyre kernel timings 1", "timings": [{"environment": "G",)"
           R"("operation": "o", "shape": "s", "n": )" +
           n + R"(, "ours_us": )" + ours + R"(, "library_us": 2.0}]})";
}

std::ptrdiff_t files_in(const fs::path& folder) {
    return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

}  // namespace

TEST_CASE("choices: the faster one is chosen, and ours if both are equally fast") {
    CHECK(Timing{1.0, 2.0}.ours_is_faster());
    CHECK_FALSE(Timing{2.0, 1.0}.ours_is_faster());
    CHECK(Timing{1.0, 1.0}.ours_is_faster());
}

TEST_CASE("choices: operations differ by name, shape and images") {
    Choices choices("G", {});
    CHECK(choices.find(kConv) == nullptr);
    choices.add(kConv, {3.0, 5.0});
    REQUIRE(choices.find(kConv) != nullptr);
    CHECK(choices.find(kConv)->ours_us == 3.0);
    CHECK(choices.find(kConv)->library_us == 5.0);
    for (const Operation& other : {Operation{"conv2d backward data", kConv.shape, kConv.n},
                                   Operation{kConv.name, "1x28x28 -> 10x26x26, kernel 3", kConv.n},
                                   Operation{kConv.name, kConv.shape, 65}}) {
        CHECK(choices.find(other) == nullptr);
    }
    choices.add(kConv, {4.0, 2.0});
    CHECK_FALSE(choices.find(kConv)->ours_is_faster());
}

TEST_CASE("choices: without a file nothing is written") {
    Choices choices("G", {});
    choices.add(kConv, {3.0, 5.0});
    CHECK_NOTHROW(choices.save());
}

TEST_CASE("choices: timings come back from the file exactly, only for their environment") {
    const TempDir dir;
    const fs::path file = dir.path() / "folder" / "choices.json";  // the folder is created
    const double third = 1.0 / 3.0;
    {
        Choices choices("one \"GPU\", µ", file);
        choices.add(kConv, {third, 1e-3});
        choices.add(kLinear, {2.0, 12345.678});
        choices.save();
    }
    CHECK(files_in(file.parent_path()) == 1);
    const Choices again("one \"GPU\", µ", file);
    REQUIRE(again.find(kConv) != nullptr);
    CHECK(again.find(kConv)->ours_us == third);
    CHECK(again.find(kConv)->library_us == 1e-3);
    REQUIRE(again.find(kLinear) != nullptr);
    CHECK(again.find(kLinear)->library_us == 12345.678);

    Choices other("another GPU", file);
    CHECK(other.find(kConv) == nullptr);
    other.add(kConv, {9.0, 8.0});
    other.save();
    CHECK(Choices("one \"GPU\", µ", file).find(kConv)->ours_us == third);
    CHECK(Choices("another GPU", file).find(kConv)->ours_us == 9.0);
}

TEST_CASE("choices: what another process has saved meanwhile is kept") {
    const TempDir dir;
    const fs::path file = dir.path() / "choices.json";
    Choices first("G", file), second("G", file);
    first.add(kConv, {1.0, 2.0});
    first.save();
    second.add(kConv, {7.0, 2.0});
    second.add(kLinear, {3.0, 4.0});
    second.save();
    first.save();  // its own timing of the convolution is in its file again
    const Choices last("G", file);
    REQUIRE(last.find(kConv) != nullptr);
    CHECK(last.find(kConv)->ours_us == 1.0);
    REQUIRE(last.find(kLinear) != nullptr);
    CHECK(first.find(kLinear) != nullptr);
}

TEST_CASE("choices: a file of another kind is named and not changed") {
    const TempDir dir;
    const fs::path file = dir.path() / "choices.json";
    write(file, file_with("64", "1.5"));
    CHECK(Choices("G", file).find({"o", "s", 64})->ours_us == 1.5);

    const auto expect_refused = [&](const std::string& text, const std::string& part) {
        INFO(text);
        write(file, text);
        expect_error(ExitCode::bad_input, {file.string(), part, "delete it"},
                     [&] { Choices("G", file); });
        CHECK(file_bytes(file) == text);
    };
    expect_refused("", "parse error");
    expect_refused("{\"format\": \"gyre kernel tim", "parse error");
    expect_refused("[]", "type");
    expect_refused("7", "type");
    expect_refused(R"({"timings": []})", "format");
    expect_refused(R"({"format": "gyre kernel timings 9", "timings": []})", "timings 9");
    expect_refused(R"({"format": "gyre kernel timings 1"})", "timings");
    expect_refused(R"({"format": "gyre kernel timings 1", "timings": [3]})", "type");
    expect_refused(R"({"format": "gyre kernel timings 1", "timings": [{}]})", "operation");
    expect_refused(file_with("0", "1.0"), "n is 0");
    expect_refused(file_with("64.5", "1.0"), "n is 64.5");
    expect_refused(file_with("99999999999", "1.0"), "n is 99999999999");
    expect_refused(file_with("\"64\"", "1.0"), "number of images");
    expect_refused(file_with("64", "0.0"), "ours_us is 0.0");
    expect_refused(file_with("64", "-3"), "ours_us is -3");
    expect_refused(file_with("64", "true"), "ours_us is true");
    expect_refused(file_with("64", "null"), "ours_us is null");
    expect_refused(file_with("64", "1e999"), "out_of_range");
}

TEST_CASE("choices: a file that cannot be written is named, and no temporary file is left") {
    const TempDir dir;
    write(dir.path() / "file", "");
    Choices below_a_file("G", dir.path() / "file" / "choices.json");
    below_a_file.add(kConv, {1.0, 2.0});
    expect_error(ExitCode::bad_input, {"choices.json", "could not be written"},
                 [&] { below_a_file.save(); });

    const fs::path folder = dir.path() / "folder";
    Choices at_a_folder("G", folder);
    at_a_folder.add(kConv, {1.0, 2.0});
    fs::create_directories(folder / "inside");
    expect_error(ExitCode::bad_input, {folder.string()}, [&] { at_a_folder.save(); });
    CHECK(files_in(dir.path()) == 2);
}

TEST_CASE("choices: the table lists what was chosen, in the order of the layers") {
    Choices choices("G", {});
    CHECK(choices.table().empty());
    choices.list("conv1", kConv);  // not timed, so there is no line
    CHECK(choices.table().empty());
    choices.add(kLinear, {10.25, 2.0});
    choices.add(kConv, {3.0, 1234.5});
    choices.list("fc1", kLinear);
    choices.list("fc1", kLinear);
    std::istringstream table(choices.table());
    std::vector<std::string> lines;
    for (std::string line; std::getline(table, line);) {
        lines.push_back(line);
    }
    const std::vector<std::string> expected = {
        "layer  operation             shape                           n  ours µs  library µs  "
        "chosen",
        "conv1  conv2d forward        1x28x28 -> 10x24x24, kernel 5  64      3.0      1234.5  ours",
        "fc1    linear backward data  320 -> 50                      64     10.2         2.0  "
        "library"};
    CHECK(lines == expected);
}
