// Updates of the parameters on every backend: clipping, the check for non-finite gradients, and the
// optimizers, against PyTorch's formulas in double precision.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/clip_norm.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

struct Case {
    const char* name;
    float rate;
    UpdateArgs args;
    float decoupled_decay = 0.0f;
};

// A case's parameters and states, in double precision.
struct Reference {
    std::vector<double> p, m, v;

    // step: counted from 1.
    void update(const Case& c, const Floats& g, int step) {
        const UpdateArgs& a = c.args;
        const double lr{c.rate}, b1{a.beta1}, b2{a.beta2};
        for (std::size_t i = 0; i < p.size(); ++i) {
            const double d = double{g[i]} + double{a.weight_decay} * p[i];
            p[i] *= 1.0 - lr * double{c.decoupled_decay};
            switch (a.formula) {
                case Formula::sgd:
                case Formula::sgd_momentum:
                    m[i] = double{a.momentum} * m[i] + d;
                    p[i] -= lr * (a.nesterov ? d + double{a.momentum} * m[i] : m[i]);
                    break;
                case Formula::adam: {
                    m[i] = b1 * m[i] + (1 - b1) * d;
                    v[i] = b2 * v[i] + (1 - b2) * d * d;
                    const double denominator =
                        std::sqrt(v[i] / (1 - std::pow(b2, step))) + double{a.epsilon};
                    p[i] -= lr / (1 - std::pow(b1, step)) * m[i] / denominator;
                    break;
                }
                case Formula::lion: {
                    const double c_i = b1 * m[i] + (1 - b1) * d;
                    p[i] -= lr * (c_i > 0 ? 1 : c_i < 0 ? -1 : 0);
                    m[i] = b2 * m[i] + (1 - b2) * d;
                    break;
                }
                case Formula::rmsprop:
                    v[i] = b2 * v[i] + (1 - b2) * d * d;
                    p[i] -= lr * d / (std::sqrt(v[i]) + double{a.epsilon});
                    break;
            }
        }
    }
};

constexpr Formula kFormulas[] = {Formula::sgd, Formula::sgd_momentum, Formula::adam, Formula::lion,
                                 Formula::rmsprop};

}  // namespace

TEST_CASE("gradients are clipped to a norm", "[gpu]") {
    on_every_backend([](Bench& bench) {
        for (const std::int64_t elems : {1, 31, 100'003}) {
            const Floats g = random_floats(elems, 18);
            const double length = norm(g);
            for (const double most : {0.0, 0.5 * length, 2.0 * length}) {
                const auto facts = bench.array(std::vector<GradientFacts>(3));
                const Guarded dev_g = bench.vector(g);
                clip_norm(bench.backend, facts.get(), elems, static_cast<float>(most), dev_g.get());
                const Floats found = dev_g.download();
                const double factor =
                    std::min(1.0, double{static_cast<float>(most)} / (length + 1e-6));
                // Two ranks have found it in three parts, and a third has found nothing.
                const Guarded parts = bench.vector(g);
                const std::int64_t first = elems / 48 * 16, second = elems / 32 * 16;
                const auto sum = [&](int rank, std::int64_t begin, std::int64_t end) {
                    if (begin < end) {
                        bench.backend.sum_of_squares(end - begin, parts.get() + begin, {},
                                                     &facts.get()[rank].squares);
                    }
                };
                ExactSum all, parted;
                bench.backend.download(&all, &facts.get()->squares, sizeof all);
                bench.backend.fill_zero(facts.get(), facts.bytes());
                sum(0, 0, first);
                sum(2, first, second);
                sum(2, second, elems);
                std::array<GradientFacts, 3> of_ranks;
                bench.backend.download(of_ranks.data(), facts.get(), sizeof of_ranks);
                for (const GradientFacts& of_rank : of_ranks) {
                    parted.add(of_rank.squares);
                }
                CHECK(std::equal(all.limbs, all.limbs + ExactSum::kLimbs, parted.limbs));
                const Guarded whole = bench.empty(1);
                bench.backend.scale_to_norm({.most = static_cast<float>(most),
                                             .of_ranks = facts.get(),
                                             .ranks = 3,
                                             .norm = whole.get()},
                                            elems, parts.get());
                CHECK(std::abs(double{whole.download()[0]} - length) <= length * 0x1p-24);
                const Floats found_by_three = parts.download();
                double worst = 0.0;
                for (std::size_t i = 0; i < g.size(); ++i) {
                    for (const float value : {found[i], found_by_three[i]}) {
                        worst = std::max(worst, std::abs(double{value} - factor * double{g[i]}));
                    }
                }
                // The factor and the product are rounded; the norm is summed in double precision.
                CHECK(worst <= 2 * 0x1p-24);
            }
        }
        const Guarded bad = bench.vector({1.0f, std::numeric_limits<float>::quiet_NaN()});
        const auto facts = bench.array(std::vector<GradientFacts>(1));
        clip_norm(bench.backend, facts.get(), 2, 1.0f, bad.get());
        CHECK(std::isnan(bad.download()[0]));
    });
}

TEST_CASE("a gradient that is not finite is reported, or the last of several", "[gpu]") {
    on_every_backend([](Bench& bench) {
        constexpr std::int64_t kElems = 70'003;
        const auto check = [&](std::vector<std::int64_t> bad, float value, std::int32_t expected) {
            Floats g(kElems, 1e38f);  // finite, even if several are added
            for (const std::int64_t i : bad) {
                g[static_cast<std::size_t>(i)] = value;
            }
            const Guarded dev_g = bench.vector(g);
            const Guarded p = bench.vector(Floats(kElems)), m = bench.vector(Floats(kElems)),
                          v = bench.vector(Floats(kElems));
            for (int kernel = 0; kernel <= static_cast<int>(std::size(kFormulas)); ++kernel) {
                INFO("kernel " << kernel);
                const auto word = bench.array(std::vector<std::int32_t>(1));
                const FiniteCheck finite{word.get(), 160};
                const DeviceBuffer<StepScalars> scalars(bench.backend, 1);
                if (kernel == static_cast<int>(std::size(kFormulas))) {
                    const auto facts = bench.array(std::vector<GradientFacts>(1));
                    clip_norm(bench.backend, facts.get(), kElems, 1.0f, dev_g.get(), finite);
                } else {
                    bench.backend.update({.formula = kFormulas[kernel],
                                          .scalars = scalars.get(),
                                          .states = {m.get(), v.get()},
                                          .finite = finite},
                                         kElems, p.get(), dev_g.get());
                }
                std::int32_t found = -1;
                bench.backend.download(&found, word.get(), sizeof found);
                CHECK(found == expected);
            }
        };
        const float nan = std::numeric_limits<float>::quiet_NaN();
        const float infinity = std::numeric_limits<float>::infinity();
        check({}, nan, 0);
        check({0}, nan, 11);  // 1 + 160 / 16
        check({15, 16}, -infinity, 12);
        check({3, 40'000, 20'000}, infinity, 1 + (160 + 40'000) / 16);
        check({kElems - 1}, nan, 1 + (160 + kElems - 1) / 16);
    });
}

TEST_CASE("optimisers follow PyTorch's formulas over several steps", "[gpu]") {
    on_every_backend([](Bench& bench) {
        const std::int64_t elems = 100'003;  // more than one range of the thread pool
        const Floats start = random_floats(elems, 17);
        const auto scalars = bench.array(std::vector<StepScalars>(1));
        using enum Formula;
        const Case cases[] = {
            {"sgd", 0.1f, {.formula = sgd}},
            {"sgd, weight decay", 0.1f, {.formula = sgd, .weight_decay = 0.1f}},
            {"sgd, momentum", 0.1f, {.formula = sgd_momentum, .momentum = 0.9f}},
            {"sgd, nesterov, weight decay",
             0.1f,
             {.formula = sgd_momentum, .momentum = 0.9f, .nesterov = true, .weight_decay = 0.01f}},
            {"adam", 0.01f, {.formula = adam}},
            {"adam, weight decay",
             0.01f,
             {.formula = adam,
              .beta1 = 0.8f,
              .beta2 = 0.99f,
              .epsilon = 1e-6f,
              .weight_decay = 0.1f}},
            {"adamw", 0.01f, {.formula = adam}, 0.1f},
            {"lion", 0.01f, {.formula = lion, .beta2 = 0.99f}},
            {"lion, weight decay", 0.01f, {.formula = lion, .beta1 = 0.5f, .beta2 = 0.75f}, 0.1f},
            {"rmsprop", 0.01f, {.formula = rmsprop, .beta2 = 0.99f}},
            {"rmsprop, weight decay",
             0.01f,
             {.formula = rmsprop, .beta2 = 0.5f, .epsilon = 1e-3f, .weight_decay = 0.1f}},
        };
        for (const Case& c : cases) {
            INFO(c.name);
            Reference reference{{start.begin(), start.end()},
                                std::vector<double>(start.size()),
                                std::vector<double>(start.size())};
            const Guarded dev_p = bench.vector(start);
            const Guarded dev_m = bench.vector(Floats(start.size())),
                          dev_v = bench.vector(Floats(start.size()));
            UpdateArgs args = c.args;
            args.scalars = scalars.get();
            args.states[0] = c.args.formula == rmsprop ? dev_v.get() : dev_m.get();
            args.states[1] = dev_v.get();
            const double lr{c.rate}, b1{args.beta1}, b2{args.beta2};
            const int steps = 4;
            for (int step = 1; step <= steps; ++step) {
                const Floats g = random_floats(elems, 100 + static_cast<std::uint32_t>(step));
                const Guarded dev_g = bench.vector(g);
                const StepScalars now = {
                    .learning_rate = c.rate,
                    .adam_step_size = static_cast<float>(lr / (1 - std::pow(b1, step))),
                    .adam_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(b2, step))),
                    .shrink = static_cast<float>(1 - lr * double{c.decoupled_decay})};
                bench.backend.upload(scalars.get(), &now, sizeof now);
                bench.backend.update(args, elems, dev_p.get(), dev_g.get());
                reference.update(c, g, step);
            }
            const Floats found = dev_p.download();
            double worst = 0.0;
            for (std::size_t i = 0; i < start.size(); ++i) {
                const double error = std::abs(double{found[i]} - reference.p[i]);
                worst = error <= worst ? worst : error;
            }
            // Values of order 1 to 2, with a few roundings per step; tiny moments in Adam have a
            // less exact ratio, which lr = 0.01 scales down.
            CHECK(worst <= steps * 16 * 0x1p-24);
        }
    });
}
