#include "comm/watch/flight_recorder.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace gyre::comm {

Collective* FlightRecorder::find(std::int64_t number) {
    Collective& kept = kept_[static_cast<std::size_t>(number) % kKept];
    return kept.number == number ? &kept : nullptr;  // overwritten by a later one
}

Collective FlightRecorder::known(std::int64_t number) const {
    const Collective& kept = kept_[static_cast<std::size_t>(number) % kKept];
    if (kept.number == number) {
        return kept;
    }
    Collective overwritten;
    overwritten.number = number;
    overwritten.kind = "of an unknown kind";
    return overwritten;
}

std::int64_t FlightRecorder::start(const std::string& kind, std::int64_t bytes, std::int64_t step,
                                   int bucket) {
    const std::lock_guard lock(mutex_);
    const std::int64_t number = started_++;
    last_call_ = now();
    kept_[static_cast<std::size_t>(number) % kKept] = {
        number, kind, bytes, step, bucket, Collective::State::started, now(), -1.0, -1.0};
    return number;
}

void FlightRecorder::wait(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_ = number;
    last_call_ = now();
    if (Collective* collective = find(number)) {
        collective->state = Collective::State::waiting;
        collective->waited = now();
    }
}

void FlightRecorder::resume(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_ = -1;
    last_call_ = now();
    if (Collective* collective = find(number)) {
        collective->state = Collective::State::started;
        collective->waited = -1.0;
    }
}

void FlightRecorder::follow(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_ = -1;
    last_call_ = now();
    followed_.insert(number);
    if (Collective* collective = find(number)) {
        collective->state = Collective::State::followed;
        collective->waited = -1.0;
    }
}

void FlightRecorder::finish(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    waiting_ = -1;
    last_call_ = now();
    followed_.erase(number);
    ++finished_;
    if (Collective* collective = find(number)) {
        collective->state = Collective::State::finished;
        collective->finished = now();
    }
}

std::optional<FlightRecorder::Waiting> FlightRecorder::waiting() const {
    const std::lock_guard lock(mutex_);
    if (waiting_ < 0) {
        return std::nullopt;
    }
    return Waiting{known(waiting_), now() - last_call_};
}

std::optional<FlightRecorder::Waiting> FlightRecorder::following() const {
    const std::lock_guard lock(mutex_);
    if (followed_.empty()) {
        return std::nullopt;
    }
    return Waiting{known(*followed_.begin()), now() - last_call_};
}

std::optional<Collective> FlightRecorder::last() const {
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
        const Collective& c = kept_[static_cast<std::size_t>(n) % kKept];
        constexpr const char* kStates[] = {"started", "followed", "waiting", "finished"};
        nlohmann::json entry = {{"number", c.number},
                                {"kind", c.kind},
                                {"bytes", c.bytes},
                                {"state", kStates[static_cast<int>(c.state)]},
                                {"started", c.started}};
        if (c.step >= 0) {
            entry["step"] = c.step;
            entry["bucket"] = c.bucket;
        }
        if (c.waited >= 0.0) {
            entry["waited"] = c.waited;
        }
        if (c.finished >= 0.0) {
            entry["finished"] = c.finished;
        }
        collectives.push_back(std::move(entry));
    }
    return record.dump(1);
}

}  // namespace gyre::comm
