// A training with graphs, of one step or of several, has the results of one without, to the last
// bit.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/emulation/emulator.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "train/session.hpp"

namespace {

using namespace gyre;
using namespace gyre::train;

// Two ranks, of which the other has the same gradients. Reduces on the device, as NCCL does.
class TwinCommunicator final : public gyre::test::OneOfTwo {
 public:
    bool use_device(Device& device) override {
        device_ = &device;
        return true;
    }
    std::unique_ptr<Request> start(const Collective& c) override {
        REQUIRE(c.kind != Collective::Kind::reduce_scatter);
        const bool gathers = c.kind == Collective::Kind::all_gather;
        gatherings += gathers;
        if (fails_at >= 0 && calls++ >= fails_at) {
            throw Error(ExitCode::communication, "the twin is gone");
        }
        const auto end = device_->submit_to_copy_stream([&](void* stream) {
            simt::emulator::submit(*static_cast<simt::Stream*>(stream), [c, gathers] {
                if (gathers) {
                    auto* row = static_cast<float*>(c.data);
                    std::copy_n(row, c.count, row + c.count);
                    return;
                }
                for (std::int64_t i = 0; i < c.count; ++i) {
                    if (c.type == DataType::float32) {
                        static_cast<float*>(c.data)[i] *= 2.0f;
                    } else {  // bfloat16: the upper half of a float
                        auto& half = static_cast<std::uint16_t*>(c.data)[i];
                        const auto value = std::bit_cast<float>(std::uint32_t{half} << 16);
                        half = static_cast<std::uint16_t>(
                            std::bit_cast<std::uint32_t>(2.0f * value) >> 16);
                    }
                }
            });
        });
        return std::make_unique<OnDevice>(*this, end);
    }
    std::unique_ptr<Request> track(std::unique_ptr<Request> operation,
                                   const Label& label) override {
        tracked.push_back(label.name);
        return operation;
    }
    void allreduce_sum(std::span<double> data) override {
        if (data.size() == 2) {  // of each rank its own, as agree() has it
            data[1] = data[0];
        } else {
            for (double& value : data) {
                value *= 2.0;
            }
        }
    }

    bool host_waits = false;  // as MPI would have it
    int fails_at = -1, calls = 0, gatherings = 0;
    std::vector<std::string> tracked;

 private:
    struct OnDevice final : Request {
        OnDevice(TwinCommunicator& comm_, Device::Event end_) : comm(comm_), end(end_) {}
        void wait() override { comm.device_->synchronize(end); }
        bool wait_on_stream() override {
            if (comm.host_waits) {
                wait();
            }
            comm.device_->wait(end);
            return comm.host_waits;
        }
        TwinCommunicator& comm;
        const Device::Event end;
    };
    Device* device_ = nullptr;
};

struct Run {
    bool graph = false;
    int graph_steps = 1;
    bool pass = true;  // as one operation
    int ranks = 1;
    int accumulate = 1;
    DataType type = DataType::float32;   // that gradients travel in
    Precision values = Precision::fp32;  // of activations
    FactorUse factors = FactorUse::automatic;
    bool host_waits = false;
    int stop_at = -1;   // step since the start
    int fails_at = -1;  // reduction since the start
    OptimizerSpec optimizer = {};
};

struct Outcome {
    std::vector<double> losses;
    std::vector<float> rates;
    std::vector<std::int64_t> steps, images, correct;
    std::vector<bool> stops, skips;
    std::vector<std::string> not_finite;
    std::vector<float> parameters;
    std::vector<std::int64_t> submissions;  // of each step
    std::vector<std::string> tracked;
    std::int64_t reductions_before_capture = 0;  // in two steps
    int gatherings = 0;
    bool graph = false;
};

// Three epochs of 7 batches and a smaller one.
Outcome run_training(const Run& run) {
    constexpr int kBatch = 6, kEpochs = 3, kClasses = 5;
    const auto backend = make_emulated_backend({});
    TwinCommunicator twins;
    twins.host_waits = run.host_waits;
    twins.fails_at = run.fails_at;
    const auto alone = make_single_communicator();
    Communicator& comm = run.ranks == 1 ? *alone : twins;
    const std::int64_t images = 7 * kBatch * run.ranks + 3 * run.ranks;
    Session session(
        comm, *backend,
        {.seed = 9,
         .net = {.precision = run.values, .pass = run.pass},
         .batch = {.global_batch = kBatch * run.ranks, .accumulate = run.accumulate},
         .optimizer = run.optimizer,
         .reduction = {.bucket_bytes = 256, .type = run.type, .factors = run.factors},
         .device = {.graph = run.graph ? GraphUse::on : GraphUse::off,
                    .graph_steps = run.graph_steps}},
        {.model = parse_model("conv 3 k3\nrelu\ndropout2d 0.3\nmaxpool 2\nlinear 8\nrelu\n"
                              "dropout 0.5\nlinear classes\n",
                              "small"),
         .classes = kClasses,
         .eval_images = {20 * run.ranks}},
        random_images(images, {1, 8, 8}, kClasses), {{0.5f}, {0.3f}});
    session.initialise();
    Trainer& trainer = session.trainer();
    REQUIRE(session.sharding().steps() == 8);
    Outcome outcome;
    const auto account = [&](const std::optional<StepResult>& result) {
        if (result) {
            outcome.losses.push_back(result->loss);
            outcome.rates.push_back(result->learning_rate);
            outcome.steps.push_back(result->step);
            outcome.images.push_back(result->images);
            outcome.correct.push_back(result->correct);
            outcome.not_finite.push_back(result->not_finite);
            outcome.stops.push_back(result->stop);
            outcome.skips.push_back(result->skipped);
            CHECK(result->communication.buckets.size() ==
                  (run.ranks == 1 ? 0 : session.reducer().buckets().size()));
        }
        return result.has_value();
    };
    const DeviceImages test_images(*backend, random_images(20 * run.ranks, {1, 8, 8}, kClasses),
                                   {{0.5f}, {0.3f}});
    int number = 0;
    for (std::uint32_t epoch = 1; epoch <= kEpochs; ++epoch) {
        trainer.begin_epoch(epoch);
        for (std::int64_t step = 0; step < session.sharding().steps(); ++step, ++number) {
            const std::int64_t before = simt::emulator::submission_count();
            account(trainer.step(step, run.stop_at >= 0 && number >= run.stop_at));
            if (number == 1) {
                outcome.reductions_before_capture = twins.calls;
            }
            outcome.submissions.push_back(simt::emulator::submission_count() - before);
        }
        while (account(trainer.next_result())) {
        }
        // An evaluation in between uses the same memory, and more of it.
        session.evaluate(test_images);
    }
    outcome.parameters.resize(static_cast<std::size_t>(session.net().flat_elems()));
    backend->download(outcome.parameters.data(), session.net().parameter_data(),
                      outcome.parameters.size() * sizeof(float));
    outcome.tracked = twins.tracked;
    outcome.gatherings = twins.gatherings;
    outcome.graph = trainer.graphs().enabled();
    return outcome;
}

void check_same(const Outcome& a, const Outcome& b) {
    CHECK(a.losses == b.losses);
    CHECK(a.rates == b.rates);
    CHECK(a.steps == b.steps);
    CHECK(a.images == b.images);
    CHECK(a.correct == b.correct);
    CHECK(a.stops == b.stops);
    CHECK(a.skips == b.skips);
    CHECK(a.parameters == b.parameters);
}

// Text that goes to stderr meanwhile.
std::string printed(const std::function<void()>& work) {
    std::FILE* file = std::tmpfile();
    REQUIRE(file != nullptr);
    std::fflush(stderr);
    const int kept = dup(STDERR_FILENO);
    dup2(fileno(file), STDERR_FILENO);
    work();
    std::fflush(stderr);
    dup2(kept, STDERR_FILENO);
    close(kept);
    std::rewind(file);
    std::string text(4096, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
    return text;
}

}  // namespace

namespace {

std::vector<Run> different_runs() {
    std::vector<Run> runs(7);
    runs[0].optimizer.rule = UpdateRule::adam;
    runs[1].optimizer.momentum = 0.9f;
    runs[1].accumulate = 2;
    runs[2].optimizer.rule = UpdateRule::adamw;
    runs[2].optimizer.max_grad_norm = 0.1f;
    runs[2].ranks = 2;
    runs[3].optimizer.rule = UpdateRule::adam;
    runs[3].ranks = 2;
    runs[3].accumulate = 3;
    runs[4].optimizer.momentum = 0.0f;
    runs[4].ranks = 2;
    runs[4].type = DataType::bfloat16;
    runs[5].optimizer.schedule = {
        .kind = ScheduleKind::cosine, .warmup_steps = 3, .total_steps = 24};
    runs[6].optimizer.rule = UpdateRule::adamw;
    runs[6].optimizer.schedule = {.kind = ScheduleKind::one_cycle, .total_steps = 24};
    for (const Run& each : std::vector(runs)) {
        runs.push_back(each);
        runs.back().pass = false;
    }
    runs.push_back({.pass = false, .ranks = 2, .values = Precision::bf16});
    // Its first updates are skipped.
    runs.push_back({.pass = false, .ranks = 2, .values = Precision::fp16});
    runs.back().optimizer = {.rule = UpdateRule::adam,
                             .loss_scaling = LossScaling{.init_scale = 0x1p30f}};
    return runs;
}

}  // namespace

TEST_CASE("a training with graphs has the results of one without, bit by bit", "[graph]") {
    std::vector<Run> runs = different_runs();
    for (Run& run : runs) {
        INFO("case " << &run - runs.data());
        const Outcome eager = run_training(run);
        run.graph = true;
        const Outcome graph = run_training(run);
        check_same(graph, eager);
        CHECK(eager.losses.size() == 24);
        CHECK(eager.losses.back() != eager.losses.front());
        // Steps 0 and 1 warm up, 2 to 4 capture a graph each; every eighth batch is smaller.
        std::size_t launches = 0;
        for (std::size_t step = 0; step < 24; ++step) {
            INFO("step " << step);
            if (step < 2 || step % 8 == 7) {
                CHECK(graph.submissions[step] == eager.submissions[step]);
            } else {
                // The graph, with ranks its end, and the result with its event; what the update
                // reads, with an event, too, where it changes.
                const bool changes = run.optimizer.rule != UpdateRule::sgd ||
                                     run.optimizer.schedule.kind != ScheduleKind::constant;
                CHECK(graph.submissions[step] == (run.ranks == 1 ? 3 : 4) + (changes ? 2 : 0));
                ++launches;
            }
            CHECK(eager.submissions[step] > (run.pass ? graph.submissions[2] : 20));
        }
        CHECK(graph.graph);
        CHECK(graph.tracked.size() == (run.ranks == 1 ? 0 : launches));
    }
}

TEST_CASE("several steps a graph have the results of single ones, bit by bit", "[graph]") {
    std::vector<Run> runs = different_runs();
    for (Run& run : runs) {
        const Outcome eager = run_training(run);
        run.graph = true;
        for (const int steps : {2, 3, 7, 8}) {
            INFO("case " << &run - runs.data() << ", " << steps << " steps a graph");
            run.graph_steps = steps;
            const Outcome graph = run_training(run);
            check_same(graph, eager);
            CHECK(graph.graph);
            for (std::size_t i = 0; i < 24; ++i) {
                CHECK(graph.steps[i] == static_cast<std::int64_t>(i % 8));
            }
            // Two steps warm up; of what is left of an epoch's 7 whole batches, as many graphs of
            // several as fit, then graphs of one, then the smaller batch.
            std::size_t launches = 0, number = 0;
            for (int epoch = 0; epoch < 3; ++epoch) {
                for (int step = 0; step < 8;) {
                    INFO("epoch " << epoch << ", step " << step);
                    const bool eager_step = step == 7 || number < 2;
                    const int together = !eager_step && step + steps <= 7 ? steps : 1;
                    if (eager_step) {
                        CHECK(graph.submissions[number] == eager.submissions[number]);
                    } else {
                        ++launches;
                        CHECK(graph.submissions[number] <= 6);
                    }
                    for (int i = 1; i < together; ++i) {
                        CHECK(graph.submissions[number + static_cast<std::size_t>(i)] == 0);
                    }
                    step += together;
                    number += static_cast<std::size_t>(together);
                }
            }
            CHECK(graph.tracked.size() == (run.ranks == 1 ? 0 : launches));
        }
    }
}

TEST_CASE("GPUs' ranks gather the factors of a linear layer, in a graph or without", "[graph]") {
    Run run;
    run.ranks = 2;
    run.pass = false;
    run.optimizer.momentum = 0.9f;
    // For fc1, 6 (27 + 8) numbers are gathered instead of 27 * 8.
    const Outcome reduced = run_training(run);
    CHECK(reduced.gatherings == 0);  // a layer so small is left to its bucket
    run.factors = FactorUse::on;
    const Outcome gathered = run_training(run);
    CHECK(gathered.gatherings == 24 * 2);
    run.graph = true;
    for (const int steps : {1, 3}) {
        run.graph_steps = steps;
        const Outcome graph = run_training(run);
        check_same(graph, gathered);
        CHECK(graph.graph);
    }
    // The same sums in another order, in which errors grow for 24 steps.
    for (std::size_t i = 0; i < 24; ++i) {
        CHECK(gathered.losses[i] == Approx(reduced.losses[i]).epsilon(1e-4));
    }
    CHECK(gathered.parameters != std::vector<float>(gathered.parameters.size()));
    run.pass = true;  // which has no factors
    CHECK(run_training(run).gatherings == 0);
}

TEST_CASE("a graph of several steps says which step had a gradient that is not finite", "[graph]") {
    Run run;
    // Step 4 throws the parameters far off.
    run.optimizer.schedule = {.kind = ScheduleKind::step, .step_size = 4, .gamma = 1e30};
    run.graph = true;
    const auto first = [](const Outcome& outcome) {
        const auto found = std::find_if(outcome.not_finite.begin(), outcome.not_finite.end(),
                                        [](const std::string& name) { return !name.empty(); });
        REQUIRE(found != outcome.not_finite.end());
        return std::pair(found - outcome.not_finite.begin(), *found);
    };
    const auto single = first(run_training(run));
    CHECK(single.first == 5);
    run.graph_steps = 2;  // of 2 and 3, 4 and 5
    CHECK(first(run_training(run)) == single);
}

TEST_CASE("a step out of turn begins a graph of its own", "[graph]") {
    const auto comm = make_single_communicator();
    std::vector<std::vector<double>> losses;
    for (const int steps : {1, 3}) {
        const auto backend = make_emulated_backend({});
        Session session(*comm, *backend,
                        {.batch = {.global_batch = 4},
                         .optimizer = {.learning_rate = 0.0f},
                         .device = {.graph = GraphUse::on, .graph_steps = steps}},
                        {.model = parse_model("linear classes\n", "small"), .classes = 5},
                        random_images(40, {1, 8, 8}, 5), {{0.5f}, {0.3f}});
        session.initialise();
        session.trainer().begin_epoch(1);
        std::map<std::int64_t, double> of_step;
        const auto keep = [&](const std::optional<StepResult>& result) {
            if (result) {
                const auto [at, added] = of_step.emplace(result->step, result->loss);
                CHECK(at->second == result->loss);
            }
            return result.has_value();
        };
        for (const std::int64_t step : {0, 1, 2, 2, 3, 9, 4, 5, 6, 7, 8, 0, 9, 8, 3, 4}) {
            keep(session.trainer().step(step, false));
        }
        while (keep(session.trainer().next_result())) {
        }
        std::vector<double>& all = losses.emplace_back();
        for (const auto& [step, loss] : of_step) {
            all.push_back(loss);
        }
        CHECK(all.size() == 10);
    }
    CHECK(losses[0] == losses[1]);
}

TEST_CASE("a stop is seen by a captured step", "[graph]") {
    Run run;
    run.stop_at = 10;
    const Outcome eager = run_training(run);
    run.graph = true;
    const Outcome graph = run_training(run);
    check_same(graph, eager);
    for (std::size_t step = 0; step < 24; ++step) {
        CHECK(graph.stops[step] == (step >= 10));
    }
    // A graph of several takes requests as it is launched: here with the second epoch's steps 0 to
    // 2 and 3 to 5.
    run.graph_steps = 3;
    const Outcome several = run_training(run);
    CHECK(several.losses == eager.losses);
    for (std::size_t step = 0; step < 24; ++step) {
        CHECK(several.stops[step] == (step >= 11));
    }
}

TEST_CASE("a step that cannot be captured runs without a graph, which is said once", "[graph]") {
    Run run;
    run.optimizer.rule = UpdateRule::adam;
    run.ranks = 2;
    run.host_waits = true;
    const Outcome eager = run_training(run);
    run.graph = true;
    Outcome fallback;
    const std::string text = printed([&] { fallback = run_training(run); });
    check_same(fallback, eager);
    CHECK(!fallback.graph);
    CHECK(fallback.tracked.empty());
    run.graph_steps = 3;
    CHECK(printed([&] { fallback = run_training(run); }) == text);
    check_same(fallback, eager);
    INFO(text);
    CHECK(text.find("could not be captured: ") != text.npos);
    CHECK(text.find("Event::synchronize while a stream is captured") != text.npos);
    CHECK(std::count(text.begin(), text.end(), '\n') == 1);
}

TEST_CASE("a reduction that fails in a capture ends the training", "[graph]") {
    Run run;
    run.ranks = 2;
    run.graph = true;
    // Two steps warm up, each with a reduction for every bucket.
    run.fails_at = std::numeric_limits<int>::max();
    const std::int64_t eager = run_training(run).reductions_before_capture;
    run.fails_at = static_cast<int>(eager);
    std::string what;
    const std::string text = printed([&] {
        try {
            run_training(run);
        } catch (const Error& error) {
            what = error.what();
        }
    });
    CHECK(what == "the twin is gone");
    CHECK(text.empty());
}
