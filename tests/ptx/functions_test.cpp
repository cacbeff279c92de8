// expf and logf as nvcc expands them. CUDA's programming guide states for both, among the single
// precision functions, that they are off by 1 ulp at most: the result is the correctly rounded
// value or one of its neighbours. Of ex2.approx, of which expf is made, the interpreter knows the
// exact value, and a GPU one to within 2^-22.
#include <cmath>
#include <filesystem>
#include <limits>

#include "tests/ptx/library.hpp"
#include "tests/ptx/run.hpp"
#include "tests/support/built_file.hpp"
#include "tests/support/catch.hpp"

namespace gyre::ptx {
namespace {

using Floats = std::vector<float>;

// How many numbers lie between two.
double steps(float a, float b) {
    if (a == b || (std::isnan(a) && std::isnan(b))) {
        return 0.0;
    }
    if (!std::isfinite(a) || !std::isfinite(b)) {
        return std::numeric_limits<double>::infinity();
    }
    const auto order = [](float value) {
        const auto bits = std::bit_cast<std::int32_t>(value);
        return static_cast<double>(bits < 0 ? -static_cast<double>(bits & 0x7fffffff)
                                            : static_cast<double>(bits));
    };
    return std::abs(order(a) - order(b));
}

struct Results {
    Floats powers, logarithms;
};
Results compute(const Library& library, const Floats& values) {
    const Entry* const entry = library.find("functions(float const*, float*, float*)", "functions");
    REQUIRE(entry != nullptr);
    Results results{Floats(values.size()), Floats(values.size())};
    const float* pointers[] = {values.data(), results.powers.data(), results.logarithms.data()};
    Launch launch;
    launch.block[0] = 32;
    launch.grid[0] = static_cast<unsigned>(values.size() / 32);
    for (const float* const& pointer : pointers) {
        const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
        launch.arguments.push_back({&pointer, sizeof pointer});
        launch.memory.push_back({begin, begin + values.size() * sizeof(float)});
    }
    run(*entry->module, entry->module->kernel(entry->mangled), launch);
    return results;
}

}  // namespace

TEST_CASE("expf and logf of the PTX are within the error that CUDA states") {
    constexpr double kMostSteps = 1.0;
    constexpr int kCount = 1 << 16;
    Floats values;
    for (int i = 0; i < kCount; ++i) {  // from -104 to 90, where powers go from 0 to infinity
        values.push_back(-104.0f + 194.0f * static_cast<float>(i) / kCount);
    }
    for (int i = 0; i < kCount; ++i) {  // of any magnitude, from the least to the largest
        values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(i) * 0x7f7fu + 1u));
    }
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (const float special : {0.0f, -0.0f, 1.0f, -1.0f, kInfinity, -kInfinity,
                                std::numeric_limits<float>::quiet_NaN()}) {
        values.push_back(special);
    }
    values.resize((values.size() + 31) / 32 * 32);
    int libraries = 0;
    for (const auto& folder :
         std::filesystem::directory_iterator(test::built_file("tests/ptx/functions"))) {
        const Library library(folder.path().string());
        INFO(library.architecture());
        const Results results = compute(library, values);
        double most_of_power = 0.0, most_of_logarithm = 0.0;
        for (std::size_t i = 0; i < values.size(); ++i) {
            const double value = values[i];
            const auto power = static_cast<float>(std::exp(value));
            const auto logarithm = static_cast<float>(std::log(value));
            most_of_power = std::max(most_of_power, steps(results.powers[i], power));
            most_of_logarithm =
                std::max(most_of_logarithm, steps(results.logarithms[i], logarithm));
        }
        CHECK(most_of_power <= kMostSteps);
        CHECK(most_of_logarithm <= kMostSteps);
        ++libraries;
    }
    CHECK(libraries > 0);
}

}  // namespace gyre::ptx
