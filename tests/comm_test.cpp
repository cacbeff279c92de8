// The communicator, run under mpirun with 1, 2, 3 and 4 ranks (and as a single process).
#define CATCH_CONFIG_RUNNER
#include "comm/communicator.hpp"

#include <cmath>
#include <cstdio>
#include <numeric>

#include "comm/watchdog.hpp"
#include "tests/catch.hpp"
#include "tests/expect_error.hpp"
#include "train/sync_check.hpp"

using namespace gyre;
using gyre::test::expect_error;

namespace {
Communicator* world = nullptr;  // one per process, as MPI is
}

TEST_CASE("asynchronous reductions of every size, several in flight") {
    const std::vector<std::int64_t> sizes = {0, 1, 3, 1000, 21840, (1 << 20) + 1};
    for (int round = 0; round < 3; ++round) {
        std::vector<std::vector<float>> data;
        std::vector<std::unique_ptr<Request>> requests;
        for (const std::int64_t elems : sizes) {
            auto& values = data.emplace_back(static_cast<std::size_t>(elems));
            for (std::size_t i = 0; i < values.size(); ++i) {
                // Small integers, so that every sum is exact.
                values[i] = static_cast<float>(static_cast<int>(i % 1000) + world->rank() + round);
            }
        }
        for (auto& values : data) {
            requests.push_back(world->allreduce_sum_async(
                values.data(), static_cast<std::int64_t>(values.size())));
        }
        for (auto& request : requests) {
            request->wait();
        }
        const int n = world->size();
        for (const auto& values : data) {
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < values.size(); ++i) {
                const int expected = n * (static_cast<int>(i % 1000) + round) + n * (n - 1) / 2;
                wrong += values[i] != static_cast<float>(expected);
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("a reduction may be waited for late, and in any order") {
    std::vector<float> a(300'000, 1.0f), b(10, 2.0f);
    auto first = world->allreduce_sum_async(a.data(), 300'000);
    auto second = world->allreduce_sum_async(b.data(), 10);
    second->wait();
    first->wait();
    first->wait();
    CHECK(a[299'999] == static_cast<float>(world->size()));
    CHECK(b[9] == static_cast<float>(2 * world->size()));
}

TEST_CASE("doubles, broadcasts and strings") {
    std::vector<double> sums = {1.0, 0x1p40, static_cast<double>(world->rank())};
    world->allreduce_sum(sums);
    const double n = world->size();
    CHECK(sums == std::vector<double>{n, n * 0x1p40, n * (n - 1) / 2});
    for (int root = 0; root < world->size(); ++root) {
        const std::string text(static_cast<std::size_t>(root * 1000), 'x');
        CHECK(broadcast_string(*world, world->rank() == root ? text : "other", root) == text);
    }
    world->barrier();
    CHECK(world->local_rank() == world->rank());  // all ranks of this test are on one host
    CHECK(world->local_size() == world->size());
}

TEST_CASE("an error on one rank becomes the same error on all") {
    agree(*world, [] {});
    const int last = world->size() - 1;
    expect_error(ExitCode::bad_input, {"the file is not here"}, [&] {
        agree(*world, [&] {
            if (world->rank() == last) {
                throw input_error("the file is not here");
            }
        });
    });
    expect_error(ExitCode::internal, {"all of us"},
                 [&] { agree(*world, [] { throw std::runtime_error("all of us"); }); });
}

TEST_CASE("ranks that differ are refused, saying what differs") {
    require_same_manifest(*world, {{"a", "1"}, {"b", "2"}});
    require_same_manifest(*world, {});
    if (world->size() == 1) {
        return;
    }
    const std::string mine = world->rank() == 1 ? "0.02" : "0.01";
    expect_error(ExitCode::communication, {"flag --lr differs", "0.01", "0.02", "rank 1"}, [&] {
        require_same_manifest(*world, {{"seed", "1"}, {"flag --lr", mine}});
    });
    std::vector<ManifestEntry> entries = {{"a", "1"}};
    if (world->rank() == 1) {
        entries.clear();
    }
    expect_error(ExitCode::communication, {"another version"},
                 [&] { require_same_manifest(*world, entries); });
}

TEST_CASE("ranks whose parameters have drifted apart are found") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1, true});
    net.initialise(5);
    require_same_parameters(*world, net, "step 1");
    if (world->size() == 1) {
        return;
    }
    // The last bit of one weight of fc1, on the last rank.
    if (world->rank() == world->size() - 1) {
        float* weight = net.parameter_data() + net.parameters().at(4).offset_elems + 77;
        *weight = std::nextafter(*weight, 1.0f);
    }
    expect_error(ExitCode::communication,
                 {"step 2", "fc1.weight", "on rank " + std::to_string(world->size() - 1)},
                 [&] { require_same_parameters(*world, net, "step 2"); });
}

int main(int argc, char** argv) {
    // As the program does: everything goes through the watchdog.
    const auto comm = make_watched_communicator(make_communicator(), {});
    world = comm.get();
    std::printf("rank %d of %d over %s\n", world->rank(), world->size(),
                world->description().c_str());
    return Catch::Session().run(argc, argv);
}
