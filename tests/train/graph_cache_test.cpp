// When steps are captured, which graph a launch gets, and what a capture that fails leaves.
// Captures are the emulated GPU's.
#include "train/graph_cache.hpp"

#include <vector>

#include "base/error.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "tests/support/expect_error.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

constexpr int kElems = 16;

struct Fixture {
    explicit Fixture(bool enabled = true, int max_steps = 1, Communicator* of_ranks = nullptr)
        : cache(of_ranks != nullptr ? *of_ranks : *comm, enabled, 3, max_steps) {}

    // The graph for the next launch.
    const Reducer::Captured* get(std::size_t slot, std::int64_t batches = 100) {
        return cache.get(slot, batches, [&](int steps) {
            captures.push_back(steps);
            return reducer.capture([&] {
                for (int i = 0; i < steps; ++i) {
                    reducer.begin_step();
                    backend->add(kElems, ones.get(), gradients.get());
                    if (fails) {
                        throw Error(code, "of the capture");
                    }
                    reducer.ready(0);
                    reducer.finish_step([](const Bucket&) {});
                }
            });
        });
    }
    float launch(const Reducer::Captured* graph) {
        reducer.launch(*graph);
        for (std::size_t i = 0; i < graph->steps.size(); ++i) {
            reducer.synchronize_step();
        }
        float first = 0.0f;
        backend->download(&first, gradients.get(), sizeof first);
        return first;
    }

    const std::unique_ptr<Communicator> comm = make_single_communicator();
    const std::unique_ptr<Backend> backend = make_emulated_backend({});
    DeviceBuffer<float> gradients{*backend, kElems}, ones{*backend, kElems};
    Reducer reducer{*comm, *backend, {{0, kElems}}, gradients.get()};
    GraphCache cache;
    std::vector<int> captures;  // their steps
    bool fails = false;
    ExitCode code = ExitCode::internal;
};

}  // namespace

TEST_CASE("a graph is captured once for each slot, after the warm-up", "[graph]") {
    Fixture fixture;
    const std::vector<float> one(kElems, 1.0f);
    fixture.backend->upload(fixture.ones.get(), one.data(), fixture.ones.bytes());
    for (int i = 0; i < GraphCache::kWarmUps; ++i) {
        CHECK(fixture.get(0) == nullptr);
    }
    CHECK(fixture.captures.empty());
    std::vector<const Reducer::Captured*> graphs;
    float launches = 0.0f;
    for (int round = 0; round < 3; ++round) {
        for (std::size_t slot = 0; slot < 3; ++slot) {
            const Reducer::Captured* graph = fixture.get(slot);
            REQUIRE(graph != nullptr);
            CHECK(graph->steps.size() == 1);
            if (round == 0) {
                graphs.push_back(graph);
            }
            CHECK(graph == graphs[slot]);
            CHECK(fixture.launch(graph) == ++launches);
        }
    }
    CHECK(fixture.captures == std::vector<int>(3, 1));
    CHECK(fixture.cache.enabled());
}

TEST_CASE("a graph has several steps if the epoch has as many whole batches left", "[graph]") {
    Fixture fixture(true, 4);
    for (int i = 0; i < GraphCache::kWarmUps; ++i) {
        CHECK(fixture.get(0) == nullptr);
    }
    CHECK(fixture.get(0, 4)->steps.size() == 4);
    CHECK(fixture.get(0, 3)->steps.size() == 1);
    CHECK(fixture.get(0, 9)->steps.size() == 4);
    CHECK(fixture.get(0, 1)->steps.size() == 1);
    CHECK(fixture.captures == std::vector{4, 1});
}

TEST_CASE("without graphs nothing is captured", "[graph]") {
    Fixture fixture(false, 4);
    for (int i = 0; i < 5; ++i) {
        CHECK(fixture.get(0) == nullptr);
    }
    CHECK(fixture.captures.empty());
    CHECK(!fixture.cache.enabled());
}

TEST_CASE("a capture that fails disables graphs, and earlier ones stay", "[graph]") {
    // Rank 1, which prints nothing.
    OneOfTwo other(1);
    Fixture fixture(true, 1, &other);
    for (int i = 0; i < GraphCache::kWarmUps; ++i) {
        fixture.get(0);
    }
    const Reducer::Captured* graph = fixture.get(0);
    REQUIRE(graph != nullptr);
    fixture.fails = true;
    CHECK(fixture.get(1) == nullptr);
    CHECK(!fixture.cache.enabled());
    fixture.fails = false;
    CHECK(fixture.get(0) == nullptr);
    CHECK(fixture.get(2) == nullptr);
    CHECK(fixture.captures.size() == 2);
    CHECK(graph->graph != nullptr);
}

TEST_CASE("a failed reduction in a capture is thrown", "[graph]") {
    Fixture fixture;
    for (int i = 0; i < GraphCache::kWarmUps; ++i) {
        fixture.get(0);
    }
    fixture.fails = true;
    fixture.code = ExitCode::communication;
    expect_error(ExitCode::communication, {"of the capture"}, [&] { fixture.get(0); });
}
