#include "comm/rank_sums.hpp"

#include <algorithm>

namespace gyre::comm {
namespace {

// Size of the staging memory; larger sums are cut into such pieces. Statistics of 2048 channels
// have 4096.
constexpr std::int64_t kStagedElems = 16 << 10;

}  // namespace

CommunicatorSums::CommunicatorSums(Reducer& reducer, Device& device)
    : reducer_(reducer), device_(device) {
    if (!reducer.direct()) {
        staging_ = {device, kStagedElems};
    }
}

void CommunicatorSums::sum(float* values, std::int64_t elems) {
    if (reducer_.communicator().size() == 1) {
        return;
    }
    const auto run = [&](float* data, std::int64_t count) {
        reducer_.run({.kind = Collective::Kind::all_reduce, .data = data, .count = count},
                     "statistics");
    };
    if (reducer_.direct()) {
        run(values, elems);
        return;
    }
    float* const staged = staging_.get();
    for (std::int64_t at = 0; at < elems; at += kStagedElems) {
        const std::int64_t count = std::min(kStagedElems, elems - at);
        const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
        // On one stream: a download starts when the last upload has read the staging.
        device_.synchronize(
            device_.download_async(Device::Stream::compute, staged, values + at, bytes));
        run(staged, count);
        device_.upload_async(Device::Stream::compute, values + at, staged, bytes);
    }
}

}  // namespace gyre::comm
