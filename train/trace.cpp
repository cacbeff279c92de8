#include "train/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.hpp"
#include "base/host_name.hpp"

namespace gyre::train {
namespace {

constexpr const char* kTracks[] = {"compute", "communication"};  // as Timeline::Track

// A rank's part, as ranks send it.
nlohmann::json own_part(const Timeline& timeline) {
    auto spans = nlohmann::json::array();
    for (const Timeline::Entry& entry : timeline.entries()) {
        spans.push_back(
            {entry.name, static_cast<int>(entry.track), entry.begin, entry.end, entry.bytes});
    }
    const auto begun = timeline.begun().time_since_epoch();
    return {{"host", host_name()},
            {"clock", std::chrono::duration<double>(begun).count()},
            {"spans", std::move(spans)}};
}

// The trace event format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
void add_rank(nlohmann::ordered_json& events, int rank, const nlohmann::json& part, double offset) {
    const auto name = [&](const char* what, int track, const std::string& text) {
        events.push_back({{"ph", "M"},
                          {"name", what},
                          {"pid", rank},
                          {"tid", track},
                          {"args", {{"name", text}}}});
    };
    name("process_name", 0, fmt::format("rank {} on {}", rank, part["host"].get<std::string>()));
    name("thread_name", 0, kTracks[0]);
    std::vector<double> lanes;  // until when each row of collectives is taken: some overlap
    const auto microseconds = [](double seconds) { return std::round(1e9 * seconds) / 1e3; };
    for (const auto& span : part["spans"]) {
        const double begin = span[2], end = span[3];
        int row = 0;
        if (span[1] == 1) {
            const auto free = std::find_if(lanes.begin(), lanes.end(),
                                           [&](double taken) { return taken <= begin; });
            row = 1 + static_cast<int>(free - lanes.begin());
            if (free == lanes.end()) {
                name("thread_name", row, kTracks[1]);
                lanes.push_back(end);
            } else {
                *free = end;
            }
        }
        nlohmann::ordered_json event = {{"ph", "X"},
                                        {"name", span[0]},
                                        {"cat", kTracks[span[1].get<int>()]},
                                        {"pid", rank},
                                        {"tid", row},
                                        {"ts", microseconds(begin + offset)},
                                        {"dur", microseconds(end - begin)}};
        if (const std::int64_t bytes = span[4]; bytes > 0) {
            event["args"] = {{"bytes", bytes}};
        }
        events.push_back(std::move(event));
    }
}

}  // namespace

Trace::Trace(const ReportSpec& reports, bool is_root) : reports_(reports) {
    if (is_root) {
        file_.open(reports.trace, std::ios::binary | std::ios::trunc);
        if (!file_) {
            throw input_error(
                fmt::format("`trace` {}: the file cannot be written: {}; check the path",
                            reports.trace, std::strerror(errno)));
        }
    }
}

void Trace::on_launch(const Training& training, std::int64_t number) {
    Session& session = training.session;
    if (number > reports_.trace_steps.last) {
        session.trainer().trace(nullptr);
    } else if (number >= reports_.trace_steps.first && !timeline_) {
        timeline_.emplace(session.backend());
        session.backend().synchronize();
        session.communicator().barrier();
        timeline_->begin();
        session.trainer().trace(&*timeline_);
    }
}

void Trace::on_end(const Training& training, Ending) {
    Communicator& comm = training.session.communicator();
    training.session.trainer().trace(nullptr);
    if (timeline_) {
        timeline_->read();
    }
    const std::string text = timeline_ ? gather(comm) : "";
    agree(comm, [&] {
        if (comm.is_root() && !(file_ << text << std::flush)) {
            throw input_error(fmt::format("`trace` {}: writing it failed: {}; is the disk full?",
                                          reports_.trace, std::strerror(errno)));
        }
    });
}

std::string Trace::gather(Communicator& comm) const {
    const std::string own = own_part(*timeline_).dump();
    nlohmann::ordered_json events = nlohmann::ordered_json::array();
    nlohmann::json root;
    for (int rank = 0; rank < comm.size(); ++rank) {
        const std::string text = broadcast_string(comm, own, rank);
        if (!comm.is_root()) {
            continue;
        }
        const auto part = nlohmann::json::parse(text);
        root = rank == 0 ? part : root;
        // One host has one clock; those of others are taken to have begun at the same moment, after
        // the barrier.
        const double apart = part["clock"].get<double>() - root["clock"].get<double>();
        const bool same_clock = part["host"] == root["host"] && std::abs(apart) < 1.0;
        add_rank(events, rank, part, same_clock ? apart : 0.0);
    }
    if (!comm.is_root()) {
        return {};
    }
    return nlohmann::ordered_json({{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}})
               .dump() +
           "\n";
}

}  // namespace gyre::train
