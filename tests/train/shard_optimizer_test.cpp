// Updates that the ranks share out: what each does alone, and that together they do what every rank
// does without.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/thread_ranks.hpp"
#include "train/session.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

constexpr int kClasses = 5, kSteps = 4;

// With factors, the convolution's gradients alone are shared out.
const char* const kModel =
    "conv 24 k3\nrelu\nconv 24 k3\nrelu\nlinear 100\nrelu\ndropout 0.5\nlinear classes\n";

struct Settings {
    int shards = 0;
    OptimizerSpec optimizer = {};
    ReductionSpec reduction = {};
    Precision precision = Precision::fp32;
    bool shared = false;
    bool direct = true;  // or through the host's memory
    int accumulate = 1;
};

RunSpec run_spec(const Settings& settings) {
    RunSpec run{
        .net = {.precision = settings.precision},
        .batch = {.global_batch = 12, .accumulate = settings.accumulate, .shards = settings.shards},
        .optimizer = settings.optimizer,
        .reduction = settings.reduction};
    run.reduction.shard_optimizer = settings.shared ? ShardUse::on : ShardUse::off;
    return run;
}

// One rank's.
struct Rank {
    Rank(Communicator& comm_, const Settings& settings)
        : comm(comm_),
          backend(make_cpu_backend(1)),
          session(comm, *backend, run_spec(settings),
                  {.model = parse_model(kModel, "small"), .classes = kClasses},
                  random_images(12 * 2 * kSteps, {1, 8, 8}, kClasses), {{0.5f}, {0.3f}}) {
        session.initialise();
        session.trainer().begin_epoch(1);
    }
    void train(int begin, int end) {
        for (int step = begin; step < end; ++step) {
            const StepResult result = *session.trainer().step(step, false);
            losses.push_back(result.loss);
            not_finite.push_back(result.not_finite);
        }
    }

    Communicator& comm;
    const std::unique_ptr<Backend> backend;
    Session session;
    std::vector<double> losses;
    std::vector<std::string> not_finite;
};

// A rank's result, to the last bit.
struct Outcome {
    std::vector<double> losses;
    std::vector<std::string> not_finite;
    std::vector<HostTensor> weights, state;
    std::int64_t moment_elems = 0;
    std::size_t shared = 0;  // buckets
};

bool same(const std::vector<HostTensor>& a, const std::vector<HostTensor>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const HostTensor& x, const HostTensor& y) {
                          return x.name == y.name && x.shape == y.shape && x.values == y.values;
                      });
}
bool same(const Outcome& a, const Outcome& b) {
    return a.losses == b.losses && a.not_finite == b.not_finite && same(a.weights, b.weights) &&
           same(a.state, b.state);
}

Outcome outcome_of(Rank& rank) {
    const auto& buckets = rank.session.reducer().buckets();
    return {rank.losses,
            rank.not_finite,
            rank.session.net().export_parameters(),
            rank.session.optimizer().export_state(),
            rank.session.optimizer().moment_elems(),
            static_cast<std::size_t>(std::count_if(buckets.begin(), buckets.end(),
                                                   [](const Bucket& b) { return b.shared(); }))};
}

using Sum = ThreadRanks::Sum;

// Every rank's outcome.
std::vector<Outcome> run(int ranks, const Settings& settings,
                         const std::function<void(Rank&)>& training,
                         const std::function<void(const Sum&)>& arrived = {}) {
    std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
    ThreadRanks job(ranks);
    job.arrived = arrived;
    job.direct = settings.direct;
    job.run([&](Communicator& comm) {
        Rank rank(comm, settings);
        training(rank);
        outcomes[static_cast<std::size_t>(comm.rank())] = outcome_of(rank);
    });
    return outcomes;
}
std::vector<Outcome> trained(int ranks, Settings settings, bool shared) {
    settings.shared = shared;
    return run(ranks, settings, [](Rank& rank) { rank.train(0, kSteps); });
}

// Steps of a scaled loss.
float skipped(const Outcome& outcome) {
    const auto found = std::ranges::find(outcome.state, "scaler.skipped", &HostTensor::name);
    REQUIRE(found != outcome.state.end());
    return found->values.at(0);
}

const std::vector<Settings> kSettings = {
    {.optimizer = {.rule = UpdateRule::adam}},
    {.optimizer = {.rule = UpdateRule::adamw, .weight_decay = 0.1f},
     .reduction = {.bucket_bytes = 70'000}},
    {.optimizer = {.momentum = 0.9f, .nesterov = true}, .accumulate = 2},
    {.optimizer = {.momentum = 0.0f}, .reduction = {.factors = FactorUse::on}},
    {.optimizer = {.rule = UpdateRule::adam}, .reduction = {.type = DataType::bfloat16}},
    // The scale is too high at first, so that updates are skipped.
    {.optimizer = {.rule = UpdateRule::adam, .loss_scaling = LossScaling{.init_scale = 0x1p22f}},
     .precision = Precision::fp16},
};

}  // namespace

TEST_CASE("buckets are shared out in equal parts, and every element is updated") {
    const std::vector<Bucket> planned =
        plan_buckets({0, 272, 5312, 21376}, 21920, 16 << 10, 21904, {{272, 5312}});
    for (const int ranks : {2, 3, 4, 7}) {
        const std::vector<Bucket> buckets = share_out(planned, ranks, 4096);
        std::vector<int> covered(21920), updated(21920);
        for (const Bucket& bucket : buckets) {
            std::for_each(covered.begin() + bucket.begin, covered.begin() + bucket.end,
                          [](int& n) { ++n; });
            CHECK(bucket.begin % 16 == 0);
            CHECK(bucket.share_elems % 16 == 0);
            if (bucket.shared()) {
                CHECK(bucket.elems() == ranks * bucket.share_elems);
                CHECK(bucket.share(ranks - 1).end == bucket.end);
            }
            if (bucket.route == Route::factors) {  // every rank computes all of it
                CHECK(bucket.begin == 272);
                CHECK(bucket.end == 5312);
                CHECK(!bucket.shared());
            } else {
                CHECK((bucket.end <= 272 || bucket.begin >= 5312));
            }
        }
        CHECK(std::count_if(buckets.begin(), buckets.end(),
                            [](const Bucket& b) { return b.shared(); }) >= 2);
        CHECK(buckets.front().begin == 21904);
        CHECK(!buckets.front().shared());
        for (int rank = 0; rank < ranks; ++rank) {
            for (const Bucket& range : updated_by(rank, buckets, 21920)) {
                std::for_each(updated.begin() + range.begin, updated.begin() + range.end,
                              [](int& n) { ++n; });
            }
        }
        bool once = true;
        for (const Bucket& bucket : buckets) {
            for (std::int64_t i = bucket.begin; i < bucket.end; ++i) {
                const auto at = static_cast<std::size_t>(i);
                once = once && covered[at] == 1 && updated[at] == (bucket.shared() ? 1 : ranks);
            }
        }
        CHECK(once);
        CHECK(updated[272] == ranks);
    }
    CHECK(updated_by(1, {}, 100).size() == 1);
}

TEST_CASE("shared updates give the bits of every rank's own, for each rule") {
    for (const Settings& settings : kSettings) {
        for (const int ranks : {2, 3, 4}) {
            INFO("settings " << &settings - kSettings.data() << ", " << ranks << " ranks");
            const std::vector<Outcome> plain = trained(ranks, settings, false);
            const std::vector<Outcome> shared = trained(ranks, settings, true);
            for (const Outcome& outcome : shared) {
                CHECK(outcome.shared > 0);
                CHECK(same(outcome, plain.front()));
            }
        }
    }
}

TEST_CASE("gradients that travel through the host's memory give the same bits by every way") {
    for (const Settings& settings : kSettings) {
        for (const bool shared : {false, true}) {
            INFO("settings " << &settings - kSettings.data() << (shared ? ", shared" : ""));
            Settings staged = settings;
            staged.direct = false;
            const std::vector<Outcome> direct = trained(3, settings, shared);
            for (const Outcome& outcome : trained(3, staged, shared)) {
                CHECK((outcome.shared > 0) == shared);
                CHECK(same(outcome, direct.front()));
            }
        }
    }
}

TEST_CASE("shared updates of shards give the same bits on any number of ranks") {
    for (const Settings& settings : kSettings) {
        if (settings.accumulate > 1 || settings.reduction.factors == FactorUse::on ||
            settings.reduction.type != DataType::float32) {
            continue;
        }
        Settings by_shards = settings;
        by_shards.shards = 4;
        const std::vector<Outcome> one = trained(1, by_shards, false);
        for (const int ranks : {2, 3, 4}) {
            for (const bool direct : {true, false}) {
                by_shards.direct = direct;
                for (const Outcome& outcome : trained(ranks, by_shards, true)) {
                    CHECK(outcome.shared > 0);
                    CHECK(same(outcome, one.front()));
                }
            }
        }
    }
}

TEST_CASE("shared updates skip what every rank would skip") {
    const Settings& scaled = kSettings.back();
    for (const Outcome& outcome : trained(3, scaled, true)) {
        CHECK(skipped(outcome) >= 1.0f);
    }
}

// The norm is summed in double precision, in another order where shares are: the factor that scales
// the gradients differs by its last bit at most.
TEST_CASE("shared updates clip to the norm of all gradients") {
    constexpr float kNorm = 0.01f, kRate = 1.0f;
    Settings settings{.optimizer = {.learning_rate = kRate, .momentum = 0.0f}};
    const auto weights = [&](int ranks, const Settings& of, bool shared) {
        Settings all = of;
        all.shared = shared;
        const std::vector<Outcome> outcomes = run(ranks, all, [](Rank& rank) { rank.train(0, 1); });
        for (const Outcome& outcome : outcomes) {
            CHECK((outcome.shared > 0) == shared);
            CHECK(same(outcome, outcomes.front()));
        }
        return outcomes.front().weights;
    };
    std::vector<HostTensor> before;
    run(2, settings, [&](Rank& rank) {
        if (rank.comm.is_root()) {
            before = rank.session.net().export_parameters();
        }
    });
    for (const int ranks : {2, 3, 4}) {
        for (const FactorUse factors : {FactorUse::off, FactorUse::on}) {
            INFO(ranks << " ranks");
            settings.reduction.factors = factors;
            settings.optimizer.max_grad_norm = kNorm;
            const auto own = weights(ranks, settings, false);
            const auto shared = weights(ranks, settings, true);
            double squares = 0.0, worst = 0.0;
            for (std::size_t i = 0; i < own.size(); ++i) {
                for (std::size_t k = 0; k < own[i].values.size(); ++k) {
                    const double from = double{before.at(i).values.at(k)};
                    const double step = double{own[i].values[k]} - from;
                    const double apart =
                        double{own[i].values[k]} - double{shared.at(i).values.at(k)};
                    squares +=
                        (double{shared[i].values[k]} - from) * (double{shared[i].values[k]} - from);
                    worst = std::max(worst, std::abs(apart) / (std::abs(from) + std::abs(step)));
                }
            }
            CHECK(worst <= 4 * 0x1p-24);  // the factor's last bit, and two roundings of a weight
            // The step is as long as the norm, but for the roundings of the weights.
            CHECK(std::sqrt(squares) == Approx(double{kRate * kNorm}).epsilon(0.001));
        }
    }
    // Over several steps all ranks go the same way, clipped or not, scaled or not.
    for (const Precision precision : {Precision::fp32, Precision::fp16}) {
        settings = {.optimizer = {.momentum = 0.9f, .max_grad_norm = kNorm},
                    .precision = precision,
                    .accumulate = 2};
        const std::vector<Outcome> outcomes = trained(3, settings, true);
        for (const Outcome& outcome : outcomes) {
            CHECK(same(outcome, outcomes.front()));
            CHECK(std::count(outcome.not_finite.begin(), outcome.not_finite.end(), "") == kSteps);
        }
    }
}

TEST_CASE("a rank has moments of what it updates alone") {
    const Settings settings{.optimizer = {.rule = UpdateRule::adam}};
    const std::int64_t all = trained(2, settings, false).front().moment_elems;
    std::int64_t sum = 0;
    for (const Outcome& outcome : trained(4, settings, true)) {
        CHECK(outcome.moment_elems < all / 3);
        sum += outcome.moment_elems;
    }
    CHECK(sum >= all);
    CHECK(trained(1, settings, true).front().moment_elems == all);  // nobody to share with
}

TEST_CASE("a shared training goes on from the state of another number of ranks, and back") {
    const Settings plain{.optimizer = {.rule = UpdateRule::adam}};
    Settings shared = plain;
    shared.shared = true;
    // Sums of another number of ranks differ in their last bits, so that a step is done by 3 ranks
    // with and without sharing.
    std::vector<HostTensor> weights, state;
    {
        const std::vector<Outcome> first =
            run(2, shared, [](Rank& rank) { rank.train(0, kSteps); });
        weights = first.front().weights;
        state = first.front().state;
    }
    const auto go_on = [&](Rank& rank) {
        rank.session.net().import_parameters(weights, "");
        rank.session.optimizer().import_state(state, "");
        rank.train(kSteps, 2 * kSteps);
    };
    const std::vector<Outcome> with = run(3, shared, go_on), without = run(3, plain, go_on);
    CHECK(same(with.back(), without.front()));
    CHECK(with.front().state.front().values == std::vector<float>{2.0f * kSteps});
    const std::vector<Outcome> anew =
        run(3, shared, [&](Rank& rank) {  // without the state it goes another way
            rank.session.net().import_parameters(weights, "");
            rank.train(kSteps, 2 * kSteps);
        });
    CHECK(!same(anew.front().weights, with.front().weights));
}

TEST_CASE("a gradient that is not finite in one rank's share is known to all in the same step") {
    Settings settings{.optimizer = {.rule = UpdateRule::adam}};
    settings.shared = true;
    for (const int spoilt : {0, 1, 2, 3, 4, 5, 6, 7, 8}) {
        // As gradients arrive, when their norm is taken, and when they are unscaled.
        const bool clipped = spoilt / 3 == 1, scaled = spoilt / 3 == 2;
        settings.optimizer.max_grad_norm = clipped ? std::optional(1.0f) : std::nullopt;
        settings.optimizer.loss_scaling =
            scaled ? std::optional(LossScaling{.init_scale = 1.0f}) : std::nullopt;
        settings.precision = scaled ? Precision::fp16 : Precision::fp32;
        // In the last step one rank alone sees a NaN, in its row of the largest sum.
        std::mutex mutex;
        std::int64_t largest = 0;
        bool armed = false;
        const auto training = [&](Rank& rank) {
            rank.train(0, kSteps);
            rank.comm.barrier();
            if (rank.comm.is_root()) {
                const std::lock_guard lock(mutex);
                armed = true;
            }
            rank.comm.barrier();
            rank.train(kSteps, kSteps + 1);
        };
        const auto spoil = [&](const Sum& sum) {
            const std::lock_guard lock(mutex);
            if (!armed) {
                largest = std::max(largest, sum.elems);
            } else if (sum.rank == spoilt % 3 && sum.elems == largest) {
                static_cast<float*>(sum.data)[sum.elems / 3 * (spoilt % 3)] =
                    std::numeric_limits<float>::quiet_NaN();
            }
        };
        INFO("rank " << spoilt % 3 << (clipped ? ", clipped" : scaled ? ", scaled" : ""));
        const std::vector<Outcome> outcomes = run(3, settings, training, spoil);
        for (const Outcome& outcome : outcomes) {
            CHECK(outcome.shared > 0);
            REQUIRE(outcome.not_finite.size() == kSteps + 1);
            CHECK(outcome.not_finite == outcomes.front().not_finite);
            const auto finite =
                std::count(outcome.not_finite.begin(), outcome.not_finite.end(), "");
            if (scaled) {
                CHECK(finite == kSteps + 1);
                CHECK(skipped(outcome) == 1.0f);
                CHECK(same(outcome.weights, outcomes.front().weights));
                continue;
            }
            CHECK(finite == kSteps);
            CHECK(outcome.not_finite.back().starts_with("fc"));
        }
    }
}

TEST_CASE("a single rank shares no updates") {
    CHECK(trained(1, kSettings.front(), true).front().shared == 0);
}
