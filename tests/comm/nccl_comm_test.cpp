// Tests of the communicator over NCCL, on the emulated GPU and a fake NCCL (fake_nccl.cpp), run
// under mpirun with 1, 2, 3 and 4 ranks, and over Gloo with 3.
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "comm/nccl/nccl_communicator.hpp"
#include "comm/reducer.hpp"
#include "comm/watch/watchdog.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/train/step_with_sums.hpp"

using namespace gyre;
using namespace gyre::comm;
using gyre::test::all_gather;
using gyre::test::all_reduce;
using gyre::test::expect_error;
using gyre::test::reduce_scatter;

namespace {

Communicator* world = nullptr;  // MPI's; one per process

// Wraps `world`: MPI starts only once, but each test needs its own communicator over NCCL.
std::unique_ptr<Communicator> make(NcclOptions options) {
    return make_nccl_communicator(std::make_unique<gyre::test::BorrowedCommunicator>(*world),
                                  options);
}

NcclOptions required() {
    NcclOptions options;
    options.required = true;
    return options;
}

std::unique_ptr<Backend> gpu(int index) {
    GpuOptions options;
    options.device = index;
    return make_emulated_backend(options);
}

// Small integers, so that all sums are exact in 8 bits.
float value(std::size_t i, int rank) {
    return static_cast<float>(static_cast<int>(i % 7) + rank);
}
float expected(std::size_t i) {
    const int n = world->size();
    return static_cast<float>(n * static_cast<int>(i % 7) + n * (n - 1) / 2);
}

class Environment {
 public:
    Environment(const char* name, const char* text) : name_(name) { setenv(name, text, 1); }
    ~Environment() { unsetenv(name_); }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;

 private:
    const char* name_;
};

}  // namespace

TEST_CASE("sums of every type and size, several in flight, on the device") {
    const auto watched = make_watched_communicator(make(required()), {});
    const auto backend = gpu(world->rank());
    REQUIRE(watched->use_device(*backend));
    CHECK(watched->description().find("NCCL (2.28.9") == 0);
    for (const DataType type : {DataType::float32, DataType::bfloat16, DataType::float16}) {
        INFO(name_of(type));
        std::vector<DeviceBuffer<float>> data;
        std::vector<DeviceBuffer<std::uint16_t>> narrow;
        std::vector<std::unique_ptr<Request>> requests;
        for (const std::int64_t elems : {0, 1, 3, 1000, (1 << 20) + 1}) {
            auto& wide = data.emplace_back(*backend, elems);
            auto& half = narrow.emplace_back(*backend, elems);
            std::vector<float> host(static_cast<std::size_t>(elems));
            for (std::size_t i = 0; i < host.size(); ++i) {
                host[i] = value(i, world->rank());
            }
            if (elems > 0) {
                backend->upload(wide.get(), host.data(), wide.bytes());
            }
            void* sum = wide.get();
            if (type != DataType::float32) {
                backend->narrow(type, elems, wide.get(), half.get());
                sum = half.get();
            }
            requests.push_back(watched->start(all_reduce(sum, elems, type)));
        }
        for (std::size_t k = 0; k < data.size(); ++k) {
            requests[k]->wait_on_stream();
            if (type != DataType::float32) {
                backend->widen(type, data[k].elems(), narrow[k].get(), data[k].get());
            }
        }
        for (const auto& wide : data) {
            std::vector<float> host(static_cast<std::size_t>(wide.elems()));
            if (!host.empty()) {
                backend->download(host.data(), wide.get(), wide.bytes());
            }
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < host.size(); ++i) {
                wrong += host[i] != expected(i);
            }
            INFO(host.size());
            CHECK(wrong == 0);
        }
        for (const auto& request : requests) {
            request->wait();
        }
    }
}

TEST_CASE("gatherings on the device keep their order among sums") {
    const auto comm = make_watched_communicator(make(required()), {});
    const auto backend = gpu(world->rank());
    REQUIRE(comm->use_device(*backend));
    const auto ranks = static_cast<std::size_t>(world->size());
    const auto own = static_cast<std::size_t>(world->rank());
    for (const auto& [elems, type] :
         {std::pair{0, DataType::float32}, {5, DataType::bfloat16}, {150'000, DataType::float32}}) {
        const std::size_t bytes = static_cast<std::size_t>(elems) * bytes_of(type);
        std::vector<std::uint8_t> host(ranks * bytes);
        for (std::size_t i = 0; i < bytes; ++i) {
            host[own * bytes + i] = static_cast<std::uint8_t>(i * 7 + own);
        }
        DeviceBuffer<std::uint8_t> data(*backend, static_cast<std::int64_t>(host.size()));
        DeviceBuffer<float> one(*backend, 1);
        const float x = value(1, world->rank());
        if (bytes > 0) {
            backend->upload(data.get(), host.data(), host.size());
        }
        backend->upload(one.get(), &x, sizeof x);
        const auto gathering = comm->start(all_gather(data.get(), elems, type));
        const auto sum = comm->start(all_reduce(one.get(), 1));
        gathering->wait_on_stream();
        sum->wait_on_stream();
        float total = 0.0f;
        if (bytes > 0) {
            backend->download(host.data(), data.get(), host.size());
        }
        backend->download(&total, one.get(), sizeof total);
        gathering->wait();
        sum->wait();
        CHECK(total == expected(1));
        std::size_t wrong = 0;
        for (std::size_t r = 0; r < ranks; ++r) {
            for (std::size_t i = 0; i < bytes; ++i) {
                wrong += host[r * bytes + i] != static_cast<std::uint8_t>(i * 7 + r);
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("rows of sums on the device, gathered again") {
    const auto comm = make_watched_communicator(make(required()), {});
    const auto backend = gpu(world->rank());
    REQUIRE(comm->use_device(*backend));
    const auto ranks = static_cast<std::size_t>(world->size());
    for (const std::int64_t count : {0, 5, 100'000}) {
        const std::size_t elems = static_cast<std::size_t>(count);
        std::vector<float> host(ranks * elems);
        for (std::size_t i = 0; i < host.size(); ++i) {
            host[i] = value(i, world->rank());
        }
        DeviceBuffer<float> data(*backend, static_cast<std::int64_t>(host.size()));
        const auto download = [&] {
            if (!host.empty()) {
                backend->download(host.data(), data.get(), data.bytes());
            }
        };
        if (!host.empty()) {
            backend->upload(data.get(), host.data(), data.bytes());
        }
        const auto sums = comm->start(reduce_scatter(data.get(), count));
        sums->wait_on_stream();
        download();
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < host.size(); ++i) {
            const bool own = i / elems == static_cast<std::size_t>(world->rank());
            wrong += host[i] != (own ? expected(i) : value(i, world->rank()));
        }
        CHECK(wrong == 0);
        const auto rows = comm->start(all_gather(data.get(), count));
        rows->wait_on_stream();
        download();
        for (std::size_t i = 0; i < host.size(); ++i) {
            wrong += host[i] != expected(i);
        }
        CHECK(wrong == 0);
        sums->wait();
        rows->wait();
    }
}

TEST_CASE("a reducer leaves gradients on the device") {
    const auto comm = make(required());
    const auto backend = gpu(world->rank());
    constexpr std::int64_t kElems = 40'000;
    DeviceBuffer<float> gradients(*backend, kElems);
    std::vector<float> host(kElems);
    for (int again = 0; again < 2; ++again) {  // the second reducer finds NCCL running
        std::vector<Bucket> buckets = plan_buckets({0, 16, 20'000}, kElems, 16 << 10);
        for (Bucket& bucket : buckets) {
            bucket.type = again == 1 ? DataType::bfloat16 : DataType::float32;
        }
        Reducer reducer(*comm, *backend, buckets, gradients.get());
        for (std::size_t i = 0; i < host.size(); ++i) {
            host[i] = value(i, world->rank());
        }
        backend->upload(gradients.get(), host.data(), gradients.bytes());
        reducer.begin_step();
        reducer.ready(20'000);
        reducer.ready(0);
        std::int64_t arrived = 0;
        reducer.finish_step([&](const Bucket& bucket) { arrived += bucket.elems(); });
        reducer.synchronize_step();
        CHECK(arrived == kElems);
        backend->download(host.data(), gradients.get(), gradients.bytes());
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < host.size(); ++i) {
            wrong += host[i] != expected(i);
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("sums within a pass, step by step and in a graph") {
    const auto comm = make_watched_communicator(make(required()), {});
    const auto backend = gpu(world->rank());
    gyre::test::StepWithSums step(*comm, *backend);
    CHECK(step.reducer.direct());
    for (int i = 0; i < 2; ++i) {
        step.submit();
        step.check();
    }
    const Reducer::Captured captured = step.reducer.capture([&] { step.submit(); });
    CHECK(captured.collectives ==
          (world->size() == 1 ? 0 : static_cast<std::size_t>(step.collectives())));
    for (int i = 0; i < 2; ++i) {
        step.reducer.launch(captured);
        step.check();
    }
}

TEST_CASE("a call that is soon answered does not sleep") {
    const auto comm = make(required());
    const auto backend = gpu(world->rank());
    REQUIRE(comm->use_device(*backend));
    const DeviceBuffer<float> data(*backend, 4);
    // A thread that sleeps gives its processor up, on a machine of any speed.
    const auto given_up = [] {
        struct rusage usage = {};
        REQUIRE(getrusage(RUSAGE_THREAD, &usage) == 0);
        return usage.ru_nvcsw;
    };
    // A thread that another one displaces on its way into a sleep may wake without having given
    // anything up: hence several sleeps, of which one must count.
    const long before = given_up();
    for (int i = 0; i < 1000 && given_up() == before; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(given_up() > before);
    int awake = 0;
    for (int i = 0; i < 300; ++i) {
        const long begin = given_up();
        const auto request = comm->start(all_reduce(data.get(), 4));
        awake += given_up() == begin ? 1 : 0;
        request->wait();
    }
    CHECK(awake > 0);
}

TEST_CASE("two ranks on one GPU are rejected with a table, unless they are to share it") {
    if (world->size() == 1) {
        return;
    }
    // The last rank uses rank 0's GPU.
    const bool last = world->rank() == world->size() - 1;
    const auto backend = gpu(last ? 0 : world->rank());
    const std::string row = std::to_string(world->size() - 1) + "  ";
    expect_error(ExitCode::communication,
                 {"share a GPU", "PCI bus id", "\n     0  ", row, "emulated:00.0", "EMULATED-",
                  "`share-gpu`"},
                 [&] { make(required())->use_device(*backend); });
    CHECK(std::getenv("NCCL_HOSTID") == nullptr);
    const Environment p2p("NCCL_P2P_DISABLE", "0");  // the user's own setting stays
    NcclOptions sharing = required();
    sharing.share_gpu = true;
    CHECK(make(sharing)->use_device(*backend));
    const char* id = std::getenv("NCCL_HOSTID");
    REQUIRE(id != nullptr);
    CHECK(std::string(id).ends_with("-rank-" + std::to_string(world->rank())));
    CHECK(std::getenv("NCCL_SHM_DISABLE") == std::string("1"));
    CHECK(std::getenv("NCCL_P2P_DISABLE") == std::string("0"));
    unsetenv("NCCL_HOSTID");
    unsetenv("NCCL_SHM_DISABLE");
}

TEST_CASE("if NCCL never gets ready, the deadline ends it, even if its abort hangs") {
    NcclOptions options = required();
    options.init_timeout = 0.5;
    for (const char* faults : {"init", "init,abort"}) {
        if (world->size() != 2 && faults != std::string("init")) {
            continue;  // this takes seconds and is the same with other numbers of ranks
        }
        const Environment fault("GYRE_FAKE_NCCL", faults);
        const auto backend = gpu(world->rank());
        const auto begin = std::chrono::steady_clock::now();
        expect_error(ExitCode::communication,
                     {"has not connected", "0.5 s (`init-timeout`)", "rank ", " on ",
                      "NCCL_SOCKET_IFNAME", "NCCL_DEBUG=INFO", "firewall"},
                     [&] { make(options)->use_device(*backend); });
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        CHECK(took.count() >= 0.5);
        CHECK(took.count() < 8.0);
    }
}

TEST_CASE("a device that NCCL cannot use, or a missing library") {
    const auto cpu = make_cpu_backend(1);
    expect_error(ExitCode::usage, {"rank 0 on ", "`device` cuda", "`comm` auto"},
                 [&] { make(required())->use_device(*cpu); });
    CHECK(make({})->use_device(*cpu));
    const auto backend = gpu(world->rank());
    CHECK(!make({})->use_device(*backend));  // for auto the emulated GPU does not count
    const std::string fake = std::getenv("GYRE_NCCL_LIBRARY");
    {
        const Environment nowhere("GYRE_NCCL_LIBRARY", "/nowhere/libnccl.so.2");
        expect_error(
            ExitCode::usage,
            {"/nowhere/libnccl.so.2", "libnccl2", "site-packages/nvidia/nccl/lib", "`comm` mpi"},
            [&] { make(required())->use_device(*backend); });
    }
    setenv("GYRE_NCCL_LIBRARY", fake.c_str(), 1);
}

int main(int argc, char** argv) {
    const auto comm = make_communicator();
    world = comm.get();
    return gyre::test::run_tests(argc, argv);
}
