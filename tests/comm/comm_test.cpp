// Tests of the communicator: over MPI, Gloo and shared memory, with 1 to 7 ranks, and as a single
// process.
#include "comm/communicator.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

#include "base/sum_tree.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/term_sums.hpp"
#include "comm/watch/watchdog.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/train/step_with_sums.hpp"
#include "train/sync_check.hpp"

using namespace gyre;
using namespace gyre::train;
using gyre::test::all_gather;
using gyre::test::all_reduce;
using gyre::test::expect_error;
using gyre::test::reduce_scatter;

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
            requests.push_back(
                world->start(all_reduce(values.data(), static_cast<std::int64_t>(values.size()))));
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

TEST_CASE("sums that are said to be those of the tree over the ranks are") {
    if (!world->can_sum_in_tree()) {
        return;
    }
    const int n = world->size();
    // Their magnitudes differ so much that another order of additions has another sum.
    const auto term = [](int rank, std::size_t i) {
        const int step = 7 * rank + 13 * static_cast<int>(i % 1001);
        return std::ldexp(static_cast<float>(step % 19 - 9) / 7.0f, 3 * (step % 11));
    };
    const auto sum = [&](std::size_t i) {
        std::vector<std::pair<TreeNode, float>> waiting;
        for (int rank = 0; rank < n; ++rank) {
            push_node(waiting, {rank, rank + 1}, term(rank, i), n,
                      [](float& left, float right) { left += right; });
        }
        return waiting.front().second;
    };
    for (const std::int64_t elems : {1, 3, 33, 20'000, 300'001, 1'200'000}) {
        INFO(elems << " elements");
        std::vector<float> all(static_cast<std::size_t>(elems));
        std::vector<float> rows(all.size() * static_cast<std::size_t>(n));
        for (std::size_t i = 0; i < rows.size(); ++i) {
            all[i % all.size()] = term(world->rank(), i % all.size());
            rows[i] = term(world->rank(), i);
        }
        std::vector<float> again = all, any = all;
        const auto in_tree = [](comm::Collective collective) {
            collective.in_tree = true;
            return collective;
        };
        auto first = world->start(in_tree(all_reduce(all.data(), elems)));
        auto second = world->start(reduce_scatter(rows.data(), elems));
        auto third = world->start(all_reduce(any.data(), elems));
        auto fourth = world->start(in_tree(all_reduce(again.data(), elems)));
        fourth->wait();
        first->wait();
        second->wait();
        third->wait();
        CHECK(again == all);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            const std::size_t own = all.size() * static_cast<std::size_t>(world->rank()) + i;
            wrong += all[i] != sum(i);
            wrong += rows[own] != sum(own);
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("sums of 16-bit floats, each rounded to its type") {
    const int n = world->size();
    for (const DataType type : {DataType::bfloat16, DataType::float16}) {
        const auto narrow = [&](float value) {
            return type == DataType::bfloat16 ? narrow::to_bfloat16(value)
                                              : narrow::to_float16(value);
        };
        const auto widen = [&](std::uint16_t value) {
            return type == DataType::bfloat16 ? narrow::from_bfloat16(value)
                                              : narrow::from_float16(value);
        };
        for (const std::int64_t elems : {0, 1, 3, 1000, (1 << 20) + 1}) {
            INFO(name_of(type) << ", " << elems << " elements");
            std::vector<std::uint16_t> exact(static_cast<std::size_t>(elems)), rounded(exact);
            for (std::size_t i = 0; i < exact.size(); ++i) {
                exact[i] = narrow(static_cast<float>(static_cast<int>(i % 7) + world->rank()));
                rounded[i] = narrow(1.0f + static_cast<float>(i % 100) / 300.0f);
            }
            auto first = world->start(all_reduce(exact.data(), elems, type));
            auto second = world->start(all_reduce(rounded.data(), elems, type));
            first->wait();
            second->wait();
            // The bound allows for n - 1 additions of terms near 1, with sums up to n, and for the
            // rounding of each term.
            const double unit = type == DataType::bfloat16 ? 0x1p-8 : 0x1p-11;
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < exact.size(); ++i) {
                const int sum = n * static_cast<int>(i % 7) + n * (n - 1) / 2;
                wrong += widen(exact[i]) != static_cast<float>(sum);
                const double expected = n * (1.0 + static_cast<double>(i % 100) / 300.0);
                wrong += std::abs(double{widen(rounded[i])} - expected) > n * unit * expected;
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("a sum of 16-bit floats is rounded to the nearest, ties to even") {
    // Two ranks have a term each and the others zero, so that in any order only one addition
    // rounds: a term plus a part of its last place, scaled by a power of two.
    struct Case {
        int last_places;  // of the term, above 1
        float part;       // the part of a last place that is added
        int expected;     // last places of the sum
    };
    const std::vector<Case> cases = {{0, 0.25f, 0}, {0, 0.5f, 0}, {0, 0.75f, 1},
                                     {1, 0.25f, 1}, {1, 0.5f, 2}, {1, 0.75f, 2},
                                     {2, 0.5f, 2},  {3, 0.5f, 4}, {5, 0.875f, 6}};
    const int last = world->size() - 1;
    for (const DataType type : {DataType::bfloat16, DataType::float16}) {
        const bool bfloat = type == DataType::bfloat16;
        const auto narrow = bfloat ? &narrow::to_bfloat16 : &narrow::to_float16;
        const float place = bfloat ? 0x1p-7f : 0x1p-10f;  // the last place of 1
        std::vector<std::uint16_t> sum, expected;
        for (int i = 0; i < 1000; ++i) {
            const Case& c = cases[static_cast<std::size_t>(i) % cases.size()];
            const float scale = std::ldexp(i % 2 == 0 ? 1.0f : -1.0f, i % 5);
            float mine = 0.0f;
            mine += world->rank() == 0 ? 1.0f + static_cast<float>(c.last_places) * place : 0.0f;
            mine += world->rank() == last && last > 0 ? c.part * place : 0.0f;
            const int places = last > 0 ? c.expected : c.last_places;
            sum.push_back(narrow(mine * scale));
            expected.push_back(narrow((1.0f + static_cast<float>(places) * place) * scale));
        }
        INFO(name_of(type));
        world->start(all_reduce(sum.data(), static_cast<std::int64_t>(sum.size()), type))->wait();
        CHECK(sum == expected);
    }
}

TEST_CASE("all ranks gather each rank's data, between reductions") {
    const auto n = static_cast<std::size_t>(world->size());
    const auto rank = static_cast<std::size_t>(world->rank());
    for (const auto& [elems, type] : {std::pair{0, DataType::float32},
                                      {1, DataType::bfloat16},
                                      {3, DataType::float16},
                                      {250, DataType::float32},
                                      {(1 << 20) + 1, DataType::float32}}) {
        const std::size_t bytes = static_cast<std::size_t>(elems) * bytes_of(type);
        std::vector<unsigned char> all(n * bytes, 255);
        for (std::size_t i = 0; i < bytes; ++i) {
            all[rank * bytes + i] = static_cast<unsigned char>(rank * 31 + i % 7);
        }
        std::vector<float> before(5000, 1.0f), after(3, 2.0f);
        auto first = world->start(all_reduce(before.data(), 5000));
        auto second = world->start(all_gather(all.data(), elems, type));
        auto third = world->start(all_reduce(after.data(), 3));
        third->wait();
        second->wait();
        first->wait();
        std::size_t wrong = 0;
        for (std::size_t r = 0; r < n; ++r) {
            for (std::size_t i = 0; i < bytes; ++i) {
                wrong += all[r * bytes + i] != static_cast<unsigned char>(r * 31 + i % 7);
            }
        }
        CHECK(wrong == 0);
        CHECK(before[4999] == static_cast<float>(n));
        CHECK(after[2] == static_cast<float>(2 * n));
    }
}

TEST_CASE("each rank gets its row of a sum, between reductions") {
    const int n = world->size();
    const auto rank = static_cast<std::size_t>(world->rank());
    // Returns the term of rank `of`. It is not a small integer: the order of additions counts.
    const auto term = [](std::size_t i, int of) {
        return 1.0f + static_cast<float>((i * 7 + static_cast<std::size_t>(of) * 13) % 101) / 3.0f;
    };
    const auto next = term_sum_of(DataType::float32);
    for (const std::int64_t count : {0, 1, 3, 1000, 70'000, (1 << 20) + 1}) {
        const auto elems = static_cast<std::size_t>(count);
        std::vector<float> rows(elems * static_cast<std::size_t>(n));
        for (std::size_t i = 0; i < rows.size(); ++i) {
            rows[i] = term(i, world->rank());
        }
        std::vector<float> before(300'000, 1.0f), after(3, 2.0f);
        auto first = world->start(all_reduce(before.data(), 300'000));
        auto second = world->start(reduce_scatter(rows.data(), count));
        auto third = world->start(all_reduce(after.data(), 3));
        third->wait();
        second->wait();
        first->wait();
        std::vector<std::pair<TreeNode, std::vector<float>>> sums;
        const auto add = [&](std::vector<float>& left, const std::vector<float>& right) {
            next(left.data(), left.data(), right.data(), elems);
        };
        for (int r = 0; r < n; ++r) {
            std::vector<float> terms(elems);
            for (std::size_t i = 0; i < elems; ++i) {
                terms[i] = term(rank * elems + i, r);
            }
            push_node(sums, {r, r + 1}, terms, n, add);
        }
        const std::vector<float>& expected = sums.front().second;
        INFO(count << " elements");
        CHECK(std::equal(expected.begin(), expected.end(),
                         rows.begin() + static_cast<std::ptrdiff_t>(rank * elems)));
        std::size_t changed = 0;  // elements of the other rows
        for (std::size_t i = 0; i < rows.size(); ++i) {
            changed +=
                i / std::max<std::size_t>(elems, 1) != rank && rows[i] != term(i, world->rank());
        }
        CHECK(changed == 0);
        CHECK(before[299'999] == static_cast<float>(n));
        CHECK(after[2] == static_cast<float>(2 * n));
    }
}

TEST_CASE("rows of sums of 16-bit floats, and all rows gathered again") {
    const int n = world->size();
    const auto rank = static_cast<std::size_t>(world->rank());
    for (const DataType type : {DataType::bfloat16, DataType::float16}) {
        const bool bfloat = type == DataType::bfloat16;
        const auto narrow = bfloat ? &narrow::to_bfloat16 : &narrow::to_float16;
        for (const std::int64_t count : {1, 1001, 600'000}) {
            const std::size_t elems = static_cast<std::size_t>(count);
            std::vector<std::uint16_t> rows(elems * static_cast<std::size_t>(n)), sums(rows.size());
            for (std::size_t i = 0; i < rows.size(); ++i) {
                const int small = static_cast<int>(i % 7);
                rows[i] = narrow(static_cast<float>(small + world->rank()));
                sums[i] = narrow(static_cast<float>(n * small + n * (n - 1) / 2));
            }
            world->start(reduce_scatter(rows.data(), count, type))->wait();
            const auto own = static_cast<std::ptrdiff_t>(rank * elems);
            INFO(name_of(type) << ", " << count << " elements");
            CHECK(std::equal(sums.begin() + own, sums.begin() + own + count, rows.begin() + own));
            world->start(all_gather(rows.data(), count, type))->wait();
            CHECK(rows == sums);
        }
    }
}

TEST_CASE("ranks that are sometimes late change nothing") {
    std::mt19937 random(static_cast<std::mt19937::result_type>(world->rank()));
    for (int round = 0; round < 20; ++round) {
        std::vector<float> a(40'000, 1.0f), b(7, static_cast<float>(world->rank()));
        const auto pause = [&] {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
        };
        pause();
        auto first = world->start(all_reduce(a.data(), 40'000));
        pause();
        auto second = world->start(all_reduce(b.data(), 7));
        pause();
        (round % 2 == 0 ? first : second)->wait();
        pause();
        (round % 2 == 0 ? second : first)->wait();
        const int n = world->size();
        CHECK(std::count(a.begin(), a.end(), static_cast<float>(n)) == 40'000);
        CHECK(b[6] == static_cast<float>(n * (n - 1) / 2));
    }
}

TEST_CASE("sums within a pass, in host memory and through it") {
    const auto cpu = make_cpu_backend(1), gpu = make_emulated_backend({});
    for (Device* device : {static_cast<Device*>(cpu.get()), static_cast<Device*>(gpu.get())}) {
        INFO(device->description());
        gyre::test::StepWithSums step(*world, *device);
        CHECK(step.reducer.direct() == (device->host_memory() || world->size() == 1));
        for (int i = 0; i < 2; ++i) {
            step.submit();
            step.check();
        }
    }
}

TEST_CASE("a rank that waits for a late one leaves the processor to others") {
    if (world->size() == 1) {
        return;
    }
    const auto cpu_seconds = [] {
        rusage used{};
        getrusage(RUSAGE_SELF, &used);
        return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
               1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    };
    std::vector<float> values(40'000, 1.0f);
    double sum = 1.0;
    const auto reduce = [&] { world->start(all_reduce(values.data(), 40'000))->wait(); };
    const std::function<void()> waits[] = {reduce, [&] { world->barrier(); },
                                           [&] {
                                               world->allreduce_sum({&sum, 1});
                                           }};
    // Measures the share of the processor that this rank used while it waited for rank 0.
    const auto share = [&](const std::function<void()>& wait) {
        wait();  // until all ranks are here
        if (world->rank() == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
        }
        const auto begin = std::chrono::steady_clock::now();
        const double cpu = cpu_seconds();
        wait();
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
        return world->rank() == 0 || waited.count() < 0.2 ? 0.0
                                                          : (cpu_seconds() - cpu) / waited.count();
    };
    for (const auto& wait : waits) {
        // Polling would use all of it, every time. Other work on the machine, or a sanitizer, may
        // sometimes make a wait expensive, so the best of a few counts, as many on all ranks.
        double least = 1.0, above = 1.0;
        for (int i = 0; i < 5 && above > 0.0; ++i) {
            least = std::min(least, share(wait));
            above = least < 0.5 ? 0.0 : 1.0;
            world->allreduce_sum({&above, 1});
        }
        CHECK(least < 0.5);
    }
}

TEST_CASE("reductions may be waited for late and in any order") {
    std::vector<float> a(300'000, 1.0f), b(10, 2.0f);
    auto first = world->start(all_reduce(a.data(), 300'000));
    auto second = world->start(all_reduce(b.data(), 10));
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

TEST_CASE("ranks that differ are rejected, saying what differs") {
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
    Net net(*backend, load_model("net"), {1, 28, 28}, 10, {1, 1});
    net.initialise(5);
    require_same_parameters(*world, net, "step 1");
    if (world->size() == 1) {
        return;
    }
    // This changes the last bit of the last weight of fc1, on the last rank.
    if (world->rank() == world->size() - 1) {
        const model::Parameter& fc1 = net.parameters().at(4);
        float* weight = net.parameter_data() + fc1.offset_elems + fc1.elems - 1;
        *weight = std::nextafter(*weight, 1.0f);
    }
    expect_error(ExitCode::communication,
                 {"step 2", "fc1.weight", "on rank " + std::to_string(world->size() - 1)},
                 [&] { require_same_parameters(*world, net, "step 2"); });
}

int main(int argc, char** argv) {
    // Everything goes through the watchdog, as in the program.
    LaunchSpec launch;
    const char* const over = std::getenv("GYRE_TEST_COMM");  // as --comm; unset: shared memory
    launch.comm = over == nullptr ? "auto" : over;
    const auto comm = make_watched_communicator(make_communicator(launch), {});
    world = comm.get();
    if (world->size() > 1 && (over == nullptr) != world->description().starts_with("shared")) {
        std::printf("these ranks reduce over %s\n", world->description().c_str());
        return 1;
    }
    std::printf("rank %d of %d over %s\n", world->rank(), world->size(),
                world->description().c_str());
    return gyre::test::run_tests(argc, argv);
}
