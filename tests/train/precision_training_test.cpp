// Trainings in 16 bits, and the scaled loss.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>

#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/thread_ranks.hpp"
#include "train/session.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

constexpr int kClasses = 5, kSteps = 8;

struct Settings {
    const char* model =
        "conv 8 k3 p1\nas a\nconv 8 k3 p1\nadd a\nbatchnorm\nrelu\nmaxpool 2\nlinear 20\nrelu\n"
        "dropout 0.5\nlinear classes\n";
    Precision precision = Precision::fp16;
    OptimizerSpec optimizer = {};
    ReductionSpec reduction = {};
    bool emulated = false;
    int accumulate = 1;
};

// A training as a rank sees it.
struct Seen {
    std::vector<double> losses, scales;
    std::vector<bool> skips;
    std::vector<std::string> not_finite;
    std::vector<std::vector<HostTensor>> states, weights;  // after each step
};

bool same(const std::vector<HostTensor>& a, const std::vector<HostTensor>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const HostTensor& x, const HostTensor& y) {
                          return x.name == y.name && x.shape == y.shape && x.values == y.values;
                      });
}

Seen train_rank(Communicator& comm, const Settings& settings) {
    GpuOptions options;
    options.tf32 = true;  // as in every training in 16 bits
    const auto backend = settings.emulated ? make_emulated_backend(options) : make_cpu_backend(1);
    Session session(
        comm, *backend,
        {.net = {.precision = settings.precision},
         .batch = {.global_batch = 24, .accumulate = settings.accumulate},
         .optimizer = settings.optimizer,
         .reduction = settings.reduction,
         .evaluation = {.batch_size = 30}},
        {.model = parse_model(settings.model, "small"), .classes = kClasses, .eval_images = {30}},
        random_images(24 * kSteps, {1, 8, 8}, kClasses), {{0.5f}, {0.3f}});
    session.initialise();
    session.trainer().begin_epoch(1);
    Seen seen;
    const auto account = [&](const StepResult& done) {
        seen.losses.push_back(done.loss);
        seen.scales.push_back(done.loss_scale);
        seen.skips.push_back(done.skipped);
        seen.not_finite.push_back(done.not_finite);
    };
    for (int step = 0; step < kSteps; ++step) {
        if (const auto done = session.trainer().step(step, false)) {
            account(*done);
        }
        seen.states.push_back(session.optimizer().export_state());
        seen.weights.push_back(session.net().export_parameters());
    }
    while (const auto done = session.trainer().next_result()) {
        account(*done);
    }
    const DeviceImages test(*backend, random_images(30, {1, 8, 8}, kClasses), {{0.5f}, {0.3f}});
    if (!std::isfinite(session.evaluate(test).loss)) {  // Catch2's macros are not for threads
        throw std::runtime_error("an evaluation's loss is not finite");
    }
    return seen;
}

std::vector<Seen> train_ranks(int ranks, const Settings& settings,
                              const std::function<void(const ThreadRanks::Sum&)>& arrived = {}) {
    std::vector<Seen> all(static_cast<std::size_t>(ranks));
    ThreadRanks job(ranks);
    job.arrived = arrived;
    job.run([&](Communicator& comm) {
        all[static_cast<std::size_t>(comm.rank())] = train_rank(comm, settings);
    });
    return all;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE(a.size() == b.size());
    double worst = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        worst = std::max(worst, std::abs(a[i] - b[i]));
    }
    return worst;
}

const Settings kAdam{.optimizer = {.rule = UpdateRule::adam, .loss_scaling = LossScaling{}}};

// The first loss's gradient does not fit float16 at this scale, and that is found by halving.
Settings too_large(const Settings& settings) {
    Settings large = settings;
    large.optimizer.loss_scaling->init_scale = 0x1p24f;
    return large;
}

}  // namespace

TEST_CASE("an overflow makes all ranks skip the same steps, and halves the scale") {
    for (const bool clips : {false, true}) {
        Settings settings = too_large(kAdam);
        settings.reduction.bucket_bytes = 1024;
        if (clips) {
            settings.optimizer.max_grad_norm = 1.0f;
        }
        for (const int ranks : {1, 2, 3}) {
            INFO(ranks << " ranks, clips " << clips);
            const std::vector<Seen> all = train_ranks(ranks, settings);
            const Seen& first = all.front();
            const auto skips = std::count(first.skips.begin(), first.skips.end(), true);
            CHECK(skips >= 1);
            CHECK(skips < kSteps - 1);
            double scale = 0x1p24;
            for (std::size_t step = 0; step < kSteps; ++step) {
                INFO("step " << step);
                scale *= first.skips[step] ? 0.5 : 1.0;
                CHECK(first.scales[step] == scale);
                CHECK(first.not_finite[step].empty());
                if (step > 0) {
                    const auto& state = first.states[step];
                    const auto& before = first.states[step - 1];
                    REQUIRE(state[2].name == "scaler.scale");
                    CHECK(double{state[2].values[0]} == scale);
                    // Beyond the two of `step` and the scaler's three all are moments.
                    const bool kept =
                        same({state.begin() + 5, state.end()}, {before.begin() + 5, before.end()});
                    CHECK(kept == first.skips[step]);
                    CHECK((first.weights[step][0].values == first.weights[step - 1][0].values) ==
                          first.skips[step]);
                }
            }
            for (const Seen& other : all) {
                CHECK(other.losses == first.losses);
                CHECK(other.skips == first.skips);
                CHECK(other.scales == first.scales);
                CHECK(same(other.weights.back(), first.weights.back()));
            }
        }
    }
}

TEST_CASE("an overflow on the way is skipped on all ranks, and growth follows") {
    Settings settings = kAdam;
    settings.optimizer.loss_scaling->growth_interval = 3;
    constexpr std::int64_t kSpoiled = 4;  // the step, of one reduction each
    settings.reduction.bucket_bytes = 1 << 20;
    const auto spoil = [](const ThreadRanks::Sum& sum) {
        if (sum.number == kSpoiled && sum.type == DataType::float32) {
            static_cast<float*>(sum.data)[3] = std::numeric_limits<float>::infinity();
        }
    };
    // Without batch normalisation, whose statistics are reduced as well.
    settings.model = "conv 8 k3 p1\nrelu\nlinear classes\n";
    const std::vector<Seen> all = train_ranks(2, settings, spoil);
    for (const Seen& seen : all) {
        CHECK(seen.skips ==
              std::vector<bool>{false, false, false, false, true, false, false, false});
        CHECK(seen.scales ==
              std::vector<double>{0x1p16, 0x1p16, 0x1p17, 0x1p17, 0x1p16, 0x1p16, 0x1p16, 0x1p17});
        CHECK(seen.losses == all.front().losses);
    }
}

TEST_CASE("gradients that stay infinite end a training in float16 when the scale is spent") {
    Settings settings = kAdam;
    settings.optimizer.loss_scaling->init_scale = 0x1p-12f;
    settings.model = "conv 8 k3 p1\nrelu\nlinear classes\n";
    const auto all = train_ranks(2, settings, [](const ThreadRanks::Sum& sum) {
        static_cast<float*>(sum.data)[3] = std::numeric_limits<float>::infinity();
    });
    for (const Seen& seen : all) {
        CHECK(seen.not_finite[0].empty());
        CHECK(seen.not_finite[1].empty());
        CHECK(seen.not_finite[2] == "conv1.weight");  // at 2^-15
    }
}

TEST_CASE("scale and growth go with the optimiser's state") {
    const auto comm = make_single_communicator();
    const std::vector<HostTensor> state = train_rank(*comm, too_large(kAdam)).states.back();
    const auto backend = make_cpu_backend(1);
    Net net(*backend, parse_model(kAdam.model, "small"), {1, 8, 8}, kClasses,
            {.spec = {.precision = Precision::fp16}});
    Optimizer next(*backend, net, kAdam.optimizer);
    next.import_state(state, "here");
    CHECK(same(next.export_state(), state));
    Optimizer other(*backend, net, {.rule = UpdateRule::adam});
    expect_error(ExitCode::bad_input, {"scaler."}, [&] { other.import_state(state, "here"); });
}

TEST_CASE("trainings in 16 bits follow float32, on every kind of device and number of ranks") {
    const auto comm = make_single_communicator();
    for (const Precision precision : {Precision::bf16, Precision::fp16}) {
        Settings settings;
        // Without a choice that rounding flips, but with every way that gradients meet.
        settings.model =
            "conv 8 k3 p1\nas a\nconv 8 k3 p1\nadd a\nbatchnorm\navgpool 2\nlinear 20\n"
            "dropout 0.5\nlinear classes\n";
        settings.precision = precision;
        if (precision == Precision::fp16) {
            settings.optimizer.loss_scaling.emplace();
        }
        Settings wide = settings;
        wide.precision = Precision::fp32;
        wide.optimizer.loss_scaling.reset();
        const std::vector<double> expected = train_rank(*comm, wide).losses;
        const std::vector<double> alone = train_rank(*comm, settings).losses;
        // Measured: at most 0.17 units.
        const double unit = precision == Precision::bf16 ? 0x1p-8 : 0x1p-11;
        const auto near = [&](const std::vector<double>& losses, const std::vector<double>& to) {
            const double worst = largest_difference(losses, to);
            INFO(name_of(type_of(precision))
                 << ": largest difference " << worst << " = " << worst / unit << " units");
            CHECK(worst <= unit);
            return worst;
        };
        CHECK(near(alone, expected) > 0.0);  // it is another arithmetic
        for (const int ranks : {2, 3}) {
            near(train_ranks(ranks, settings).front().losses, alone);
        }
        settings.accumulate = wide.accumulate = 2;  // with statistics of each part
        near(train_ranks(2, settings).front().losses, train_ranks(2, wide).front().losses);
        settings.accumulate = 1;
        settings.reduction.type = DataType::bfloat16;
        near(train_ranks(2, settings).front().losses, alone);
        settings.reduction = {.factors = FactorUse::on};
        near(train_ranks(2, settings).front().losses, alone);
        settings.reduction = {};
        settings.emulated = true;
        near(train_rank(*comm, settings).losses, alone);
    }
}

TEST_CASE("a scaled loss's gradients are clipped as float32's, after the scale is taken off") {
    const auto comm = make_single_communicator();
    for (const bool emulated : {false, true}) {
        Settings settings;
        settings.model = "conv 8 k3 p1\navgpool 2\nlinear 20\nlinear classes\n";
        settings.emulated = emulated;
        settings.optimizer = {.learning_rate = 0.5f, .max_grad_norm = 0.25f};
        Settings wide = settings;
        wide.precision = Precision::fp32;
        settings.optimizer.loss_scaling.emplace();
        const std::vector<double> expected = train_rank(*comm, wide).losses;
        const double apart = largest_difference(train_rank(*comm, settings).losses, expected);
        INFO("clipped in fp16 and fp32: " << apart);
        CHECK(apart <= 0x1p-11);
        for (const float norm : {0x1p-20f, 1e9f}) {  // next to no update; and no clipping
            wide.optimizer.max_grad_norm = norm;
            CHECK(largest_difference(train_rank(*comm, wide).losses, expected) > 8 * 0x1p-11);
        }
    }
}

TEST_CASE("values in 16 bits take half the arena") {
    const auto backend = make_cpu_backend(1);
    const auto arena = [&](Precision precision) {
        const Net net(*backend, load_model("wide"), {1, 28, 28}, 10,
                      {.train_batch = 64, .eval_batch = 64, .spec = {.precision = precision}});
        const std::string text = net.description();
        const std::string key = "activations and their gradients: ";
        return std::stod(text.substr(text.find(key) + key.size()));
    };
    CHECK(arena(Precision::bf16) < 0.6 * arena(Precision::fp32));  // argmax stays
}
