#include "train/tune.hpp"

#include <algorithm>

#include "base/clock.hpp"
#include "train/kept_net.hpp"

namespace gyre::train {
namespace {

std::vector<std::vector<Bucket>> different_plans(const Session& session) {
    std::vector<std::vector<Bucket>> plans = {session.plan(std::nullopt)};
    for (std::int64_t kib = 16; kib <= 65536; kib *= 4) {
        const auto another = session.plan(kib * 1024);
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

// Seconds of a step, on this rank.
double seconds_with(Session& session, const std::vector<Bucket>& buckets) {
    constexpr int kSteps = 20, kFirstSteps = 6;  // in which the step is captured, too
    session.restart(buckets, 1);                 // the same step again and again
    Trainer& trainer = session.trainer();
    trainer.begin_epoch(1);
    Clock::time_point begin;
    for (int step = -kFirstSteps; step < kSteps; ++step) {
        if (step == 0) {
            session.backend().synchronize();
            session.communicator().barrier();
            begin = Clock::now();
        }
        trainer.step(0, false);
    }
    while (trainer.next_result()) {
    }
    return seconds_since(begin) / kSteps;
}

}  // namespace

std::vector<BucketTrial> tune_buckets(Session& session) {
    Communicator& comm = session.communicator();
    KeptNet kept(session.backend(), session.net());
    std::vector<BucketTrial> trials;
    std::vector<double> seconds;
    for (const std::vector<Bucket>& buckets : different_plans(session)) {
        trials.push_back({.buckets = buckets});
        seconds.push_back(seconds_with(session, buckets) / comm.size());
        kept.put_back();
    }
    comm.allreduce_sum(seconds);  // the mean of the ranks, the same number on all
    for (std::size_t i = 0; i < trials.size(); ++i) {
        trials[i].seconds = seconds[i];
    }
    BucketTrial& best = *std::min_element(
        trials.begin(), trials.end(),
        [](const BucketTrial& a, const BucketTrial& b) { return a.seconds < b.seconds; });
    best.taken = true;
    session.restart(best.buckets);
    return trials;
}

}  // namespace gyre::train
