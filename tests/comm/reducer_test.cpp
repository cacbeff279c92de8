// Tests of buckets and of the order in which their reductions start.
#include "comm/reducer.hpp"

#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "tests/support/expect_error.hpp"
#include "train/session.hpp"

using namespace gyre;
using namespace gyre::train;
using gyre::test::expect_error;
using gyre::test::OneOfTwo;

namespace {

// Records the reductions; each is complete at once.
class RecordingCommunicator final : public OneOfTwo {
 public:
    struct Done final : Request {
        explicit Done(std::chrono::milliseconds after = {}) : after_(after) {}
        void wait() override { std::this_thread::sleep_for(std::exchange(after_, {})); }

     private:
        std::chrono::milliseconds after_;
    };
    std::unique_ptr<Request> start(const Collective& collective) override {
        const auto begin = static_cast<float*>(collective.data) - base;
        started.push_back({begin, begin + collective.count});
        origins.push_back(collective.origin);
        if (poison >= begin && poison < begin + collective.count) {
            base[poison] = std::numeric_limits<float>::quiet_NaN();
        }
        return std::make_unique<Done>(late);
    }

    float* base = nullptr;
    std::int64_t poison = -1;          // the element to which another rank adds NaN
    std::chrono::milliseconds late{};  // time until a reduction is complete
    std::vector<Bucket> started;
    std::vector<Origin> origins;
};

void check_covers(const std::vector<Bucket>& buckets, std::int64_t total) {
    REQUIRE(!buckets.empty());
    CHECK(buckets.front().end == total);
    CHECK(buckets.back().begin == 0);
    for (std::size_t i = 1; i < buckets.size(); ++i) {
        CHECK(buckets[i].end == buckets[i - 1].begin);
    }
}

}  // namespace

TEST_CASE("buckets cover the gradients from the end to the beginning") {
    const std::vector<std::int64_t> begins = {0, 272, 5312, 21376};  // the layers of `net`
    const std::int64_t total = 21920, automatic = auto_bucket_bytes(total, false);
    for (const std::int64_t kib : {1, 4, 16, 32, 64, 1024}) {
        check_covers(plan_buckets(begins, total, kib * 1024), total);
    }
    for (const Bucket& bucket : plan_buckets(begins, total, 1024)) {  // tensors are split
        CHECK(bucket.bytes() <= 2 * 1024);
        CHECK(bucket.begin % 16 == 0);
    }
    CHECK(plan_buckets(begins, total, 25 << 20).size() == 1);
    // auto leaves something to overlap even in a small net, and makes the last bucket small.
    const auto buckets = plan_buckets(begins, total, automatic);
    check_covers(buckets, total);
    CHECK(buckets.size() >= 3);
    CHECK(buckets.back().elems() == 272);
    // Elements that must be exact have a separate bucket, the first.
    const auto apart = plan_buckets(begins, total, automatic, total - 16);
    check_covers(apart, total);
    CHECK(apart.front().elems() == 16);
    // Tensors whose factors are gathered have a bucket of their own.
    const auto around = plan_buckets(begins, total, 1 << 20, {}, {{5312, 21376}});
    check_covers(around, total);
    REQUIRE(around.size() == 3);
    CHECK(around[0].begin == 21376);
    CHECK(around[1].route == Route::factors);
    CHECK(around[2].end == 5312);
    CHECK(around[2].route == Route::library);
    const auto at_the_end =
        plan_buckets(begins, total, automatic, total - 16, {{0, 272}, {21376, total - 16}});
    check_covers(at_the_end, total);
    CHECK(at_the_end.front().begin == total - 16);
    CHECK(at_the_end[1].begin == 21376);
    CHECK(at_the_end[1].route == Route::factors);
    CHECK(at_the_end[2].end == 21376);
    CHECK(at_the_end.back().end == 272);
    CHECK(at_the_end.back().route == Route::factors);
    // However small the requested size, there are not too many buckets.
    const auto many = plan_buckets({0, 1'000'000}, 30'000'000, 1);
    check_covers(many, 30'000'000);
    CHECK(many.size() <= kMostParts + 2);
}

TEST_CASE("in GPU memory small nets have one bucket and large nets few") {
    const auto sizes = [](const std::vector<std::int64_t>& begins, std::int64_t total) {
        const auto buckets = plan_buckets(begins, total, auto_bucket_bytes(total, true));
        check_covers(buckets, total);
        std::vector<std::int64_t> bytes;
        for (const Bucket& bucket : buckets) {
            bytes.push_back(bucket.bytes());
        }
        return bytes;
    };
    CHECK(sizes({0, 272, 5312, 21376}, 21920).size() == 1);  // net
    const auto wide = sizes({0, 640, 74'496, 25'765'632}, 25'775'952);
    CHECK(wide.size() <= 5);
    for (const std::int64_t bytes : wide) {
        CHECK(bytes <= 64 << 20);
    }
    CHECK(auto_bucket_bytes(262'144, true) == 1 << 20);
    CHECK(auto_bucket_bytes(262'160, true) == 16 << 20);
    CHECK(auto_bucket_bytes(std::int64_t{1} << 30, true) == 32 << 20);
    CHECK(auto_bucket_bytes(25'775'952, false) == 4 << 20);
}

TEST_CASE("a bucket is reduced once, as soon as it is complete") {
    std::vector<float> gradients(100);
    RecordingCommunicator comm;
    comm.base = gradients.data();
    const auto backend = make_cpu_backend(1);
    Reducer reducer(comm, *backend, {{60, 100}, {20, 60}, {0, 20}}, gradients.data());
    for (int step = 0; step < 2; ++step) {
        comm.started.clear();
        comm.origins.clear();
        reducer.begin_step();
        reducer.ready(80);
        CHECK(comm.started.empty());
        reducer.ready(60);
        CHECK(comm.started.size() == 1);
        reducer.ready(30);
        CHECK(comm.started.size() == 1);
        reducer.ready(0);
        REQUIRE(comm.started.size() == 3);
        CHECK(comm.started[0].begin == 60);
        CHECK(comm.started[2].end == 20);
        std::vector<std::int64_t> arrived;
        reducer.finish_step([&](const Bucket& bucket) { arrived.push_back(bucket.begin); });
        CHECK(arrived == std::vector<std::int64_t>{60, 20, 0});
        const Reducer::Times times = reducer.synchronize_step();
        CHECK(times.exposed >= 0.0);
        REQUIRE(times.buckets.size() == 3);
        REQUIRE(comm.origins.size() == 3);
        for (int bucket = 0; bucket < 3; ++bucket) {
            const Origin& origin = comm.origins[static_cast<std::size_t>(bucket)];
            CHECK(origin.step == step);
            CHECK(origin.index == bucket);
            CHECK(origin.part == std::string("bucket"));
        }
        CHECK(times.buckets[2].ready >= times.buckets[0].ready);
    }
}

TEST_CASE("time that the device waits is exposed, hidden time is not") {
    std::vector<float> gradients(100);
    RecordingCommunicator comm;
    comm.base = gradients.data();
    const auto backend = make_cpu_backend(1);
    Reducer reducer(comm, *backend, {{60, 100}, {0, 60}}, gradients.data());
    for (const int late : {0, 30}) {
        comm.late = std::chrono::milliseconds(late);
        reducer.begin_step();
        reducer.sum({gradients.data(), 4});  // within the forward pass
        reducer.ready(60);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the backward pass
        reducer.ready(0);
        reducer.finish_step([](const Bucket&) {});
        const Reducer::Times times = reducer.synchronize_step();
        CHECK(times.buckets.at(1).ready - times.buckets.at(0).ready >= 0.019);
        CHECK(times.statistics >= 0.99e-3 * late);
        double sum = times.statistics;
        for (const Reducer::Times::Of& bucket : times.buckets) {
            CHECK(bucket.exposed >= 0.99e-3 * late);
            CHECK(bucket.arrived - bucket.ready >= 0.99e-3 * late);
            sum += bucket.exposed;
        }
        CHECK(times.exposed == Approx(sum));
        CHECK(times.exposed - times.statistics <= times.buckets.at(1).arrived - 0.019);
    }
}

TEST_CASE("a reducer rejects more work than the device keeps events for") {
    std::vector<float> gradients(16);
    OneOfTwo comm;
    const auto backend = make_cpu_backend(1);
    Reducer reducer(comm, *backend, {{0, 16}}, gradients.data());
    for (int step = 0; step < Reducer::kMostSteps; ++step) {
        reducer.begin_step();
        reducer.ready(0);
        reducer.finish_step([](const Bucket&) {});
    }
    expect_error(ExitCode::internal, {"more steps", "events"}, [&] { reducer.begin_step(); });
    reducer.synchronize_step();
    reducer.begin_step();
    expect_error(ExitCode::internal, {"more collectives in a step", "events"}, [&] {
        for (std::int64_t i = 0; i < Device::kKeptEvents; ++i) {
            reducer.gather_updates(gradients.data(), 8);
        }
    });
}

namespace {

// A training of `net` on the CPU with 6 images per rank; this test plays the other rank.
struct Training {
    explicit Training(int accumulate)
        : session(comm, *backend, {.batch = {.global_batch = 12, .accumulate = accumulate}},
                  {.model = load_model("net")}, random_images(12, {1, 28, 28}, 10),
                  {{0.5f}, {0.3f}}) {
        comm.base = session.net().gradient_data();
        session.initialise();
        session.trainer().begin_epoch(1);
    }
    StepResult step(bool stop = false) { return *session.trainer().step(0, stop); }

    const std::unique_ptr<Backend> backend = make_cpu_backend(1);
    RecordingCommunicator comm;
    Session session;
};

}  // namespace

TEST_CASE("a step in several passes reduces once") {
    Training once(1), thrice(3);
    once.step();
    thrice.step();
    CHECK(once.comm.started.size() == once.session.reducer().buckets().size());
    CHECK(thrice.comm.started.size() == once.comm.started.size());
}

TEST_CASE("asking one rank to stop is enough") {
    for (const int accumulate : {1, 3}) {
        Training training(accumulate);
        CHECK(!training.step().stop);
        CHECK(training.step(true).stop);
    }
}

TEST_CASE("a gradient that another rank made NaN is named by its parameter") {
    for (const char* name : {"conv1.weight", "conv2.bias", "fc1.weight", "fc2.bias"}) {
        Training training(1);
        CHECK(training.step().not_finite.empty());
        for (const Parameter& parameter : training.session.net().parameters()) {
            if (parameter.name == name) {
                training.comm.poison = parameter.offset_elems + parameter.elems - 1;
            }
        }
        CHECK(training.step().not_finite == name);
        // The error does not persist: the initial net has finite gradients again.
        training.comm.poison = -1;
        training.session.net().initialise(1);
        CHECK(training.step().not_finite.empty());
    }
}
