#include "comm/watch/watcher.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>

#include "base/printable.hpp"
#include "base/private_file.hpp"

namespace gyre::comm {
namespace {

constexpr std::chrono::milliseconds kPulse{200};  // between two messages of a rank
constexpr double kGoneSeconds = 1.0;    // time for the launcher to end the job of a dead rank
constexpr unsigned kAbortSeconds = 5;   // limit for the library's abort
constexpr double kAskSeconds = 1.0;     // between two checks whether the library has failed
constexpr double kSpeechSeconds = 1.0;  // a rank waits this long for another's report or its turn
constexpr double kNewsSeconds = 1.5;    // limit for the news of an ended process to arrive

std::string describe(const FlightRecorder::Entry& e) {
    const auto& [name, bytes, origin] = e.label;
    return fmt::format("collective {}, {} of {} bytes{}", e.number, name, bytes,
                       origin.step < 0 ? ""
                                       : fmt::format(" (step {}, {} {})", origin.step + 1,
                                                     origin.part, origin.index));
}

}  // namespace

void print_end(int rank, const std::string& host, const std::string& reason,
               const WatchOptions& options) {
    fmt::print(stderr, "gyre: rank {} on {}: {}. Ending the job with exit code {}\n", rank, host,
               printable(worded(reason, options.wording), true),
               static_cast<int>(ExitCode::communication));
    std::fflush(stderr);
}

Watcher::Watcher(Communicator& comm, const WatchOptions& options)
    : comm_(comm), options_(options), peers_(comm) {
    thread_ = std::thread([this] { watch(); });
}

Watcher::~Watcher() {
    leaving_ = true;
    thread_.join();
}

void Watcher::set_failure(const std::string& what) {
    const std::lock_guard lock(failure_mutex_);
    failure_ = what;
}

std::string Watcher::failure() {
    const std::lock_guard lock(failure_mutex_);
    return failure_;
}

// Returns what this rank's host waits for. Otherwise returns what its device waits for, if that is
// for so long that the host, which does not run far ahead, must be waiting for the device.
std::optional<FlightRecorder::Waiting> Watcher::pending() const {
    if (const auto waiting = recorder_.waiting()) {
        return waiting;
    }
    const auto on_stream = recorder_.on_stream();
    return on_stream && on_stream->seconds >= options_.warning_seconds ? on_stream : std::nullopt;
}

void Watcher::exchange() {
    Status own;
    own.rank = comm_.rank();
    own.flags = (leaving_ ? Status::kLeaving : 0) | (reporting_ ? Status::kReporting : 0) |
                (failing_ ? Status::kFailing : 0);
    own.started = recorder_.started();
    own.finished = recorder_.finished();
    own.step = step_;
    if (const auto pending = this->pending()) {
        own.waiting = static_cast<float>(pending->seconds);
    }
    peers_.exchange(own);
}

void Watcher::pause() const {
    for (auto end = Clock::now() + kPulse; Clock::now() < end && !leaving_;) {
        std::this_thread::sleep_for(kPulse / 10);
    }
}

void Watcher::watch() {
    for (;; pause()) {
        exchange();
        if (leaving_) {
            return;
        }
        end_if_failed();
        end_if_library_failed();
        if (!peers_.any_gone()) {
            last_whole_ = Clock::now();
        }
        if (const auto waiting = pending()) {
            end_if_late(*waiting);
        }
        end_if_not_whole();
    }
}

// Waits for news, as the rank's error seldom says which rank is gone, but the links soon show it.
void Watcher::end_if_failed() {
    const std::string failure = this->failure();
    if (failure.empty()) {
        return;
    }
    failing_ = true;
    for (const auto begin = Clock::now();
         !peers_.any_at_fault() && seconds_since(begin) < kNewsSeconds;) {
        exchange();
        std::this_thread::sleep_for(kPulse / 4);
    }
    fail(fmt::format("{}; {}", failure, peers_.absent_ranks()));
}

void Watcher::end_if_library_failed() {
    if (seconds_since(last_asked_) < kAskSeconds) {
        return;
    }
    last_asked_ = Clock::now();
    const std::string error = comm_.async_error();
    if (error.empty()) {
        return;
    }
    auto entry = recorder_.last().value_or(FlightRecorder::Entry{});
    if (const auto on_stream = recorder_.on_stream()) {
        entry = on_stream->entry;
    }
    fail(fmt::format("{}; under way: {}; {}. A rank, its host or its network may be gone", error,
                     describe(entry), peers_.late_ranks(entry.number)));
}

void Watcher::end_if_late(const FlightRecorder::Waiting& waiting) {
    const FlightRecorder::Entry& entry = waiting.entry;
    const bool set_up = entry.label.name == kSetUp;
    // A process that has ended without taking its leave will never arrive.
    if (waiting.seconds >= (set_up ? options_.setup_seconds : options_.timeout_seconds) ||
        seconds_since(last_whole_) >= kGoneSeconds) {
        fail(
            fmt::format("no progress for {:.0f} s in {}; {}. Look at the late rank first (is it "
                        "running? its host's log, memory, network); `timeout` sets how long a "
                        "wait may last",
                        waiting.seconds, describe(entry), peers_.late_ranks(entry.number)));
    }
    if (waiting.seconds >= options_.warning_seconds && !set_up && warned_of_ != entry.number) {
        warned_of_ = entry.number;
        if (peers_.speaks()) {
            fmt::print(stderr, "gyre: waiting for {:.0f} s in {}; {}\n", waiting.seconds,
                       describe(entry), peers_.late_ranks(entry.number));
        }
    }
}

// Ends the job also if this rank waits for a disk or a long computation: it would notice too late.
void Watcher::end_if_not_whole() {
    if (seconds_since(last_whole_) >= kGoneSeconds) {
        fail(fmt::format("the job has lost a rank; {}", peers_.absent_ranks()));
    }
}

// Returns whether this rank reports: the lowest waiting rank does, unless it notices nothing; if
// rank 0 does not choose in time, any rank may.
bool Watcher::is_speaker() {
    const auto begin = Clock::now();
    auto asked = begin;
    for (;; std::this_thread::sleep_for(kPulse / 4)) {
        if (!reporting_ && (peers_.speaks() || seconds_since(begin) >= kSpeechSeconds)) {
            reporting_ = true;
            asked = Clock::now();
        }
        exchange();
        if (peers_.speaker() >= 0) {
            return peers_.speaker() == comm_.rank();
        }
        if (reporting_ && (!peers_.reaches_root() || seconds_since(asked) >= kSpeechSeconds)) {
            return true;
        }
    }
}

// Reports, keeps the flight record, and ends the job.
void Watcher::fail(const std::string& reason) {
    failing_ = true;
    const int rank = comm_.rank();
    if (!options_.flight_record.empty()) {
        const std::string path = fmt::format("{}.rank{}.json", options_.flight_record, rank);
        const int error =
            write_private(path, recorder_.json(rank, comm_.size(), peers_.host(), reason) + "\n");
        if (error != 0) {
            fmt::print(stderr, "gyre: the flight record {} could not be written: {}\n", path,
                       std::strerror(error));
        }
    }
    if (is_speaker() || comm_.own_terminal()) {
        print_end(rank, peers_.host(), reason, options_);
    } else {
        // The rank that reports may still be writing; an abort would cut it off.
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
    // The library's abort may itself hang because of the rank that is gone.
    std::thread([] {
        std::this_thread::sleep_for(std::chrono::seconds(kAbortSeconds));
        std::_Exit(static_cast<int>(ExitCode::communication));
    }).detach();
    comm_.abort(static_cast<int>(ExitCode::communication));
    std::_Exit(static_cast<int>(ExitCode::communication));
}

}  // namespace gyre::comm
