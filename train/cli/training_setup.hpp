// Checks and facts that gyre train needs before a training.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/communicator.hpp"
#include "data/dataset.hpp"
#include "kernels/ops/backend.hpp"
#include "model/net.hpp"
#include "model/spec.hpp"
#include "train/checkpoint.hpp"
#include "train/run_spec.hpp"
#include "train/tune.hpp"

namespace gyre::train {

// Throws Error(usage) for flags that exclude each other, or need others.
void check_together(const RunSpec& options);
// Names flags that have no effect without others on standard error.
void tell_of_ignored(const RunSpec& options);
void tell_of_idle_gpus(const Communicator& comm, const Backend& backend, bool quiet);
// The same if the backend is slower in the run's precision than in fp32.
void tell_of_slow_precision(const Communicator& comm, const Backend& backend,
                            const RunSpec& options);

// Collective. The files that rank 0 was asked for, since only it reads and writes files; it names
// those that another rank was asked for and it was not.
struct RootFiles {
    bool saves = false, resumes = false, traces = false;
};
RootFiles root_files(Communicator& comm, const RunSpec& options);

// Collective. What a training that resumes must have again, to the last bit the same: flags, and
// what follows from them and the data. Throws AgreedError if the ranks' models or data differ.
Identity identity_of(const RunSpec& options, const ModelSpec& model, const Dataset& data,
                     const Backend& backend, Communicator& comm);

// The numbers of images of the sets that are evaluated: none, test, or test and validation.
std::vector<std::int64_t> evaluated_images(const RunSpec& options, const Dataset& data);

// Says that the training ended before the steps that were to be traced.
void tell_of_empty_trace(const ReportSpec& reports);

// Prints a line for each plan that --tune-buckets has timed.
void print_trials(const std::vector<BucketTrial>& trials);

}  // namespace gyre::train
