// Sums of squares that depend neither on the order of their terms nor on who adds which.
#include "base/exact_sum.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/catch.hpp"

using namespace gyre;

namespace {

bool same(const ExactSum& a, const ExactSum& b) {
    return std::equal(a.limbs, a.limbs + ExactSum::kLimbs, b.limbs);
}

ExactSum sum_of(const std::vector<double>& terms) {
    ExactSum sum;
    for (const double term : terms) {
        sum.add(term);
    }
    return sum;
}

}  // namespace

TEST_CASE("an exact sum does not depend on the order of its terms", "[exact_sum]") {
    std::mt19937 random(1);
    for (const int range : {1, 40, 540}) {
        INFO("magnitudes over " << range << " binary digits");
        std::vector<double> terms(1000);
        for (double& term : terms) {
            term = std::ldexp(1.0 + static_cast<double>(random()) / 0x1p32,
                              static_cast<int>(random() % static_cast<unsigned>(range)) - 290);
        }
        const ExactSum sum = sum_of(terms);
        std::shuffle(terms.begin(), terms.end(), random);
        CHECK(same(sum_of(terms), sum));
        ExactSum halves = sum_of({terms.begin(), terms.begin() + 300});
        halves.add(sum_of({terms.begin() + 300, terms.end()}));
        CHECK(same(halves, sum));
        // By the definition of rounding: from the least to the greatest in a wider type.
        std::sort(terms.begin(), terms.end());
        long double expected = 0.0L;
        for (const double term : terms) {
            expected += term;
        }
        CHECK(std::abs(static_cast<double>(sum.value() / expected - 1.0L)) <= 21 * 0x1p-53);
    }
}

TEST_CASE("an exact sum takes the squares of all floats", "[exact_sum]") {
    const float least = std::numeric_limits<float>::denorm_min();
    const float most = std::numeric_limits<float>::max();
    for (const float value : {0.0f, least, -least, 1.0f, -3.0f, most}) {
        float x[16] = {};
        for (const int at : {0, 7, 15}) {
            x[at] = value;
        }
        ExactSum sum;
        for (int i = 0; i < 5; ++i) {
            sum.add(sum_of_16_squares(x));
        }
        INFO(value);
        CHECK(sum.value() == 15.0 * (static_cast<double>(value) * static_cast<double>(value)));
    }
    float x[16] = {};
    std::fill_n(x, 16, most);
    CHECK(std::isfinite(sum_of({sum_of_16_squares(x)}).value()));
}

TEST_CASE("an exact sum with a term that is not finite is not", "[exact_sum]") {
    const double infinity = std::numeric_limits<double>::infinity();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    CHECK(sum_of({1.0, infinity, 2.0}).value() == infinity);
    CHECK(std::isnan(sum_of({1.0, nan, 2.0}).value()));
    CHECK(std::isnan(sum_of({-nan}).value()));
    CHECK(std::isnan(sum_of({infinity, nan, infinity}).value()));
}
