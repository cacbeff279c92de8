// Launches of steps that the host has submitted and the device may not have finished, and the
// results on their way back.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/ops/backend.hpp"
#include "model/step_stats.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// A launch is one step or, as a graph, several. Each has a slot: pinned memory for what its steps
// read and leave. Slots are used in turn, so a launch's results are read before its slot is used
// again.
class LaunchQueue {
 public:
    // A device works while the host continues, with at most this many launches unfinished; calls to
    // a CPU are done when they return.
    static constexpr int kMaxInFlight = 2;

    // stats: on the device, where each step leaves its statistics. word_ranks: 0 if FiniteCheck's
    // word is among them; otherwise each of so many ranks has a word of its own, since it sees the
    // gradients of its share only.
    LaunchQueue(Backend& backend, StepStats* stats, int max_steps, int word_ranks);

    std::int64_t max_in_flight() const { return max_in_flight_; }
    std::size_t slots() const { return static_cast<std::size_t>(max_in_flight_) + 1; }
    int max_steps() const { return max_steps_; }  // of a launch

    // The slot of the next launch, and the memory that is uploaded before it.
    std::size_t next_slot() const { return static_cast<std::size_t>(launched_) % slots(); }
    StepScalars* scalars() { return scalars_.get() + first_of(next_slot()); }  // [max_steps]
    EpochPlace* place() { return places_.get() + next_slot(); }

    // Among the calls of a launch of several steps, after those of step `index`: keeps its results
    // on the device, as the next step overwrites them.
    void keep_results(int index);
    // After the calls of a launch whose first step is `step`: downloads the results of its steps.
    void push(std::int64_t step, int steps);

    std::int64_t size() const { return std::ssize(launches_); }
    int steps_of_oldest() const { return launches_.front().steps; }
    struct Result {
        std::int64_t step;
        const StepStats& stats;  // until the launch is popped and its slot used again
        float learning_rate;
        std::int32_t nonfinite_word;  // the greatest of all ranks
    };
    // Waits for the oldest launch. What the device sets and no kernel resets is reset: a request
    // to save, and words of FiniteCheck; steps that were submitted meanwhile still report them.
    Result read_oldest(int index);
    void pop();

    // The word in which the FiniteCheck of `rank` reports.
    std::int32_t* nonfinite_word(int rank) {
        return words_.get() == nullptr ? &stats_->not_finite : words_.get() + rank;
    }
    // The words of all ranks, [word_ranks], to be gathered in each step; null: there are none.
    std::int32_t* words() { return words_.get(); }

 private:
    struct Launch {
        std::int64_t step;  // the first
        int steps;
        std::size_t slot;
        Device::Event transfer;
    };
    std::size_t first_of(std::size_t slot) const {
        return slot * static_cast<std::size_t>(max_steps_);
    }
    std::size_t word_ranks() const { return static_cast<std::size_t>(words_.elems()); }

    Backend& backend_;
    StepStats* const stats_;
    const int max_in_flight_;
    const int max_steps_;
    // On the device: of the steps of a launch of several, [max_steps] and [max_steps][word_ranks].
    DeviceBuffer<StepStats> stats_ring_;
    DeviceBuffer<std::int32_t> words_, words_ring_;
    // [slots][max_steps], words also [word_ranks].
    PinnedBuffer<StepStats> all_stats_;
    PinnedBuffer<StepScalars> scalars_;
    PinnedBuffer<std::int32_t> all_words_;
    PinnedBuffer<EpochPlace> places_;  // [slots]
    std::vector<Launch> launches_;     // unfinished, the oldest first
    std::int64_t launched_ = 0;
};

}  // namespace gyre::train
