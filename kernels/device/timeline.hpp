// The spans of a rank's activity in a few steps, for display: computation on its device, measured
// between events of the compute stream, and collectives.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "kernels/device/device.hpp"

namespace gyre {

class Timeline {
 public:
    enum class Track { compute, communication };
    struct Entry {
        std::string name;
        Track track;
        double begin, end;       // seconds since the timeline began
        std::int64_t bytes = 0;  // for collectives: of one rank
    };

    explicit Timeline(Device& device) : device_(device) {}

    // Starts the clock; waits for the device.
    void begin() {
        device_.synchronize();
        begun_ = device_.record();
        device_.synchronize(begun_);
        begin_ = Clock::now();
    }
    Clock::time_point begun() const { return begin_; }

    // Calls to the device between these form one span, which may contain others. GPU profilers show
    // a range of the same name.
    void open(const std::string& name) {
        device_.push_range(name.c_str());
        open_.push_back(pending_.size());
        pending_.push_back({name, device_.record(), 0});
    }
    void close() {
        pending_[open_.back()].end = device_.record();
        open_.pop_back();
        device_.pop_range();
    }
    // Adds a span between two events of the compute stream.
    void add(std::string name, Device::Event begin, Device::Event end) {
        pending_.push_back({std::move(name), begin, end});
    }
    void add_collective(std::string name, double begin, double end, std::int64_t bytes) {
        entries_.push_back({std::move(name), Track::communication, begin, end, bytes});
    }
    double seconds_at(Clock::time_point time) const {
        return std::chrono::duration<double>(time - begin_).count();
    }
    double seconds_at(Device::Event event) { return device_.seconds_between(begun_, event); }

    // Waits for all events so far; call it before the device discards them.
    void read() {
        for (Pending& span : pending_) {
            device_.synchronize(span.end);
            entries_.push_back({std::move(span.name), Track::compute, seconds_at(span.begin),
                                seconds_at(span.end)});
        }
        pending_.clear();
    }
    const std::vector<Entry>& entries() const { return entries_; }

 private:
    struct Pending {
        std::string name;
        Device::Event begin, end;
    };
    Device& device_;
    Device::Event begun_ = 0;
    Clock::time_point begin_;
    std::vector<Pending> pending_;
    std::vector<std::size_t> open_;  // indices in pending_, innermost last
    std::vector<Entry> entries_;
};

// A span that lasts as long as this object; does nothing if there is no timeline.
class TimelineSpan {
 public:
    TimelineSpan(Timeline* timeline, std::string_view what, std::string_view of = {})
        : timeline_(timeline) {
        if (timeline != nullptr) {
            timeline->open(of.empty() ? std::string(what)
                                      : std::string(what) + " " + std::string(of));
        }
    }
    ~TimelineSpan() {
        if (timeline_ != nullptr) {
            timeline_->close();
        }
    }
    TimelineSpan(const TimelineSpan&) = delete;
    TimelineSpan& operator=(const TimelineSpan&) = delete;

 private:
    Timeline* const timeline_;
};

}  // namespace gyre
