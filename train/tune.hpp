// --tune-buckets: the size of buckets with which steps are fastest here.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "comm/reducer.hpp"
#include "data/sampler.hpp"
#include "model/net.hpp"
#include "train/factors.hpp"
#include "train/images.hpp"
#include "train/options.hpp"

namespace gyre::train {

using PlanBuckets = std::function<std::vector<Bucket>(std::optional<std::int64_t> bucket_kib)>;

// Collective. Takes 26 steps on the first batch with each of several plans, and returns the plan
// that was fastest over the last 20, the same on all ranks. Every plan begins with the net as it
// was, and so does what follows.
std::vector<Bucket> tune_buckets(Communicator& comm, Backend& backend, Net& net,
                                 DeviceImages& images, const TrainOptions& options,
                                 const Sharding& sharding, const PlanBuckets& plan,
                                 const std::vector<FactoredLayer>& factored, int train_batch);

}  // namespace gyre::train
