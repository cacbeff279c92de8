#include "bench/report.hpp"

#include <fmt/format.h>

namespace gyre::bench {
namespace {

constexpr double kNetRatio = 1.0;         // ours as fast as the library, at every shape of `net`
constexpr double kWideRatio = 1.0 / 1.5;  // conv2 and fc1 of `wide`: within 1.5 times its time
constexpr double kMemoryPercent = 80.0;   // of the copy's bandwidth, for memory-bound kernels
constexpr int kMemoryBatch = 4096;        // with this batch
constexpr double kMemoryFloorUs = 10.0;   // and a floor well above the time of a launch

std::string figure(double value, int digits) {
    return value > 0 ? fmt::format("{:.{}f}", value, digits) : "-";
}

}  // namespace

std::string Row::name() const {
    return fmt::format("{}/{}/{}{}", net, layer, direction, n > 0 ? fmt::format("/{}", n) : "");
}

Row& Report::row(const std::string& net, const std::string& layer, const std::string& direction,
                 int n) {
    Row row;
    row.net = net;
    row.layer = layer;
    row.direction = direction;
    row.n = n;
    const auto [found, is_new] = at_.emplace(row.name(), rows_.size());
    if (is_new) {
        rows_.push_back(std::move(row));
    }
    return rows_[found->second];
}

std::string Report::table() const {
    std::string text =
        fmt::format("{:<16} {:<16} {:>6} {:>10} {:>10} {:>6} {:>10} {:>7} {:>8} {:>6}  {}\n",
                    "layer", "direction", "batch", "ours us", "library us", "ratio", "estimate",
                    "GB/s", "TFLOP/s", "%", "of");
    for (const Row& r : rows_) {
        text += fmt::format("{:<16} {:<16} {:>6} ", r.net + "/" + r.layer, r.direction,
                            r.n > 0 ? std::to_string(r.n) : "any");
        if (!r.skipped.empty()) {
            text += fmt::format("skipped: {}\n", r.skipped);
            continue;
        }
        const double per_us = r.ours_us > 0 ? 1.0 / r.ours_us : 0.0;
        text += fmt::format("{:>10} {:>10} {:>6} {:>10} {:>7} {:>8} {:>6}  {}\n",
                            figure(r.ours_us, 2), figure(r.library_us, 2), figure(r.ratio(), 2),
                            figure(r.estimate_us, 2), figure(r.bytes * per_us / 1e3, 0),
                            figure(r.flop * per_us / 1e6, 2), figure(r.percent(), 1), r.bound);
    }
    return text;
}

std::vector<std::string> Report::missed_goals() const {
    std::vector<std::string> missed;
    for (const Row& r : rows_) {
        const bool net = r.net == "net";
        const bool compared = r.has_library && (net || r.layer == "conv2" || r.layer == "fc1");
        const bool memory =
            r.flop == 0 && (r.n == kMemoryBatch || r.n == 0) && r.floor_us >= kMemoryFloorUs;
        if (!r.skipped.empty()) {
            if (compared || memory) {
                missed.push_back(fmt::format("{}: not judged ({})", r.name(), r.skipped));
            }
            continue;
        }
        const double goal = net ? kNetRatio : kWideRatio;
        if (compared && r.ratio() == 0) {
            missed.push_back(
                fmt::format("{}: not judged against the library (not both were timed)", r.name()));
        } else if (compared && r.ratio() < goal) {
            missed.push_back(fmt::format(
                "{}: {:.2f} times the library's speed ({:.2f} us, library {:.2f} us), goal {:.2f}",
                r.name(), r.ratio(), r.ours_us, r.library_us, goal));
        }
        if (memory && r.ours_us > 0 && r.percent() < kMemoryPercent) {
            missed.push_back(fmt::format("{}: {:.1f} % of the copy's bandwidth, goal {:.0f} %",
                                         r.name(), r.percent(), kMemoryPercent));
        }
    }
    return missed;
}

}  // namespace gyre::bench
