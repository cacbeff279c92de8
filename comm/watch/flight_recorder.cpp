#include "comm/watch/flight_recorder.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace gyre::comm {

FlightRecorder::Entry* FlightRecorder::find(std::int64_t number) {
    Entry& kept = kept_[static_cast<std::size_t>(number) % kKept];
    return kept.number == number ? &kept : nullptr;  // null if a later entry has overwritten it
}

FlightRecorder::Entry FlightRecorder::known(std::int64_t number) const {
    const Entry& kept = kept_[static_cast<std::size_t>(number) % kKept];
    if (kept.number == number) {
        return kept;
    }
    Entry overwritten;
    overwritten.number = number;
    overwritten.label.name = "of an unknown kind";
    return overwritten;
}

std::int64_t FlightRecorder::start(const Label& label) {
    const std::lock_guard lock(mutex_);
    const std::int64_t number = started_++;
    last_call_ = now();
    kept_[static_cast<std::size_t>(number) % kKept] = {
        .number = number, .label = label, .started = now()};
    return number;
}

void FlightRecorder::wait(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_ = number;
    last_call_ = now();
    if (Entry* entry = find(number)) {
        entry->state = Entry::State::waiting;
        entry->waited = now();
    }
}

void FlightRecorder::resume(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_ = -1;
    last_call_ = now();
    if (Entry* entry = find(number)) {
        entry->state = Entry::State::started;
        entry->waited = -1.0;
    }
}

void FlightRecorder::wait_on_stream(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_ = -1;
    last_call_ = now();
    on_stream_.insert(number);
    if (Entry* entry = find(number)) {
        entry->state = Entry::State::on_stream;
        entry->waited = -1.0;
    }
}

void FlightRecorder::finish(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_ = -1;
    last_call_ = now();
    on_stream_.erase(number);
    ++finished_;
    if (Entry* entry = find(number)) {
        entry->state = Entry::State::finished;
        entry->finished = now();
    }
}

std::optional<FlightRecorder::Waiting> FlightRecorder::waiting() const {
    const std::lock_guard lock(mutex_);
    if (waiting_ < 0) {
        return std::nullopt;
    }
    return Waiting{known(waiting_), now() - last_call_};
}

std::optional<FlightRecorder::Waiting> FlightRecorder::on_stream() const {
    const std::lock_guard lock(mutex_);
    if (on_stream_.empty()) {
        return std::nullopt;
    }
    return Waiting{known(*on_stream_.begin()), now() - last_call_};
}

std::optional<FlightRecorder::Entry> FlightRecorder::last() const {
    const std::lock_guard lock(mutex_);
    return started_ == 0 ? std::nullopt : std::optional(known(started_ - 1));
}

std::int64_t FlightRecorder::started() const {
    const std::lock_guard lock(mutex_);
    return started_;
}

std::int64_t FlightRecorder::finished() const {
    const std::lock_guard lock(mutex_);
    return finished_;
}

std::string FlightRecorder::json(int rank, int size, const std::string& host,
                                 const std::string& reason) const {
    const std::lock_guard lock(mutex_);
    nlohmann::json record = {{"rank", rank},         {"ranks", size},    {"host", host},
                             {"reason", reason},     {"seconds", now()}, {"started", started_},
                             {"finished", finished_}};
    auto& collectives = record["collectives"] = nlohmann::json::array();
    const auto kept = static_cast<std::int64_t>(kKept);
    for (std::int64_t n = std::max<std::int64_t>(0, started_ - kept); n < started_; ++n) {
        const Entry& e = kept_[static_cast<std::size_t>(n) % kKept];
        constexpr const char* kStates[] = {"started", "on_stream", "waiting", "finished"};
        nlohmann::json entry = {{"number", e.number},
                                {"kind", e.label.name},
                                {"bytes", e.label.bytes},
                                {"state", kStates[static_cast<int>(e.state)]},
                                {"started", e.started}};
        if (e.label.origin.step >= 0) {
            entry["step"] = e.label.origin.step;
            entry[e.label.origin.part] = e.label.origin.index;
        }
        if (e.waited >= 0.0) {
            entry["waited"] = e.waited;
        }
        if (e.finished >= 0.0) {
            entry["finished"] = e.finished;
        }
        collectives.push_back(std::move(entry));
    }
    return record.dump(1);
}

}  // namespace gyre::comm
