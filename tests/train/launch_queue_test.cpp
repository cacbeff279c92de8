// Results come back in the order of the launches, each with what its own steps left.
#include "train/launch_queue.hpp"

#include <vector>

#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"

using namespace gyre;
using namespace gyre::train;

namespace {

struct Fixture {
    Fixture(bool emulated, int max_steps, int word_ranks)
        : backend(emulated ? make_emulated_backend({}) : make_cpu_backend(1)),
          stats(*backend, 1),
          queue(*backend, stats.get(), max_steps, word_ranks) {}

    // As a step's kernels would.
    void leave(const StepStats& left) { backend->upload(stats.get(), &left, sizeof left); }
    StepStats left() const {
        StepStats found;
        backend->download(&found, stats.get(), sizeof found);
        return found;
    }
    void leave_words(std::vector<std::int32_t> words) {
        backend->upload(queue.words(), words.data(), words.size() * sizeof(std::int32_t));
    }
    // One step, of which loss and learning rate are that number.
    void launch(int step) {
        queue.scalars()[0].learning_rate = static_cast<float>(step);
        leave({.loss = static_cast<float>(step)});
        queue.push(step, 1);
    }

    std::unique_ptr<Backend> backend;
    DeviceBuffer<StepStats> stats;
    LaunchQueue queue;
};

}  // namespace

TEST_CASE("results come in the order of the launches", "[launch_queue]") {
    for (const bool emulated : {false, true}) {
        Fixture fixture(emulated, 1, 0);
        LaunchQueue& queue = fixture.queue;
        CHECK(queue.max_in_flight() == (emulated ? LaunchQueue::kMaxInFlight : 0));
        CHECK(queue.slots() == static_cast<std::size_t>(queue.max_in_flight()) + 1);
        int read = 0;
        const auto read_oldest = [&] {
            const LaunchQueue::Result found = queue.read_oldest(0);
            CHECK(found.step == read);
            CHECK(found.stats.loss == static_cast<float>(read));
            CHECK(found.learning_rate == static_cast<float>(read));
            CHECK(found.nonfinite_word == 0);
            queue.pop();
            ++read;
        };
        for (int step = 0; step < 10; ++step) {
            CHECK(queue.next_slot() == static_cast<std::size_t>(step) % queue.slots());
            fixture.launch(step);
            if (queue.size() > queue.max_in_flight()) {
                read_oldest();
            }
        }
        CHECK(queue.size() == queue.max_in_flight());
        while (queue.size() > 0) {
            read_oldest();
        }
        CHECK(read == 10);
    }
}

TEST_CASE("launches in flight have memory of their own", "[launch_queue]") {
    Fixture fixture(true, 3, 2);
    LaunchQueue& queue = fixture.queue;
    std::vector<StepScalars*> scalars;
    std::vector<EpochPlace*> places;
    for (std::size_t i = 0; i < queue.slots(); ++i) {
        scalars.push_back(queue.scalars());
        places.push_back(queue.place());
        queue.push(static_cast<std::int64_t>(i), 1);
    }
    CHECK(scalars[1] - scalars[0] == 3);
    CHECK(scalars[2] - scalars[1] == 3);
    CHECK(places[2] - places[0] == 2);
    CHECK(queue.scalars() == scalars[0]);
    CHECK(queue.place() == places[0]);
}

TEST_CASE("a launch of several steps has the results of each", "[launch_queue]") {
    for (const int word_ranks : {0, 2}) {
        Fixture fixture(true, 3, word_ranks);
        LaunchQueue& queue = fixture.queue;
        const auto number = [](int launch, int step) {
            return static_cast<float>(10 * launch + step);
        };
        for (int launch = 0; launch < 2; ++launch) {
            for (int step = 0; step < 3; ++step) {
                queue.scalars()[step].learning_rate = number(launch, step);
                fixture.leave({.loss = number(launch, step)});
                if (word_ranks > 0) {
                    fixture.leave_words({launch, step});
                }
                queue.keep_results(step);
            }
            queue.push(3 * launch, 3);
        }
        for (int launch = 0; launch < 2; ++launch) {
            REQUIRE(queue.steps_of_oldest() == 3);
            for (int step = 0; step < 3; ++step) {
                const LaunchQueue::Result found = queue.read_oldest(step);
                CHECK(found.step == 3 * launch + step);
                CHECK(found.stats.loss == number(launch, step));
                CHECK(found.learning_rate == number(launch, step));
                CHECK(found.nonfinite_word == (word_ranks > 0 ? std::max(launch, step) : 0));
            }
            queue.pop();
        }
    }
}

TEST_CASE("what no kernel resets is reset as it is read", "[launch_queue]") {
    Fixture alone(true, 1, 0);
    CHECK(alone.queue.words() == nullptr);
    CHECK(alone.queue.nonfinite_word(1) == &alone.stats.get()->not_finite);
    alone.leave({.stop = 1.0f, .not_finite = 5, .save = 2.0f});
    alone.queue.push(0, 1);
    CHECK(alone.left().not_finite == 5);
    CHECK(alone.queue.read_oldest(0).nonfinite_word == 5);
    CHECK(alone.queue.read_oldest(0).stats.save == 2.0f);
    CHECK(alone.left().not_finite == 0);
    CHECK(alone.left().save == 0.0f);
    CHECK(alone.left().stop == 1.0f);  // for ever

    Fixture shared(true, 1, 3);
    CHECK(shared.queue.nonfinite_word(2) == shared.queue.words() + 2);
    shared.leave_words({0, 8, 3});
    shared.queue.push(0, 1);
    CHECK(shared.queue.read_oldest(0).nonfinite_word == 8);
    shared.queue.pop();
    shared.queue.push(1, 1);
    CHECK(shared.queue.read_oldest(0).nonfinite_word == 0);
}
