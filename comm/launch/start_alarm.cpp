#include "comm/launch/start_alarm.hpp"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/host_name.hpp"
#include "base/printable.hpp"

namespace gyre::comm {
namespace {

constexpr std::chrono::milliseconds kAlarmInterval{200};
constexpr double kExplainSeconds = 1.0;
constexpr double kTurnSeconds = 1.0;  // that a rank lets each lower one speak and end the job
constexpr int kMostTurns = 3;
constexpr double kStoodStillSeconds = 1.5;  // of a thread that wakes every few milliseconds

// The file's bytes; of /proc, where sizes are not known before.
std::string read_all(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
}

// A variable of an environment as /proc shows it; empty: not there.
std::string variable(const std::string& environment, std::string_view name) {
    for (std::size_t at = 0; at < environment.size();) {
        const std::size_t end = std::min(environment.find('\0', at), environment.size());
        const std::string_view entry(environment.data() + at, end - at);
        if (entry.size() > name.size() && entry.starts_with(name) && entry[name.size()] == '=') {
            return std::string(entry.substr(name.size() + 1));
        }
        at = end + 1;
    }
    return {};
}

class MpiStartNews final : public StartNews {
 public:
    explicit MpiStartNews(int rank) : rank_(rank) {}

    News news(bool last) override { return last ? News{{}, neighbours()} : News{}; }

 private:
    // Every process of the job carries the job's name and its rank in its environment, those that
    // start gyre as well.
    std::string neighbours() const {
        constexpr const char* kJob = "PMIX_NAMESPACE";
        const char* job = std::getenv(kJob);
        if (job == nullptr) {
            return {};
        }
        struct Rank {
            int process = 0;
            bool stopped = false, gyre = false;
        };
        std::map<int, Rank> ranks;
        std::error_code ignored;
        const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
        for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
            const std::string name = entry.path().filename();
            int process = 0, rank = 0;
            if (std::from_chars(name.data(), name.data() + name.size(), process).ptr !=
                name.data() + name.size()) {
                continue;
            }
            const std::string environment = read_all(entry.path() / "environ");
            const std::string number = variable(environment, "PMIX_RANK");
            if (variable(environment, kJob) != job ||
                std::from_chars(number.data(), number.data() + number.size(), rank).ec !=
                    std::errc{} ||
                rank == rank_) {
                continue;
            }
            Rank& known = ranks[rank];
            const bool stopped = state_of_process(process) == ProcessState::stopped;
            if (known.process == 0 || (stopped && !known.stopped)) {
                known.process = process;
            }
            known.stopped = known.stopped || stopped;
            known.gyre = known.gyre ||
                         std::filesystem::read_symlink(entry.path() / "exe", ignored) == program;
        }
        std::string text;
        for (const auto& [rank, known] : ranks) {
            if (known.stopped || !known.gyre) {
                text += fmt::format("{}rank {} on {} (process {}) {}", text.empty() ? "" : "; ",
                                    rank, host_name(), known.process,
                                    known.stopped ? "is stopped" : "has not come to start gyre");
            }
        }
        const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
        if (text.empty() && size != nullptr) {
            const auto here = static_cast<int>(ranks.size()) + 1;
            text = here == std::atoi(size)
                       ? fmt::format("all {} ranks run", here)
                       : fmt::format("the {} ranks on {} run; look at the other hosts", here,
                                     host_name());
        }
        return text;
    }

    int rank_;
};

}  // namespace

ProcessState state_of_process(int process) {
    if (kill(process, 0) != 0 && errno == ESRCH) {
        return ProcessState::gone;
    }
    // The state follows the name, which may contain anything, in parentheses.
    const std::string stat = read_all(fmt::format("/proc/{}/stat", process));
    const std::size_t name_end = stat.rfind(')');
    const char state =
        name_end == std::string::npos || name_end + 2 >= stat.size() ? '?' : stat[name_end + 2];
    return state == 'T'                   ? ProcessState::stopped
           : state == 'Z' || state == 'X' ? ProcessState::gone
                                          : ProcessState::running;
}

std::unique_ptr<StartNews> mpi_start_news(int rank) {
    return std::make_unique<MpiStartNews>(rank);
}

void StartAlarm::watch(int rank, double grace, bool own_terminal,
                       std::unique_ptr<StartNews> others) {
    rank_ = rank;
    limit_ = seconds_ + grace;
    own_terminal_ = own_terminal;
    others_ = std::move(others);
    thread_ = std::thread([this] { run(); });
}

void StartAlarm::run() {
    std::string reason;
    double stood_still = 0.0;  // longest
    for (auto asked = Clock::now(); reason.empty();) {
        if (stopping_) {
            return;
        }
        const auto before = Clock::now();
        std::this_thread::sleep_for(kAlarmInterval / 10);
        stood_still = std::max(stood_still, seconds_since(before));
        if (seconds_since(begin_) >= limit_) {
            const StartNews::News last = others_->news(true);
            reason = fmt::format("the start has not come to its end within `init-timeout` ({:g} s)",
                                 seconds_);
            // The others may have left because this process stood still.
            const std::string first =
                stood_still < kStoodStillSeconds
                    ? last.gone
                    : fmt::format("this process itself stood still for {:.0f} s", stood_still);
            for (const std::string& part : {first, last.known}) {
                reason += part.empty() ? "" : "; " + part;
            }
        } else if (Clock::now() - asked >= kAlarmInterval) {
            reason = others_->news(false).gone;
            asked = Clock::now();
        }
    }
    if (!own_terminal_) {
        const double turn = kTurnSeconds * std::min(rank_, kMostTurns);
        for (const auto begin = Clock::now(); seconds_since(begin) < turn;) {
            if (stopping_) {
                return;
            }
            std::this_thread::sleep_for(kAlarmInterval / 10);
        }
    }
    fmt::print(stderr, "gyre: rank {} on {}: {}. Ending the job with exit code {}\n", rank_,
               host_name(), printable(worded(reason, wording_), true),
               static_cast<int>(ExitCode::communication));
    std::fflush(stderr);
    others_->leave(reason);
    // No library's abort, which may hang where its start-up does: the launcher ends the others.
    std::_Exit(static_cast<int>(ExitCode::communication));
}

void StartAlarm::stop_thread() {
    stopping_ = true;
    if (thread_.joinable()) {
        thread_.join();
    }
}

void StartAlarm::stop() {
    stop_thread();
    if (others_) {
        others_->started();
        others_.reset();
    }
}

std::string StartAlarm::explain(std::string message) {
    stop_thread();
    if (!others_) {
        return message;
    }
    StartNews::News news;
    for (const auto begin = Clock::now();;) {
        news = others_->news(false);
        if (!news.gone.empty() || seconds_since(begin) >= kExplainSeconds) {
            break;
        }
        std::this_thread::sleep_for(kAlarmInterval / 4);
    }
    if (news.gone.empty()) {
        news = others_->news(true);
    }
    others_.reset();
    for (const std::string& part : {news.gone, news.known}) {
        if (message.find(part) == std::string::npos) {
            message += "; " + part;
        }
    }
    return message;
}

}  // namespace gyre::comm
