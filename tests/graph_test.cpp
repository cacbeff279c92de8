// The step as a graph: the emulator's captures keep CUDA's rules, and a training with graphs has
// the results of one without, to the last bit.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/base/error.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/emulation/emulator.hpp"
#include "tests/catch.hpp"
#include "tests/communicators.hpp"
#include "train/session.hpp"

namespace gyre::emulated {
namespace {

std::string error_of(const std::function<void()>& work) {
    try {
        work();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}
bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != text.npos;
}

// One int on the device, which work in streams changes.
struct Cell {
    Cell() : at(static_cast<int*>(allocate(sizeof(int)))) { *at = 0; }
    ~Cell() { release(at); }
    Cell(const Cell&) = delete;
    Cell& operator=(const Cell&) = delete;
    // at = at * 10 + digit, so that the order shows.
    void append(Stream& stream, int digit) const {
        emulator::submit(stream, [to = at, digit] { *to = *to * 10 + digit; });
    }
    int* at;
};

}  // namespace

TEST_CASE("a captured graph runs when it is launched, every time", "[graph]") {
    Stream stream, beside;
    Event forked, joined, mark;
    const Cell cell;
    Graph graph(stream, [&] {
        cell.append(stream, 1);
        stream.record(forked);
        beside.wait(forked);
        cell.append(beside, 2);
        beside.record(joined);
        stream.wait(joined);
        stream.record_in_launches(mark);
        cell.append(stream, 3);
    });
    stream.synchronize();
    CHECK(*cell.at == 0);
    const std::int64_t before = emulator::submission_count();
    cell.append(stream, 4);
    graph.launch(stream);
    CHECK(emulator::submission_count() == before + 2);
    mark.synchronize();  // the launch has got as far as this, and no further
    CHECK(*cell.at == 412);
    graph.launch(stream);
    mark.synchronize();
    CHECK(*cell.at == 412312);
    cell.append(stream, 5);
    stream.synchronize();
    CHECK(*cell.at == 41231235);
}

TEST_CASE("a launch that runs later than its graph lives is complete", "[graph]") {
    Stream stream;
    const Cell cell;
    {
        Graph graph(stream, [&] { cell.append(stream, 1); });
        graph.launch(stream);
    }
    stream.synchronize();
    CHECK(*cell.at == 1);
}

TEST_CASE("what CUDA forbids in a capture is reported, and ends it", "[graph]") {
    Stream stream, beside;
    Event before, inside;
    const Cell cell;
    beside.record(before);
    const std::vector<std::pair<std::function<void()>, std::string>> wrong = {
        {[&] { allocate(1); }, "an allocation"},
        {[&] { allocate_pinned(1); }, "an allocation"},
        {[&] { stream.synchronize(); }, "Stream::synchronize"},
        {[&] {
             stream.record(inside);
             inside.synchronize();
         },
         "Event::synchronize"},
        {[&] { stream.wait(before); }, "StreamCaptureIsolation"},
        {[&] {
             stream.record(inside);
             beside.wait(inside);
             cell.append(beside, 2);
         },
         "StreamCaptureUnjoined"},
        {[&] { error_of([] { allocate(1); }); }, "an allocation"},  // even where it goes unnoticed
        {[&] { throw Error(ExitCode::internal, "of the caller's"); }, "of the caller's"}};
    for (const auto& [what, report] : wrong) {
        INFO(report);
        const std::string found = error_of([&] {
            Graph graph(stream, [&] {
                cell.append(stream, 1);
                what();
            });
        });
        INFO(found);
        CHECK(contains(found, report));
        // The streams are free again, and nothing has run.
        cell.append(stream, 7);
        cell.append(beside, 7);
        stream.synchronize();
        beside.synchronize();
        CHECK(*cell.at == 77);
        *cell.at = 0;
    }
    CHECK(contains(error_of([&] { inside.synchronize(); }), "cudaErrorCapturedEvent"));
    CHECK(contains(error_of([&] { stream.wait(inside); }), "capture that has ended"));
}

TEST_CASE("an event that is for the order only has no time") {
    Stream stream;
    Event timed, order{false};
    stream.record(timed);
    stream.record(order);
    stream.synchronize();
    CHECK(Event::milliseconds(timed, timed) == 0.0f);
    CHECK(contains(error_of([&] { Event::milliseconds(timed, order); }), "not timed"));
}

}  // namespace gyre::emulated

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
        REQUIRE(c.kind == Collective::Kind::all_reduce);
        if (fails_at >= 0 && calls++ >= fails_at) {
            throw Error(ExitCode::communication, "the twin is gone");
        }
        const auto end = device_->submit_to_copy_stream([&](void* stream) {
            emulated::emulator::submit(*static_cast<emulated::Stream*>(stream), [c] {
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
    int fails_at = -1, calls = 0;
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
    int ranks = 1;
    int accumulate = 1;
    DataType type = DataType::float32;
    bool host_waits = false;
    int stop_at = -1;   // step since the start
    int fails_at = -1;  // reduction since the start
    OptimizerSpec optimizer;
};

struct Outcome {
    std::vector<double> losses;
    std::vector<bool> stops;
    std::vector<float> parameters;
    std::vector<std::int64_t> submissions;  // of each step
    std::vector<std::string> tracked;
    std::int64_t reductions_before_capture = 0;  // in two steps
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
        {.model = parse_model("conv 3 k3\nrelu\ndropout2d 0.3\nmaxpool 2\nlinear 8\nrelu\n"
                              "dropout 0.5\nlinear classes\n",
                              "small"),
         .classes = kClasses,
         .global_batch = kBatch * run.ranks,
         .accumulate = run.accumulate,
         .seed = 9,
         .eval_images = 20 * run.ranks,
         .optimizer = run.optimizer,
         .reduction = {.bucket_bytes = 256, .type = run.type},
         .graph = run.graph ? GraphUse::on : GraphUse::off},
        random_images(images, {1, 8, 8}, kClasses), {{0.5f}, {0.3f}});
    session.initialise();
    Trainer& trainer = session.trainer();
    REQUIRE(session.sharding().steps() == 8);
    Outcome outcome;
    const auto account = [&](const std::optional<StepResult>& result) {
        if (result) {
            outcome.losses.push_back(result->loss);
            outcome.stops.push_back(result->stop);
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
            const std::int64_t before = emulated::emulator::submission_count();
            account(trainer.step(step, run.stop_at >= 0 && number >= run.stop_at));
            if (number == 1) {
                outcome.reductions_before_capture = twins.calls;
            }
            outcome.submissions.push_back(emulated::emulator::submission_count() - before);
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
    outcome.graph = trainer.graph();
    return outcome;
}

void check_same(const Outcome& a, const Outcome& b) {
    CHECK(a.losses == b.losses);
    CHECK(a.stops == b.stops);
    CHECK(a.parameters == b.parameters);
}

// What goes to stderr meanwhile.
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

TEST_CASE("a training with graphs has the results of one without, bit by bit", "[graph]") {
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
            CHECK(eager.submissions[step] > 25);
        }
        CHECK(graph.graph);
        CHECK(graph.tracked.size() == (run.ranks == 1 ? 0 : launches));
    }
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

TEST_CASE("a graph keeps the workspace that it was captured with", "[graph]") {
    const auto backend = make_emulated_backend({});
    constexpr std::int64_t kElems = 1000;
    const DeviceBuffer<float> x(*backend, kElems);
    const std::vector<float> values(kElems, 3.0f);
    // Its partial sums lie in the workspace.
    const auto clip = [&] { backend->clip_norm(kElems, 1.0f, x.get(), {}); };
    clip();
    const DeviceBuffer<float> behind(*backend, 1);  // so that it does not grow where it is
    const auto graph = backend->capture(clip);
    const auto conv = backend->make("conv1", Conv2dSpec{.shape = {{32, 16, 16}, 32, 3, 1, 1}},
                                    {.train_images = 64});
    const DeviceBuffer<float> in_its_place(*backend, 2);
    backend->upload(x.get(), values.data(), x.bytes());
    graph->launch();
    std::vector<float> found(kElems);
    backend->download(found.data(), x.get(), x.bytes());
    CHECK(found[0] == Approx(1.0 / std::sqrt(kElems)));
    std::vector<float> others(2);
    backend->download(others.data(), in_its_place.get(), in_its_place.bytes());
    CHECK(others == std::vector<float>(2));
}

TEST_CASE("what is not waited for cannot be timed", "[graph]") {
    const auto backend = make_emulated_backend({});
    const auto begin = backend->record();
    const auto end = backend->record();
    CHECK_THROWS_AS(backend->seconds_between(begin, end), Error);
    backend->synchronize(end);
    CHECK(backend->seconds_between(begin, end) == 0.0);
}
