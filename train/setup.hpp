// What `gyre train` and `gyre eval` set up alike, and the choices made on the way.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.hpp"
#include "comm/reducer.hpp"
#include "data/dataset.hpp"
#include "kernels/backend.hpp"
#include "train/options.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Worker threads for this rank: as asked, or this rank's share of the processors it may run on.
int choose_threads(int asked, const Communicator& comm);

// The backend for --device auto|cpu|cuda.
std::unique_ptr<Backend> make_backend(const CommonOptions& options, const Communicator& comm);

// Whether the step is to be captured as a graph, the same on all ranks. Throws AgreedError(usage)
// for --graph on where it cannot be.
bool choose_graph(const TrainOptions& options, const Backend& backend, const Reducer& reducer);

// The user's mean and standard deviation, or those measured on the training set.
Normalisation choose_normalisation(const CommonOptions& options, const ImageSet& train);

// A hash of everything in the set that training depends on.
std::string hash_dataset(const Dataset& dataset);
std::string hash_text(const std::string& text);
std::uint64_t hash_bytes(const void* data, std::size_t bytes);

// The version of gyre, and how it was built.
std::string version_text();

}  // namespace gyre::train
