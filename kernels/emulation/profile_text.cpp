#include <fmt/format.h>

#include <algorithm>

#include "kernels/emulation/places.hpp"
#include "kernels/emulation/profiler.hpp"

namespace simt {
namespace {

std::string line_of(const char* what, const Traffic& traffic, const char* unit) {
    if (traffic.requests == 0) {
        return "";
    }
    return fmt::format(
        "  {:<14} {:>10} requests, {:4.1f} lanes, {:5.2f} {} a request, {:.2f} x the "
        "least\n",
        what, traffic.requests, traffic.lanes_per_request(), traffic.per_request(), unit,
        traffic.excess());
}

// The places with the most transactions above the minimum, if these are at least a tenth of all of
// their kind.
std::string offenders(const LaunchProfile& profile) {
    std::string text;
    for (const Space space : {Space::global, Space::shared, Space::remote}) {
        std::vector<PlaceProfile> places;
        std::int64_t all = 0;
        for (const PlaceProfile& place : profile.places) {
            if (place.space == space) {
                places.push_back(place);
                all += place.traffic.transactions;
            }
        }
        const auto above = [](const PlaceProfile& place) {
            return place.traffic.transactions - place.traffic.least;
        };
        std::sort(places.begin(), places.end(),
                  [&](const auto& a, const auto& b) { return above(a) > above(b); });
        for (std::size_t i = 0; i < std::min<std::size_t>(places.size(), 3); ++i) {
            const PlaceProfile& place = places[i];
            if (above(place) * 10 < all) {
                break;
            }
            text += fmt::format(
                "    {} {} of {} bytes: {:.1f} {} a request ({:.1f} would do), {:.0f} lanes, {} % "
                "of all: {}\n",
                space == Space::global   ? "global"
                : space == Space::shared ? "shared"
                                         : "remote",
                place.write ? "store" : "load", place.bytes, place.traffic.per_request(),
                space == Space::shared ? "wavefronts" : "sectors",
                Traffic::ratio(place.traffic.least, place.traffic.requests),
                place.traffic.lanes_per_request(), 100 * place.traffic.transactions / all,
                place_of(place.pc));
        }
    }
    return text;
}

}  // namespace

std::string text_of(const LaunchProfile& profile, const std::string& title) {
    const emulator::Launch& launch = profile.launch;
    const auto extents = [](const dim3& of) {
        return fmt::format("({}, {}, {})", of.x, of.y, of.z);
    };
    std::string text = fmt::format("{}: {} grid {} block {}", title, launch.kernel,
                                   extents(launch.grid), launch.block.count());
    if (launch.cluster > 1) {
        text += fmt::format(" in clusters of {}", launch.cluster);
    }
    if (static_cast<std::size_t>(profile.blocks) < launch.grid.count()) {
        text += fmt::format(", of which {} blocks ran", profile.blocks);
    }
    const double blocks = static_cast<double>(std::max<std::int64_t>(profile.blocks, 1));
    text += fmt::format(
        "\n  threads busy {:.0f} %; a block: {:.0f} barriers, {:.0f} warp operations, {:.0f} FLOP, "
        "{:.0f} on tensor cores; the launch reads {:.0f} and writes {:.0f} bytes\n",
        100.0 * profile.busy,
        static_cast<double>(profile.barriers + profile.cluster_barriers) / blocks,
        static_cast<double>(profile.warp_operations) / blocks,
        static_cast<double>(profile.flop) / blocks,
        static_cast<double>(profile.tensor_flop) / blocks, profile.read_bytes,
        profile.written_bytes);
    text += line_of("global loads", profile.global_loads, "sectors");
    text += line_of("global stores", profile.global_stores, "sectors");
    text += line_of("shared loads", profile.shared_loads, "wavefronts");
    text += line_of("shared stores", profile.shared_stores, "wavefronts");
    text += line_of("remote loads", profile.remote_loads, "sectors");
    text += line_of("remote stores", profile.remote_stores, "sectors");
    return text + offenders(profile);
}

}  // namespace simt
