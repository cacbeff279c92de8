// What the emulator counts of the operations that are benchmarked: printed with --profile, and
// beside the times of a GPU as estimates with their error.
#pragma once

#include <memory>
#include <string>

#include "bench/kernels.hpp"
#include "bench/report.hpp"

namespace gyre::bench {

class Estimates {
 public:
    // device: as the GPU calls itself, or of the emulator.
    Estimates(const Options& options, const std::string& device);
    ~Estimates();

    // Counts one call of ours and keeps what there is to say of it.
    void add_counts(const Row& row);
    // Of the row, which has been timed; 0 where nothing is known of this GPU.
    double estimate_us(const Row& row);
    // All of the first; of the second, how far they are from the times: as they are, and with their
    // constants fitted to every second row, over the others.
    std::string text() const;

 private:
    struct State;
    const std::unique_ptr<State> state_;
};

}  // namespace gyre::bench
