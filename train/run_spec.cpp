#include "train/run_spec.hpp"

#include <fmt/format.h>

#include "comm/communicator.hpp"

namespace gyre::train {

int leaves(const BatchSpec& spec) {
    const std::int64_t passes = std::int64_t{spec.shards} * spec.accumulate;
    if (passes > kMostShards) {
        throw AgreedError(
            ExitCode::usage,
            fmt::format("`virtual-ranks` {} with `accumulate` {}: a step would have {} "
                        "passes, but it has {} at most; lower one of them",
                        spec.shards, spec.accumulate, passes, kMostShards));
    }
    return static_cast<int>(passes);
}

std::int64_t global_batch(const BatchSpec& spec, int ranks) {
    const std::int64_t passes =
        spec.shards > 0 ? leaves(spec) : std::int64_t{spec.accumulate} * ranks;
    return spec.global_batch ? *spec.global_batch : spec.batch_size * passes;
}

OptimizerSpec resolved_optimizer(const RunSpec& run, std::int64_t epoch_steps) {
    OptimizerSpec spec = run.optimizer;
    spec.schedule = in_steps(spec.schedule, run.stop.epochs, epoch_steps);
    if (run.net.precision == Precision::fp16 && !spec.loss_scaling) {
        spec.loss_scaling.emplace();
    }
    return spec;
}

}  // namespace gyre::train
