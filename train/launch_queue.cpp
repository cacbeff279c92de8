#include "train/launch_queue.hpp"

#include <algorithm>

namespace gyre::train {

LaunchQueue::LaunchQueue(Backend& backend, StepStats* stats, int max_steps, int word_ranks)
    : backend_(backend),
      stats_(stats),
      max_in_flight_(backend.host_memory() ? 0 : kMaxInFlight),
      max_steps_(max_steps),
      stats_ring_(backend, max_steps),
      words_(word_ranks > 0 ? DeviceBuffer<std::int32_t>(backend, word_ranks)
                            : DeviceBuffer<std::int32_t>()),
      words_ring_(backend, std::int64_t{max_steps} * word_ranks),
      all_stats_(backend, std::int64_t(first_of(slots()))),
      scalars_(backend, all_stats_.elems()),
      all_words_(backend, all_stats_.elems() * word_ranks),
      places_(backend, std::int64_t(slots())) {
    launches_.reserve(slots());
}

void LaunchQueue::keep_results(int index) {
    backend_.copy(stats_ring_.get() + index, stats_, sizeof(StepStats));
    if (words() != nullptr) {
        backend_.copy(words_ring_.get() + static_cast<std::size_t>(index) * word_ranks(), words(),
                      words_.bytes());
    }
}

void LaunchQueue::push(std::int64_t step, int steps) {
    const std::size_t slot = next_slot(), first = first_of(slot);
    const auto count = static_cast<std::size_t>(steps);
    const auto download = [&](void* to, const void* from, std::size_t bytes) {
        return backend_.download_async(Device::Stream::compute, to, from, bytes);
    };
    if (words() != nullptr) {
        download(all_words_.get() + first * word_ranks(), steps > 1 ? words_ring_.get() : words(),
                 count * words_.bytes());
    }
    launches_.push_back(
        {.step = step,
         .steps = steps,
         .slot = slot,
         .transfer = download(all_stats_.get() + first, steps > 1 ? stats_ring_.get() : stats_,
                              count * sizeof(StepStats))});
    ++launched_;
}

LaunchQueue::Result LaunchQueue::read_oldest(int index) {
    const Launch& launch = launches_.front();
    backend_.synchronize(launch.transfer);
    const std::size_t at = first_of(launch.slot) + static_cast<std::size_t>(index);
    const StepStats& stats = all_stats_.get()[at];
    std::int32_t word = stats.not_finite;
    if (words() != nullptr) {
        const std::int32_t* of_ranks = all_words_.get() + at * word_ranks();
        word = *std::max_element(of_ranks, of_ranks + word_ranks());
    }
    if (stats.save > 0.0f) {
        backend_.fill_zero(&stats_->save, sizeof stats.save);
    }
    if (word != 0) {
        backend_.fill_zero(&stats_->not_finite, sizeof word);
        if (words() != nullptr) {
            backend_.fill_zero(words(), words_.bytes());
        }
    }
    return {launch.step + index, stats, scalars_.get()[at].learning_rate, word};
}

void LaunchQueue::pop() {
    launches_.erase(launches_.begin());
}

}  // namespace gyre::train
