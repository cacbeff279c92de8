#include "train/bucket_table.hpp"

#include <fmt/format.h>

namespace gyre::train {

void BucketTimes::add(const Reducer::Times& times) {
    sums.resize(times.buckets.size());
    for (std::size_t i = 0; i < sums.size(); ++i) {
        sums[i].ready += times.buckets[i].ready;
        sums[i].arrived += times.buckets[i].arrived;
        sums[i].exposed += times.buckets[i].exposed;
    }
    exposed += times.exposed;
    statistics += times.statistics;
    ++steps;
}

std::string bucket_table(const std::vector<Bucket>& buckets, const Net& net,
                         const BucketTimes* times) {
    const bool timed = times != nullptr && times->steps > 0 && !times->sums.empty();
    std::string table = fmt::format(
        "bucket      first elem       elems       KiB  {:<14}{}  parameters, last layer first\n",
        "route", timed ? "  ready ms  arrived ms  exposed ms" : "");
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        std::string names;
        for (auto p = net.parameters().rbegin(); p != net.parameters().rend(); ++p) {
            if (p->offset_elems < buckets[i].end && p->offset_elems + p->elems > buckets[i].begin) {
                names.append(names.empty() ? "" : " ").append(p->name);
            }
        }
        const std::size_t bytes =
            static_cast<std::size_t>(buckets[i].elems()) * bytes_of(buckets[i].type);
        table += fmt::format("{:>6}  {:>14}  {:>10}  {:>8.1f}  {:<14}", i, buckets[i].begin,
                             buckets[i].elems(), static_cast<double>(bytes) / 1024.0,
                             name_of(buckets[i]));
        if (timed) {
            const double scale = 1e3 / static_cast<double>(times->steps);
            const Reducer::Times::Of& sum = times->sums[i];
            table += fmt::format("  {:>8.2f}  {:>10.2f}  {:>10.2f}", scale * sum.ready,
                                 scale * sum.arrived, scale * sum.exposed);
        }
        table += fmt::format("  {}{}\n", names.empty() ? "(loss and counts)" : names,
                             buckets[i].shared() ? "; each rank updates a share" : "");
    }
    if (timed && times->statistics > 0.0) {
        table +=
            fmt::format("{:<78}  {:>10.2f}  sums within the passes (batch normalisation)\n",
                        "statistics", 1e3 * times->statistics / static_cast<double>(times->steps));
    }
    return table;
}

}  // namespace gyre::train
