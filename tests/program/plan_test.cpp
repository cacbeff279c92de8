// The prediction of a step on many ranks: closed forms, limits, units, and what `gyre plan`
// refuses.
#include "train/plan.hpp"

#include <cmath>
#include <fstream>

#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

void check_close(double value, double expected) {
    INFO(value << " instead of " << expected);
    CHECK(std::abs(value - expected) <= 1e-12 + 1e-9 * std::abs(expected));
}

constexpr Link kLink{1e9, 1e-5};

// Three layers of 1000, 4000 and 5000 elements in buckets of their own; seconds.
const std::vector<std::int64_t> kBegins = {0, 1000, 5000};
const std::vector<Bucket> kBuckets = {{5000, 10000}, {1000, 5000}, {0, 1000}};
const ComputeTimes kCompute{1.0, 2.0, 0.5, {2.0, 1.5, 0.5}};

// One second of ring on two ranks for every `bytes`.
Link second_per(double bytes) {
    return {bytes, 0.0};
}

}  // namespace

TEST_CASE("units of bandwidth: bits and bytes, decimal and binary") {
    check_close(parse_bandwidth("400Gb"), 50e9);
    check_close(parse_bandwidth("400Gbit/s"), 50e9);
    check_close(parse_bandwidth("1Gbps"), 125e6);
    check_close(parse_bandwidth("50GB"), 50e9);
    check_close(parse_bandwidth("50GB/s"), 50e9);
    check_close(parse_bandwidth("0.5GiB"), 536870912.0);
    check_close(parse_bandwidth("100Mb"), 12.5e6);
    check_close(parse_bandwidth("8kb"), 1e3);
    check_close(parse_bandwidth("1.5TB"), 1.5e12);
    check_close(parse_bandwidth("8b"), 1.0);
    for (const char* text : {"", "400", "Gb", "0Gb", "-1Gb", "nanGb", "infGb", "1Xb", "1Gbx", "1G",
                             "1 Gb", "1Gb/m", "1e999Gb"}) {
        INFO(text);
        expect_error(ExitCode::usage, {"bandwidth", "400Gb"}, [&] { parse_bandwidth(text); });
    }
}

TEST_CASE("units of latency") {
    check_close(parse_latency("5us"), 5e-6);
    check_close(parse_latency("0.2ms"), 2e-4);
    check_close(parse_latency("800ns"), 8e-7);
    check_close(parse_latency("1s"), 1.0);
    check_close(parse_latency("0us"), 0.0);
    for (const char* text : {"", "5", "us", "-5us", "5m", "5uss", "nanus"}) {
        INFO(text);
        expect_error(ExitCode::usage, {"latency", "us"}, [&] { parse_latency(text); });
    }
}

TEST_CASE("an allreduce takes what the formulas say") {
    // 100 MB at 1 GB/s and 10 us.
    check_close(ring_seconds(2, 1e8, kLink), 0.1 + 2e-5);
    check_close(ring_seconds(4, 1e8, kLink), 0.15 + 6e-5);
    check_close(tree_seconds(2, 1e8, kLink), 0.2 + 2e-5);
    check_close(tree_seconds(5, 1e8, kLink), 0.2 + 6e-5);  // ceil(log2 5) = 3
    check_close(tree_seconds(1024, 1e8, kLink), 0.2 + 20e-5);
    check_close(ring_seconds(1, 1e8, kLink), 0.0);
    check_close(tree_seconds(1, 1e8, kLink), 0.0);
    for (const int ranks : {1, 2, 3, 8, 1000}) {
        for (const double bytes : {4.0, 1e5, 1e9}) {
            using enum AllreduceAlgorithm;
            const double one = allreduce_seconds(ring, ranks, bytes, kLink);
            const double other = allreduce_seconds(tree, ranks, bytes, kLink);
            check_close(allreduce_seconds(fastest, ranks, bytes, kLink), std::min(one, other));
        }
    }
    // Many ranks and few bytes are the tree's.
    CHECK(tree_seconds(1000, 4.0, kLink) < ring_seconds(1000, 4.0, kLink));
}

TEST_CASE("a backward pass is divided by operations") {
    // Backward: 3 (weights), 3 (input), 2, 2, 1; the first layer's input needs no gradient.
    const std::vector<double> ready = ready_by_flop({1.0, 2.0, 3.0}, 22.0);
    check_close(ready.at(2), 6.0);
    check_close(ready.at(1), 16.0);
    check_close(ready.at(0), 22.0);
    check_close(ready_by_flop({7.0}, 3.0).at(0), 3.0);
}

TEST_CASE("one rank communicates nothing") {
    const StepPlan plan =
        plan_step(1, kCompute, kBuckets, kBegins, AllreduceAlgorithm::fastest, kLink);
    check_close(plan.communication, 0.0);
    check_close(plan.exposed, 0.0);
    check_close(plan.step(), 3.5);
    check_close(plan.efficiency(), 1.0);
    check_close(plan.overlap(), 1.0);
}

TEST_CASE("a reduction starts when its bucket is final and the one before it is done") {
    // 20000 bytes a second: reductions of 1, 0.8 and 0.2 s.
    const StepPlan plan =
        plan_step(2, kCompute, kBuckets, kBegins, AllreduceAlgorithm::ring, second_per(20000.0));
    REQUIRE(plan.buckets.size() == 3);
    check_close(plan.buckets[0].ready, 1.5);
    check_close(plan.buckets[0].start, 1.5);
    check_close(plan.buckets[0].end, 2.5);
    check_close(plan.buckets[1].ready, 2.5);
    check_close(plan.buckets[1].start, 2.5);
    check_close(plan.buckets[1].end, 3.3);
    check_close(plan.buckets[2].ready, 3.0);
    check_close(plan.buckets[2].start, 3.3);
    check_close(plan.buckets[2].end, 3.5);
    check_close(plan.communication, 2.0);
    // Updates of 0.25, 0.2 and 0.05 s from 3.0 on; the second waits from 3.25 to 3.3.
    check_close(plan.exposed, 0.05);
    check_close(plan.step(), 3.55);
    check_close(plan.efficiency(), 3.5 / 3.55);
    check_close(plan.overlap(), 0.975);
}

TEST_CASE("each bucket's update hides behind the reduction of the next") {
    // Forward and backward pass take 1 s each, the update 0.4 s; two buckets of 1 s each.
    const ComputeTimes compute{1.0, 1.0, 0.4, {0.9, 0.5}};
    const StepPlan plan = plan_step(2, compute, {{5000, 10000}, {0, 5000}}, {0, 5000},
                                    AllreduceAlgorithm::ring, second_per(20000.0));
    check_close(plan.buckets[0].end, 2.5);
    check_close(plan.buckets[1].end, 3.5);
    // Waits from 2.0 to 2.5, updates until 2.7, waits until 3.5, updates until 3.7.
    check_close(plan.exposed, 1.3);
    check_close(plan.step(), 3.7);
}

TEST_CASE("a bucket is final with the layer that its first element belongs to") {
    const auto ready = [](std::vector<Bucket> buckets) {
        std::vector<double> times;
        for (const PlannedBucket& bucket :
             plan_step(2, kCompute, buckets, kBegins, AllreduceAlgorithm::ring, kLink).buckets) {
            times.push_back(bucket.ready);
        }
        return times;
    };
    CHECK(ready({{0, 10000}}) == std::vector<double>{3.0});
    CHECK(ready({{1000, 10000}, {0, 1000}}) == std::vector<double>{2.5, 3.0});
    CHECK(ready({{6000, 10000}, {3000, 6000}, {0, 3000}}) == std::vector<double>{1.5, 2.5, 3.0});
}

TEST_CASE("more ranks, less bandwidth or more latency never make a step faster") {
    for (const AllreduceAlgorithm algorithm :
         {AllreduceAlgorithm::ring, AllreduceAlgorithm::tree, AllreduceAlgorithm::fastest}) {
        const auto step = [&](int ranks, const Link& link) {
            const StepPlan plan = plan_step(ranks, kCompute, kBuckets, kBegins, algorithm, link);
            CHECK(plan.step() >= kCompute.total());
            CHECK(plan.exposed <= plan.communication + 1e-12);
            CHECK(plan.overlap() >= -1e-12);
            // No schedule beats both resources.
            CHECK(plan.step() + 1e-12 >= std::max(plan.compute, plan.communication));
            return plan.step();
        };
        double before = 0.0;
        for (const int ranks : {1, 2, 3, 4, 7, 8, 64, 1000, 1024}) {
            const double now = step(ranks, {30000.0, 1e-3});
            CHECK(now >= before);
            before = now;
        }
        for (const double bandwidth : {1e3, 1e4, 1e5, 1e6}) {
            CHECK(step(8, {bandwidth, 1e-3}) >= step(8, {bandwidth * 2, 1e-3}));
            CHECK(step(8, {bandwidth, 2e-2}) >= step(8, {bandwidth, 1e-2}));
        }
    }
}

TEST_CASE("gyre plan with given compute times prints and writes what the formulas say") {
    const TempDir dir;
    const std::string json = (dir.path() / "plan.json").string();
    const Outcome outcome =
        run_gyre(0,
                 "plan --model wide --batch-size 64 --ranks 1,2,8 --bandwidth 400Gb --latency 5us "
                 "--compute-ms 1,2,0.5 --algorithm ring --bucket-kib 1048576 --json " +
                     json);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    CHECK(outcome.output.find("efficiency %") != std::string::npos);
    std::ifstream in(json);
    const auto plan = nlohmann::json::parse(in);
    REQUIRE(plan.at("plans").size() == 3);
    check_close(plan.at("plans")[0].at("step_seconds"), 0.0035);
    check_close(plan.at("plans")[0].at("efficiency"), 1.0);
    // All gradients in one bucket, which is final last: 103 MB and nothing to hide behind.
    REQUIRE(plan.at("plans")[1].at("buckets").size() == 1);
    const double bytes = plan.at("plans")[1].at("buckets")[0].at("bytes");
    CHECK(bytes >= 4.0 * 25775882);
    CHECK(bytes < 4.0 * 25775882 + 4096);
    check_close(plan.at("plans")[1].at("exposed_seconds"), 1e-5 + bytes / 50e9);
    check_close(plan.at("plans")[2].at("exposed_seconds"), 7e-5 + 1.75 * bytes / 50e9);
}

TEST_CASE("gyre plan measures what it is not given, on all ranks together") {
    for (const int ranks : {0, 2}) {
        const Outcome outcome = run_gyre(
            ranks,
            "plan --batch-size 4 --threads 1 --image 1x28x28 --classes 5 --ranks 8 --bandwidth "
            "1Gb --latency 20us --optimizer adam");
        INFO(outcome.output);
        CHECK(outcome.exit_code == 0);
        CHECK(outcome.output.find(ranks == 2 ? "2 ranks at once" : "1 rank") != std::string::npos);
    }
}

TEST_CASE("gyre plan refuses what makes no sense with exit code 2") {
    const std::string good = "plan --ranks 8 --bandwidth 1Gb --latency 5us --compute-ms 1,2 ";
    const auto refuse = [](const std::string& arguments, const std::string& part) {
        const Outcome outcome = run_gyre(0, arguments);
        INFO(arguments << "\n" << outcome.output);
        CHECK(outcome.exit_code == 2);
        CHECK(outcome.output.find(part) != std::string::npos);
    };
    CHECK(run_gyre(0, good).exit_code == 0);
    refuse("plan --bandwidth 1Gb --latency 5us", "--ranks");
    refuse("plan --ranks 8 --latency 5us", "--bandwidth");
    refuse("plan --ranks 8 --bandwidth 1Gb", "--latency");
    refuse("plan --ranks 8 --bandwidth 400 --latency 5us", "400Gb");
    refuse("plan --ranks 8 --bandwidth 1Gb --latency 5", "us");
    refuse("plan --ranks 8,0 --bandwidth 1Gb --latency 5us", "--ranks");
    refuse(good + "--image 28x28", "--image");
    refuse(good + "--image 1x28x28x1", "--image");
    refuse(good + "--image 0x28x28", "--image");
    refuse(good + "--classes 1", "--classes");
    refuse(good + "--batch-size 0", "--batch");
    refuse(good + "--algorithm star", "--algorithm");
    refuse(good + "--bucket-kib 0", "--bucket-kib");
    refuse("plan --ranks 8 --bandwidth 1Gb --latency 5us --compute-ms 1", "--compute-ms");
    refuse("plan --ranks 8 --bandwidth 1Gb --latency 5us --compute-ms 1,-2", "--compute-ms");
    CHECK(run_gyre(0, good + "--json /no/such/folder/x").exit_code == 3);
    CHECK(run_gyre(0, good + "--model none").exit_code == 3);
}
