#include "comm/elastic/membership.hpp"

#include <algorithm>
#include <utility>

namespace gyre::comm::elastic {

Keeper::Out Keeper::joined(ProcessId process) {
    connected_.emplace(process, std::nullopt);
    if (forming_) {
        return {{process, Form{generation_}}};
    }
    // Beyond the most members a process is a spare: it waits until one is lost.
    return members_.size() < most_ ? form() : Out{};
}

Keeper::Out Keeper::left(ProcessId process) {
    if (connected_.erase(process) == 0) {
        return {};
    }
    if (forming_) {
        return go_if_complete();
    }
    return members_.contains(process) ? form() : Out{};
}

Keeper::Out Keeper::received(ProcessId process, const MemberMessage& message) {
    const auto sender = connected_.find(process);
    if (sender == connected_.end()) {  // who has lost its connection has no say any more
        return {};
    }
    if (const auto* ready = std::get_if<Ready>(&message)) {
        if (forming_ && ready->generation == generation_) {
            sender->second = *ready;
            return go_if_complete();
        }
    } else if (const auto* lost = std::get_if<Lost>(&message)) {
        if (!forming_ && lost->generation == generation_) {
            return form();
        }
    } else if (std::get<Report>(message).step == written_ + 1 && members_.contains(process)) {
        ++written_;
        return {{process, Written{written_}}};
    }
    return {};
}

Keeper::Out Keeper::form() {
    forming_ = true;
    ++generation_;
    Out out;
    for (auto& [process, answer] : connected_) {
        answer.reset();
        out.push_back({process, Form{generation_}});
    }
    return out;
}

bool Keeper::all_answered() const {
    return std::all_of(connected_.begin(), connected_.end(),
                       [](const auto& entry) { return entry.second.has_value(); });
}

bool Keeper::knows_last() const {
    return std::any_of(connected_.begin(), connected_.end(), [&](const auto& entry) {
        return entry.second && is_current(*entry.second);
    });
}

Keeper::Out Keeper::go_if_complete() {
    if (connected_.size() < least_ || !all_answered() || !knows_last()) {
        return {};
    }
    // Those who have the state come first; of equals, who has been there for longer.
    std::vector<std::pair<ProcessId, Ready>> chosen;
    for (const auto& [process, answer] : connected_) {
        chosen.emplace_back(process, *answer);
    }
    std::stable_partition(chosen.begin(), chosen.end(),
                          [&](const auto& entry) { return is_current(entry.second); });
    chosen.resize(std::min(chosen.size(), most_));
    Go go{.generation = generation_, .members = {}, .behind = {}, .written = written_};
    for (const auto& [process, answer] : chosen) {
        if (is_current(answer) && (go.members.empty() || answer.step > go.step)) {
            go.step = answer.step;
            go.source = static_cast<int>(go.members.size());
        }
        go.members.push_back(process);
    }
    for (std::size_t rank = 0; rank < chosen.size(); ++rank) {
        const Ready& answer = chosen[rank].second;
        if (!is_current(answer) || answer.step < go.step) {
            go.behind.push_back(static_cast<int>(rank));
        }
    }
    forming_ = false;
    trained_ = generation_;
    members_ = {go.members.begin(), go.members.end()};
    Out out;
    for (const ProcessId process : go.members) {
        out.push_back({process, go});
    }
    return out;
}

Ready Member::received(const Form& form) {
    state_ = State::waiting;
    asked_ = form.generation;
    return {asked_, state_of_, step_};
}

bool Member::received(const Go& go, ProcessId self) {
    if (state_ != State::waiting || go.generation != asked_) {
        return false;
    }
    go_ = go;
    asked_ = 0;
    rank_ = static_cast<int>(std::find(go.members.begin(), go.members.end(), self) -
                             go.members.begin());
    written_ = reported_ = go.written;
    const bool behind = std::find(go.behind.begin(), go.behind.end(), rank_) != go.behind.end();
    state_ = behind ? State::catching_up : State::training;
    if (!behind) {
        state_of_ = go.generation;
    }
    return true;
}

void Member::state_arrived(Generation generation, std::int64_t step) {
    if (state_ == State::catching_up && generation == go_.generation) {
        state_ = State::training;
        state_of_ = generation;
        step_ = step;
    }
}

std::optional<Lost> Member::lost(Generation generation) {
    if (state_ == State::waiting || generation != go_.generation) {
        return std::nullopt;
    }
    state_ = State::waiting;
    return Lost{generation};
}

std::vector<Report> Member::due_reports() {
    std::vector<Report> reports;
    while (state_ == State::training && rank_ == 0 && reported_ < step_) {
        reports.push_back({++reported_});
    }
    return reports;
}

}  // namespace gyre::comm::elastic
