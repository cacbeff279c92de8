#include "train/tune.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "kernels/base/clock.hpp"
#include "train/optimizer.hpp"
#include "train/setup.hpp"
#include "train/trainer.hpp"

namespace gyre::train {
namespace {

// What steps change of a net and the next step builds on: the parameters, and in the gradient
// buffer the padding and the tail, which no kernel overwrites.
class KeptNet {
 public:
    KeptNet(Backend& backend, Net& net)
        : backend_(backend), net_(net), parameters_(static_cast<std::size_t>(net.flat_elems())) {
        backend.download(parameters_.data(), net.parameter_data(), bytes());
    }
    void put_back() {
        backend_.upload(net_.parameter_data(), parameters_.data(), bytes());
        backend_.fill_zero(net_.gradient_data(),
                           static_cast<std::size_t>(net_.gradient_elems()) * sizeof(float));
    }

 private:
    std::size_t bytes() const { return parameters_.size() * sizeof(float); }

    Backend& backend_;
    Net& net_;
    std::vector<float> parameters_;  // with their padding
};

std::vector<std::vector<Bucket>> different_plans(const PlanBuckets& plan) {
    std::vector<std::vector<Bucket>> plans = {plan(std::nullopt)};
    for (std::int64_t kib = 16; kib <= 65536; kib *= 4) {
        const auto another = plan(kib);
        const auto same = [&](const std::vector<Bucket>& other) {
            return std::equal(other.begin(), other.end(), another.begin(), another.end(),
                              [](const Bucket& a, const Bucket& b) { return a.begin == b.begin; });
        };
        if (std::none_of(plans.begin(), plans.end(), same)) {
            plans.push_back(another);
        }
    }
    return plans;
}

double largest_kib(const std::vector<Bucket>& buckets) {
    std::int64_t bytes = 0;
    for (const Bucket& bucket : buckets) {
        bytes = std::max(bytes, bucket.bytes());
    }
    return static_cast<double>(bytes) / 1024.0;
}

}  // namespace

std::vector<Bucket> tune_buckets(Communicator& comm, Backend& backend, Net& net,
                                 DeviceImages& images, const TrainOptions& options,
                                 const Sharding& sharding, const PlanBuckets& plan,
                                 const std::vector<FactoredLayer>& factored, int train_batch) {
    constexpr int kSteps = 20, kWarmUps = 6;  // in which the step is captured, too
    KeptNet kept(backend, net);
    const std::vector<std::vector<Bucket>> plans = different_plans(plan);
    std::vector<double> seconds;
    for (const std::vector<Bucket>& buckets : plans) {
        Optimizer optimizer(backend, net, options);
        Reducer reducer(comm, backend, buckets, net.gradient_data(), options.comm_dtype,
                        net.tail_offset());
        Factors factors(backend, net, comm, reducer, factored, train_batch);
        Trainer trainer(backend, net, images, optimizer, reducer, sharding,
                        {options.seed, options.shuffle, options.accumulate,
                         choose_graph(options, backend, reducer)},
                        &factors);
        trainer.begin_epoch(1);
        Clock::time_point begin;
        for (int step = -kWarmUps; step < kSteps; ++step) {
            if (step == 0) {
                backend.synchronize();
                comm.barrier();
                begin = Clock::now();
            }
            trainer.step(0, false);
        }
        while (trainer.next_result()) {
        }
        seconds.push_back(seconds_since(begin) / comm.size());
        kept.put_back();
    }
    comm.allreduce_sum(seconds);  // the mean of the ranks, the same number on all
    const auto best = static_cast<std::size_t>(std::min_element(seconds.begin(), seconds.end()) -
                                               seconds.begin());
    if (comm.is_root() && !options.quiet) {
        for (std::size_t i = 0; i < plans.size(); ++i) {
            fmt::print(
                "--tune-buckets: {:>3} bucket{}, largest {:>8.1f} KiB: {:>9.3f} ms a step{}\n",
                plans[i].size(), plans[i].size() == 1 ? " " : "s", largest_kib(plans[i]),
                1e3 * seconds[i] / kSteps,
                i == best ? "  (taken)"
                : i == 0  ? "  (auto)"
                          : "");
        }
        std::fflush(stdout);
    }
    return plans[best];
}

}  // namespace gyre::train
