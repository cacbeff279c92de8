// gyre train --audit: a rank that miscalculates is found, and the audit changes no bit.
#include "train/audit.hpp"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/host_name.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/thread_ranks.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

constexpr int kClasses = 3, kBatch = 12;

// Changes the last bit of one parameter of a rank for one step, as faulty memory may.
class Fault final : public FitObserver {
 public:
    Fault(int rank, std::int64_t step) : rank_(rank), step_(step) {}
    void on_launch(const Training& training, std::int64_t number) override {
        if (number == step_) {
            flip(training);
        }
    }
    bool pauses_after(std::int64_t steps) override { return steps == step_; }
    void on_pause(const Training& training) override {
        if (training.steps() == step_) {
            flip(training);
        }
    }

 private:
    void flip(const Training& training) const {
        if (training.session.communicator().rank() == rank_) {
            float* const parameter = training.session.net().parameter_data();
            std::uint32_t bits = 0;
            std::memcpy(&bits, parameter, sizeof bits);
            bits ^= 1;
            std::memcpy(parameter, &bits, sizeof bits);
        }
    }
    const int rank_;
    const std::int64_t step_;
};

// The parameters and running statistics at the end of 10 steps, of which the last one of an epoch
// is uneven.
std::vector<HostTensor> trained(const std::string& norm, int ranks, std::int64_t audit,
                                bool warns = false, std::int64_t fault = 0) {
    RunSpec run;
    run.batch.global_batch = kBatch;
    run.batch.shards = 4;
    run.stop.epochs = 2;
    run.evaluation.enabled = false;
    run.reports.audit = audit;
    std::vector<HostTensor> weights;
    Ending ending = Ending::interrupted;
    ThreadRanks(ranks).run([&](Communicator& comm) {
        const std::unique_ptr<Backend> backend = make_cpu_backend(1);
        Session session(
            comm, *backend, run,
            {.model = parse_model("conv 3 k3\n" + norm + "\nrelu\ndropout 0.5\nlinear classes\n",
                                  "small"),
             .classes = kClasses},
            random_images(5 * kBatch - 5, {1, 6, 6}, kClasses), {{0.5f}, {0.3f}});
        session.initialise();
        Training training{.session = session, .run = run, .evaluated = {"test", nullptr}};
        Audit auditor(audit > 0 ? audit : 1, warns);
        Fault faulty(1, fault);
        std::vector<FitObserver*> observers = {&faulty};
        if (audit > 0) {
            observers.insert(observers.begin(), &auditor);
        }
        const Ending end = fit(training, observers);
        if (comm.is_root()) {  // the checks are not for threads
            ending = end;
            weights = session.net().export_parameters();
        }
    });
    CHECK(ending == Ending::complete);
    return weights;
}

}  // namespace

TEST_CASE("an audit finds nothing where nothing is wrong, and changes no bit", "[audit]") {
    const std::string norm = GENERATE("batchnorm local", "batchnorm");
    INFO(norm);
    const std::vector<HostTensor> without = trained(norm, 1, 0);
    for (const int ranks : {1, 2, 3, 4}) {
        for (const std::int64_t every : {1, 3}) {
            INFO(ranks << " ranks, every " << every);
            const std::vector<HostTensor> with = trained(norm, ranks, every);
            REQUIRE(with.size() == without.size());
            for (std::size_t i = 0; i < with.size(); ++i) {
                CHECK(with[i].values == without[i].values);
            }
        }
    }
}

TEST_CASE("an audit names the ranks between which one changed bit makes a difference", "[audit]") {
    const std::string norm = GENERATE("batchnorm local", "batchnorm");
    for (const int ranks : {2, 3, 4}) {
        for (const std::int64_t step : {3, 6, 9}) {
            INFO(norm << ", " << ranks << " ranks, step " << step);
            expect_error(ExitCode::differs,
                         {"step " + std::to_string(step) + ":", "rank 1", host_name()},
                         [&] { trained(norm, ranks, 3, false, step); });
            CHECK(!trained(norm, ranks, 3, true, step).empty());  // told, and no end
        }
    }
}
