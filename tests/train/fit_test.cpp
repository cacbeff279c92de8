// fit() without the command line: what observers see, when a training ends, and that it resumes.
#include "train/fit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/temp_dir.hpp"
#include "tests/support/thread_ranks.hpp"
#include "train/checkpoint_files.hpp"
#include "train/sync_check.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

constexpr int kClasses = 3, kSteps = 5, kBatch = 8;
const char* const kModel = "conv 3 k3\nrelu\nlinear classes\n";

RunSpec small_run(int epochs) {
    RunSpec run;
    run.batch.global_batch = kBatch;
    run.stop.epochs = epochs;
    run.optimizer.momentum = 0.9f;
    return run;
}

// Writes down what it is told.
struct Recorder final : FitObserver {
    void on_start(const Training& training) override {
        calls.push_back(fmt::format("start at {}", training.steps()));
    }
    void on_launch(const Training&, std::int64_t number) override {
        calls.push_back(fmt::format("launch {}", number));
    }
    void on_step(const Training& training, const StepResult& done) override {
        calls.push_back(fmt::format("step {}.{}", training.cursor.epoch, done.step));
        losses.push_back(done.loss);
        mean_loss = training.mean_loss();
    }
    bool pauses_after(std::int64_t steps) override {
        return std::count(pauses.begin(), pauses.end(), steps) > 0;
    }
    void on_pause(const Training& training) override {
        calls.push_back(fmt::format("pause at {}", training.steps()));
    }
    void on_epoch(const Training& training, const EpochFacts& epoch) override {
        calls.push_back(fmt::format("epoch {}{}", epoch.epoch, epoch.stopped ? " stopped" : ""));
        epochs.push_back(epoch);
        cursors.push_back(training.cursor);
    }
    void on_end(const Training&, Ending) override { calls.push_back("end"); }

    std::vector<std::int64_t> pauses;
    std::vector<std::string> calls;
    std::vector<double> losses;
    double mean_loss = 0.0;
    std::vector<EpochFacts> epochs;
    std::vector<Cursor> cursors;
};

// One rank's training of 5 steps an epoch.
struct Fixture {
    explicit Fixture(const RunSpec& run_, Communicator* of_ranks = nullptr)
        : run(run_),
          own(of_ranks == nullptr ? make_single_communicator() : nullptr),
          comm(of_ranks == nullptr ? *own : *of_ranks),
          test(*backend, random_images(20, {1, 6, 6}, kClasses), {{0.5f}, {0.3f}}),
          session(comm, *backend, run,
                  {.model = parse_model(kModel, "small"), .classes = kClasses, .eval_images = {20}},
                  random_images(kSteps * kBatch - 3, {1, 6, 6}, kClasses), {{0.5f}, {0.3f}}) {
        session.initialise();
    }
    Ending fit(std::vector<FitObserver*> others = {}) {
        others.push_back(&seen);
        return train::fit(training, others);
    }

    const RunSpec run;
    const std::unique_ptr<Communicator> own;
    Communicator& comm;
    const std::unique_ptr<Backend> backend = make_cpu_backend(1);
    const DeviceImages test;
    Session session;
    Training training{.session = session, .run = run, .evaluated = {"test", &test}};
    Recorder seen;
};

}  // namespace

TEST_CASE("observers are called in their order, and in the reverse one at the end", "[fit]") {
    struct Named final : FitObserver {
        Named(std::string name_, std::string& calls_) : name(std::move(name_)), calls(calls_) {}
        void on_start(const Training&) override { calls += name; }
        void on_epoch(const Training&, const EpochFacts&) override { calls += name; }
        void on_end(const Training&, Ending) override { calls += name; }
        std::string name;
        std::string& calls;
    };
    std::string calls;
    struct Passes final : FitObserver {
        void on_evaluation(const Training& training, const EvaluatedSet& set, std::int64_t done,
                           std::int64_t images) override {
            CHECK(set.images == training.evaluated.images);
            CHECK(images == 20);
            seen.push_back(done);
        }
        std::vector<std::int64_t> seen;
    } passes;
    Fixture(small_run(1)).fit({&passes});
    REQUIRE(!passes.seen.empty());
    CHECK(std::is_sorted(passes.seen.begin(), passes.seen.end()));
    CHECK(passes.seen.back() == 20);
    Named first("a", calls), second("b", calls);
    Fixture(small_run(1)).fit({&first, &second});
    CHECK(calls == "ababba");
}

TEST_CASE("observers are told of all that happens, in order", "[fit]") {
    Fixture fixture(small_run(2));
    fixture.seen.pauses = {3, 10};
    CHECK(fixture.fit() == Ending::complete);
    std::vector<std::string> expected = {"start at 0"};
    for (int epoch = 1; epoch <= 2; ++epoch) {
        for (int step = 0; step < kSteps; ++step) {
            const int number = (epoch - 1) * kSteps + step + 1;
            expected.push_back(fmt::format("launch {}", number));
            expected.push_back(fmt::format("step {}.{}", epoch, step));
            if (number == 3 || number == 10) {
                expected.push_back(fmt::format("pause at {}", number));
            }
        }
        expected.push_back(fmt::format("epoch {}", epoch));
    }
    expected.emplace_back("end");
    CHECK(fixture.seen.calls == expected);
}

TEST_CASE("an epoch's facts are those of its steps", "[fit]") {
    Fixture fixture(small_run(3));
    fixture.fit();
    const Recorder& seen = fixture.seen;
    REQUIRE(seen.epochs.size() == 3);
    double best = -1.0;
    int best_epoch = 0;
    for (std::size_t i = 0; i < 3; ++i) {
        const EpochFacts& epoch = seen.epochs[i];
        double sum = 0.0;
        for (std::size_t step = 0; step < kSteps; ++step) {
            sum += seen.losses[i * kSteps + step] * (step + 1 == kSteps ? kBatch - 3 : kBatch);
        }
        CHECK(epoch.train_loss == Approx(sum / (kSteps * kBatch - 3)).epsilon(1e-12));
        CHECK(epoch.images == kSteps * kBatch - 3);
        CHECK(epoch.evaluation.images == 20);
        CHECK(epoch.best == (epoch.evaluation.accuracy > best));
        best_epoch = epoch.best ? epoch.epoch : best_epoch;
        best = std::max(best, epoch.evaluation.accuracy);
        CHECK(seen.cursors[i].epoch == static_cast<int>(i) + 2);
        CHECK(seen.cursors[i].step == 0);
        CHECK(seen.cursors[i].images == 0);
        CHECK(seen.cursors[i].best_accuracy == best);
        CHECK(seen.cursors[i].best_epoch == best_epoch);
    }
    CHECK(seen.mean_loss == seen.epochs[2].train_loss);

    RunSpec without = small_run(2);
    without.evaluation.enabled = false;
    Fixture blind(without);
    blind.fit();
    for (const EpochFacts& epoch : blind.seen.epochs) {
        CHECK(epoch.best);
        CHECK(epoch.evaluation.images == 0);
    }
    CHECK(blind.training.cursor.best_accuracy < 0.0);
}

TEST_CASE("a training ends at its target, at its time, and when it diverges", "[fit]") {
    RunSpec target = small_run(50);
    target.stop.target_accuracy = 0.0;
    Fixture reached(target);
    CHECK(reached.fit() == Ending::target);
    CHECK(reached.seen.epochs.size() == 1);

    RunSpec patient = small_run(50);
    patient.optimizer.learning_rate = 0.0f;  // so no epoch is better than the first
    patient.stop.patience = 3;
    Fixture over(patient);
    CHECK(over.fit() == Ending::patience);
    CHECK(over.seen.epochs.size() == 4);
    CHECK(over.training.cursor.best_epoch == 1);
    patient.evaluation.enabled = false;
    patient.stop.epochs = 6;
    CHECK(Fixture(patient).fit() == Ending::complete);

    RunSpec time = small_run(50);
    time.stop.max_seconds = 0.0;
    Fixture late(time);
    CHECK(late.fit() == Ending::time);
    CHECK(late.seen.losses.size() == 1);
    CHECK(late.seen.epochs.at(0).stopped);
    CHECK(late.training.cursor.step == 1);

    RunSpec wild = small_run(1);
    wild.optimizer.learning_rate = 1e30f;
    expect_error(ExitCode::diverged, {"NaN or infinite in epoch 1", "`lr`"},
                 [&] { Fixture(wild).fit(); });
}

TEST_CASE("a training that was stopped resumes from its checkpoint, to the last bit", "[fit]") {
    for (const int stop_after : {1, 2}) {
        const TempDir dir;
        RunSpec run = small_run(3);
        Fixture whole(run);
        whole.fit();
        run.checkpoints.save = dir.path() / "run";
        run.checkpoints.every = {.count = 1};
        const WeightFacts facts{.model = parse_model(kModel, "small"),
                                .normalisation = {{0.5f}, {0.3f}},
                                .classes = kClasses};
        const Identity identity = {{{"lr", "0.5"}}, {{"model", "its hash"}}};
        RunSpec first_run = run;
        first_run.stop.epochs = stop_after;
        Fixture first(first_run);
        CheckpointFiles written(first.run, facts, identity, true);
        first.fit({&written});

        run.checkpoints.resume = run.checkpoints.save;
        Fixture second(run);
        CheckpointFiles files(second.run, facts, identity, true);
        second.training.cursor = files.resume(second.session);
        CHECK(second.training.cursor.epoch == stop_after + 1);
        second.training.resumed = true;
        CHECK(second.fit({&files}) == Ending::complete);
        CHECK(second.seen.calls.front() == fmt::format("start at {}", stop_after * kSteps));
        std::vector<double> losses = first.seen.losses;
        losses.insert(losses.end(), second.seen.losses.begin(), second.seen.losses.end());
        CHECK(losses == whole.seen.losses);
    }
}

TEST_CASE("checkpoints are saved by the clock of the rank that writes", "[fit]") {
    const TempDir dir;
    const WeightFacts facts{.model = parse_model(kModel, "small"),
                            .normalisation = {{0.5f}, {0.3f}},
                            .classes = kClasses};
    const Identity identity = {{{"lr", "0.5"}}, {{"model", "its hash"}}};
    const auto saved = [&](std::int64_t seconds) {
        RunSpec run = small_run(2);
        run.checkpoints.save = dir.path() / std::to_string(seconds);
        run.checkpoints.every = {seconds, SaveEvery::Unit::seconds};
        run.checkpoints.keep = 99;
        Fixture fixture(run);
        CheckpointFiles files(fixture.run, facts, identity, true);
        fixture.fit({&files});
        std::set<std::string> names;
        for (const auto& file : std::filesystem::directory_iterator(run.checkpoints.save)) {
            if (file.path().stem().string().starts_with("step-")) {
                names.insert(file.path().stem().string());
            }
        }
        return names;
    };
    CHECK(saved(0).size() == 2 * kSteps);  // each step
    CHECK(saved(9999) == std::set{fmt::format("step-{:09}", 2 * kSteps)});
}

TEST_CASE("a set that is held back is evaluated once, with the best epoch's weights", "[fit]") {
    // Evaluates the set with the weights of each epoch.
    struct Judge : FitObserver {
        explicit Judge(const DeviceImages& set) : images(set) {}
        void on_epoch(const Training& training, const EpochFacts& epoch) override {
            last = training.session.evaluate(images);
            best = epoch.best ? last : best;
        }
        const DeviceImages& images;
        Evaluation best, last;
    };
    // One image with each label: whatever the net says, a third is right, so the first epoch is
    // the best.
    const auto tied = [] {
        ImageSet set = random_images(kClasses, {1, 6, 6}, kClasses);
        for (std::size_t i = 0; i < set.labels.size(); ++i) {
            set.labels[i] = static_cast<std::int32_t>(i);
            std::copy_n(set.pixels.begin(), 36, set.pixels.writable() + 36 * i);
        }
        return set;
    };
    const TempDir dir;
    RunSpec run = small_run(3);
    run.checkpoints.save = dir.path() / "run";
    const Normalisation normalisation = {{0.5f}, {0.3f}};
    const WeightFacts facts{
        .model = parse_model(kModel, "small"), .normalisation = normalisation, .classes = kClasses};
    const Identity identity = {{{"lr", "0.5"}}, {{"model", "its hash"}}};
    Evaluation of_first;
    for (const bool resumed : {false, true}) {
        INFO(resumed);
        run.stop.epochs = resumed ? 5 : 3;
        run.checkpoints.resume = resumed ? run.checkpoints.save : "";
        Fixture fixture(run);
        Training& training = fixture.training;
        const DeviceImages val(*fixture.backend, tied(), normalisation);
        const DeviceImages unseen(*fixture.backend, random_images(17, {1, 6, 6}, kClasses),
                                  normalisation);
        training.evaluated = {"val", &val};
        training.held_back = {"test", &unseen};
        CheckpointFiles files(fixture.run, facts, identity, true);
        if (resumed) {
            training.best = files.best(fixture.session);
            training.cursor = files.resume(fixture.session);
            training.resumed = true;
            CHECK(training.cursor.epoch == 4);
        }
        Judge judge(unseen);
        CHECK(fixture.fit({&files, &judge}) == Ending::complete);
        CHECK(training.cursor.best_epoch == 1);
        of_first = resumed ? of_first : judge.best;
        CHECK(of_first.loss != judge.last.loss);
        REQUIRE(training.outcome.has_value());
        CHECK(training.outcome->images == 17);
        CHECK(training.outcome->loss == of_first.loss);
        // The net keeps the weights of the last epoch.
        CHECK(fixture.session.evaluate(unseen).loss == judge.last.loss);
    }
}

TEST_CASE("ranks are told the same, and a sync check finds one that drifts", "[fit]") {
    ThreadRanks job(2);
    std::vector<std::vector<std::string>> calls(2);
    job.run([&](Communicator& comm) {
        Fixture fixture(small_run(2), &comm);
        SyncCheck check(2);
        fixture.fit({&check});
        calls[static_cast<std::size_t>(comm.rank())] = fixture.seen.calls;
    });
    CHECK(calls[0] == calls[1]);
    CHECK(std::count(calls[0].begin(), calls[0].end(), "pause at 4") == 1);

    ThreadRanks drifting(2);
    std::vector<std::string> errors(2);
    drifting.run([&](Communicator& comm) {
        Fixture fixture(small_run(1), &comm);
        SyncCheck check(3);
        if (comm.rank() == 1) {
            fixture.session.net().parameter_data()[0] += 1.0f;
        }
        try {
            fixture.fit({&check});
        } catch (const Error& error) {
            errors[static_cast<std::size_t>(comm.rank())] = error.what();
        }
    });
    for (const std::string& error : errors) {
        CHECK(error.find("epoch 1, step 3: parameter conv1.weight differs") == 0);
    }
}
