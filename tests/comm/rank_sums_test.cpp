// Tests of sums over the ranks within a pass.
#include <cstdlib>
#include <string>
#include <utility>

#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "tests/support/thread_ranks.hpp"
#include "tests/train/step_with_sums.hpp"

using namespace gyre;
using namespace gyre::comm;
using gyre::test::StepWithSums;
using gyre::test::ThreadRanks;

namespace {

// A communicator whose collectives run on the device and are complete when the host has waited.
class OnDevice final : public gyre::test::OneOfTwo {
 public:
    bool use_device(Device&) override { return true; }
    std::unique_ptr<Request> start(const Collective& collective) override {
        started.push_back(collective.origin);
        return std::make_unique<Counted>(*this);
    }
    std::vector<Origin> started;
    int waited = 0, abandoned = 0;

 private:
    struct Counted final : Request {
        explicit Counted(OnDevice& comm_) : comm(comm_) {}
        void wait() override { ++comm.waited; }
        bool wait_on_stream() override { return false; }
        void abandon() override { ++comm.abandoned; }
        OnDevice& comm;
    };
};

}  // namespace

TEST_CASE("all ranks get the sums of a pass, whatever buckets are under way") {
    for (const int ranks : {1, 2, 3, -2, -3}) {  // or through the host's memory
        INFO(ranks << " ranks");
        ThreadRanks job(std::abs(ranks));
        job.direct = ranks > 0;
        job.run([](Communicator& comm) {
            const auto device = make_cpu_backend(1);
            StepWithSums step(comm, *device);
            for (int i = 0; i < 3; ++i) {
                step.submit();
                step.check();
            }
        });
        CHECK(job.reductions == (ranks == 1 ? 0 : 3 * StepWithSums::collectives()));
    }
}

TEST_CASE("the host waits for sums on the device with their step, but not in a graph") {
    OnDevice comm;
    const auto device = make_emulated_backend({});
    const DeviceBuffer<float> gradients(*device, 16), values(*device, 4);
    Reducer reducer(comm, *device, {{0, 16}}, gradients.get());
    const auto submit = [&] {
        reducer.begin_step();
        reducer.sum({values.get(), 4});
        reducer.sum({values.get(), 4});
        reducer.ready(0);
        reducer.finish_step([](const Bucket&) {});
    };
    submit();
    submit();
    CHECK(comm.waited == 0);
    reducer.synchronize_step();
    CHECK(comm.waited == 3);
    reducer.synchronize_step();
    CHECK(comm.waited == 6);
    const Reducer::Captured captured = reducer.capture(submit);
    CHECK(captured.collectives == 3);
    CHECK(comm.abandoned == 3);
    CHECK(comm.waited == 6);
}

TEST_CASE("a sum is labelled as statistics of its step") {
    OnDevice comm;
    const auto device = make_cpu_backend(1);
    std::vector<float> gradients(16), values(4);
    Reducer reducer(comm, *device, {{0, 16}}, gradients.data());
    reducer.sum({values.data(), 4});  // before any step
    for (int step = 0; step < 2; ++step) {
        comm.started.clear();
        reducer.begin_step();
        reducer.sum({values.data(), 4});
        reducer.sum({values.data(), 4});
        REQUIRE(comm.started.size() == 2);
        for (int i = 0; i < 2; ++i) {
            const Origin& origin = comm.started[static_cast<std::size_t>(i)];
            CHECK(origin.step == step);
            CHECK(origin.part == std::string("statistics"));
            CHECK(origin.index == i);
        }
    }
}
