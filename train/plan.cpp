#include "train/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.hpp"

namespace gyre::train {
namespace {

// A finite number >= 0 and the text behind it.
std::optional<std::pair<double, std::string_view>> number_and_unit(const std::string& text) {
    double value = 0.0;
    const char* const end = text.data() + text.size();
    const auto result = std::from_chars(text.data(), end, value);
    if (result.ec != std::errc{} || !std::isfinite(value) || std::signbit(value)) {
        return std::nullopt;
    }
    return std::pair(value,
                     std::string_view(result.ptr, static_cast<std::size_t>(end - result.ptr)));
}

// The factor of a prefix such as G or Gi, which is taken from the text.
double take_prefix(std::string_view& unit) {
    constexpr std::string_view kPrefixes = "kMGT";
    const char first = unit.empty() ? ' ' : unit[0] == 'K' ? 'k' : unit[0];
    const auto at = kPrefixes.find(first);
    if (at == std::string_view::npos) {
        return 1.0;
    }
    unit.remove_prefix(1);
    const bool binary = unit.starts_with('i');
    unit.remove_prefix(binary ? 1 : 0);
    return std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(at + 1));
}

}  // namespace

double parse_bandwidth(const std::string& text) {
    if (auto number = number_and_unit(text); number && number->first > 0.0) {
        auto [value, unit] = *number;
        const double factor = take_prefix(unit);
        for (const std::string_view suffix : {"/s", "ps"}) {
            if (unit.ends_with(suffix)) {
                unit.remove_suffix(suffix.size());
                break;
            }
        }
        if (unit == "b" || unit == "bit") {
            return value * factor / 8.0;
        }
        if (unit == "B") {
            return value * factor;
        }
    }
    throw usage_error(fmt::format(
        "bandwidth '{}': it must be a number > 0 and a unit, such as 400Gb (bits) or 50GB (bytes)",
        text));
}

double parse_latency(const std::string& text) {
    if (const auto number = number_and_unit(text)) {
        const auto& [value, unit] = *number;
        for (const auto& [name, seconds] :
             {std::pair{"s", 1.0}, {"ms", 1e-3}, {"us", 1e-6}, {"\u00b5s", 1e-6}, {"ns", 1e-9}}) {
            if (unit == name) {
                return value * seconds;
            }
        }
    }
    throw usage_error(
        fmt::format("latency '{}': it must be a number >= 0 and one of s, ms, us, ns", text));
}

double ring_seconds(int ranks, double bytes, const Link& link) {
    const double steps = 2.0 * (ranks - 1);
    return steps * (link.latency_seconds + bytes / ranks / link.bytes_per_second);
}

double tree_seconds(int ranks, double bytes, const Link& link) {
    if (ranks == 1) {
        return 0.0;
    }
    const int levels = std::bit_width(static_cast<unsigned>(ranks - 1));  // ceil(log2(ranks))
    return 2.0 * (levels * link.latency_seconds + bytes / link.bytes_per_second);
}

double allreduce_seconds(AllreduceAlgorithm algorithm, int ranks, double bytes, const Link& link) {
    const double ring = ring_seconds(ranks, bytes, link), tree = tree_seconds(ranks, bytes, link);
    switch (algorithm) {
        case AllreduceAlgorithm::ring:
            return ring;
        case AllreduceAlgorithm::tree:
            return tree;
        case AllreduceAlgorithm::fastest:
            break;
    }
    return std::min(ring, tree);
}

std::vector<double> ready_by_flop(const std::vector<double>& flop, double backward_seconds) {
    std::vector<double> ready(flop.size());
    double done = 0.0;
    for (std::size_t i = flop.size(); i-- > 0;) {
        done += flop[i];
        ready[i] = done;
        done += i > 0 ? flop[i] : 0.0;
    }
    for (double& time : ready) {
        time *= backward_seconds / done;
    }
    return ready;
}

StepPlan plan_step(int ranks, const ComputeTimes& compute, const std::vector<Bucket>& buckets,
                   const std::vector<std::int64_t>& layer_begins, AllreduceAlgorithm algorithm,
                   const Link& link) {
    StepPlan plan;
    plan.ranks = ranks;
    plan.compute = compute.total();
    double free = 0.0;                                 // when the link has done so far
    double done = compute.forward + compute.backward;  // when the rank has
    const auto elems = static_cast<double>(buckets.front().end);
    for (const Bucket& bucket : buckets) {
        const auto after = std::upper_bound(layer_begins.begin(), layer_begins.end(), bucket.begin);
        const auto layer = static_cast<std::size_t>(after - layer_begins.begin() - 1);
        PlannedBucket planned;
        planned.bytes = bucket.bytes();
        planned.ready = compute.forward + compute.ready.at(layer);
        planned.start = std::max(planned.ready, free);
        const double seconds =
            allreduce_seconds(algorithm, ranks, static_cast<double>(planned.bytes), link);
        planned.end = free = planned.start + seconds;
        plan.communication += seconds;
        plan.exposed += std::max(0.0, free - done);
        done = std::max(done, free) + compute.update * static_cast<double>(bucket.elems()) / elems;
        plan.buckets.push_back(planned);
    }
    return plan;
}

}  // namespace gyre::train
