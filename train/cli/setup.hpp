// Objects that several subcommands make from their flags.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "comm/communicator.hpp"
#include "data/dataset.hpp"
#include "kernels/ops/backend.hpp"
#include "train/run_spec.hpp"

namespace gyre::train {

// A message of the library with the flags that set its options.
std::string with_flag_names(std::string_view message);

// The backend for --device auto|cpu|cuda|emulated.
std::unique_ptr<Backend> make_backend(const RunSpec& run, const Communicator& comm);

// Messages about loading a data set: on standard error, by rank 0 only, unless quiet.
TellOfData tell_of_data(const Communicator& comm, bool quiet);

// The user's mean and standard deviation, or those measured on the training set.
Normalisation choose_normalisation(const DataSpec& spec, const ImageSet& train);

}  // namespace gyre::train
