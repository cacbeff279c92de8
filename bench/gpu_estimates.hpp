// Counts the benchmarked operations on the emulator, prints the counts with --profile, and compares
// estimates with the times of a GPU.
#pragma once

#include <memory>
#include <string>

#include "bench/kernels.hpp"
#include "bench/report.hpp"

namespace gyre::bench {

class Estimates {
 public:
    // device: the name that the GPU or the emulator reports.
    Estimates(const Options& options, const std::string& device);
    ~Estimates();

    // Counts one call of ours and keeps a report about it for text().
    void add_counts(const Row& row);
    // Estimates the time of the row, which has been timed; 0 if this GPU is unknown.
    double estimate_us(const Row& row);
    // Returns all counts. After estimates, returns their error instead: with the constants as they
    // are, and with constants fitted to every second row, for those rows and for the others.
    std::string text() const;

 private:
    struct State;
    const std::unique_ptr<State> state_;
};

}  // namespace gyre::bench
