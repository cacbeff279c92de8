// Graphs: the emulator's captures keep CUDA's rules. Trainings with them: graph_steps_test.cpp.
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/emulation/emulator.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/clip_norm.hpp"

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

using namespace gyre;

TEST_CASE("a graph keeps the workspace that it was captured with", "[graph]") {
    const auto backend = make_emulated_backend({});
    constexpr std::int64_t kElems = 1000;
    const DeviceBuffer<float> x(*backend, kElems);
    const DeviceBuffer<GradientFacts> facts(*backend, 1);
    const std::vector<float> values(kElems, 3.0f);
    // Its partial sums are in the workspace.
    const auto clip = [&] { test::clip_norm(*backend, facts.get(), kElems, 1.0f, x.get()); };
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
