#include "comm/launch/local_ranks.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "comm/launch/meeting_error.hpp"
#include "comm/launch/meeting_folder.hpp"
#include "comm/launch/signals.hpp"
#include "comm/launch/start_alarm.hpp"

namespace gyre::comm {
namespace {

constexpr double kGraceSeconds = 10.0;
// Before ranks start again: at once if they had run for a while, else after a pause that doubles.
constexpr double kSettledSeconds = 1.0, kLeastPauseSeconds = 0.5, kMostPauseSeconds = 30.0;
// Signals within this time are one: timeout(1) sends its signal to a process, and then to the
// group.
constexpr double kOnceSeconds = 0.2;
constexpr int kNoProgram = 127;  // as a shell's exit code
constexpr int kTickMs = 200;     // between two looks at the time

// The text with its rank at the begin, and behind each kClearLine.
std::string with_rank(int rank, std::string_view text) {
    std::string marked;
    for (bool begin = true; begin || !text.empty(); begin = false) {
        if (text.starts_with(kClearLine)) {
            marked += kClearLine;
            text.remove_prefix(std::strlen(kClearLine));
        }
        const std::string_view part = text.substr(0, text.find(kClearLine));
        marked += fmt::format("[{}] {}", rank, part);
        text.remove_prefix(part.size());
    }
    return marked;
}

class LocalRanks {
 public:
    // The ranks of one generation, started again so many times before.
    LocalRanks(const LocalRanksSpec& spec, const NodePlace& place, int restarts,
               const Signals& signals, const std::vector<std::string>& command);
    ~LocalRanks();
    LocalRanks(const LocalRanks&) = delete;
    LocalRanks& operator=(const LocalRanks&) = delete;

    // hosts: nullptr if there is one.
    int wait(NodeMeeting* hosts);
    // After wait(): whether the ranks might do better if they are started again.
    bool may_restart() const;
    // After wait(): whether they have ended as a signal asked them to, but not this process.
    bool may_regroup() const { return !asked_ && code_ == static_cast<int>(ExitCode::interrupted); }

 private:
    struct Stream {
        int fd = -1;
        std::FILE* to = nullptr;
        std::string line;  // that has not ended
    };
    struct Rank {
        pid_t process = 0;  // 0: has ended
        bool told = false;  // to end, by a signal from here
        std::array<Stream, 2> streams;
    };

    void start(std::size_t rank, const std::vector<std::string>& command);
    [[noreturn]] void become(std::size_t rank, const std::vector<std::string>& command,
                             const std::array<int, 2>& out, const std::array<int, 2>& error,
                             pid_t parent) const;
    void pass_on(std::size_t rank, Stream& stream);
    void look_for_ends();
    void end_the_rest();
    void signal_all(int signal) const;
    void tell_all(int signal);
    void take_signals(NodeMeeting* hosts);
    bool running() const;
    // The number in the job of this host's rank local_rank.
    int global(std::size_t local_rank) const {
        return place_.first_rank + static_cast<int>(local_rank);
    }

    const LocalRanksSpec& spec_;
    const NodePlace place_;
    const int restarts_;  // before these ranks
    const Signals& signals_;
    const MeetingFolder folder_;
    std::vector<Rank> ranks_;
    int code_ = 0;
    bool signalled_ = false;  // code_ is of a rank that a signal has ended
    std::optional<Clock::time_point> failed_;
    bool drawn_ = false;                      // an unended line of standard output
    int urged_ = 0;                           // how often the rest has been told to end
    std::optional<Clock::time_point> asked_;  // last to end, by a signal to this process
};

LocalRanks::LocalRanks(const LocalRanksSpec& spec, const NodePlace& place, int restarts,
                       const Signals& signals, const std::vector<std::string>& command)
    : spec_(spec),
      place_(place),
      restarts_(restarts),
      signals_(signals),
      ranks_(static_cast<std::size_t>(spec.ranks)) {
    std::fflush(nullptr);
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        start(rank, command);
    }
}

LocalRanks::~LocalRanks() {
    signal_all(SIGKILL);
    for (const Rank& rank : ranks_) {
        if (rank.process != 0) {
            waitpid(rank.process, nullptr, 0);
        }
        for (const Stream& stream : rank.streams) {
            close(stream.fd);
        }
    }
}

void LocalRanks::start(std::size_t rank, const std::vector<std::string>& command) {
    std::array<int, 2> out{-1, -1}, error{-1, -1};
    if (pipe2(out.data(), O_CLOEXEC) != 0 || pipe2(error.data(), O_CLOEXEC) != 0) {
        throw launcher_error("no pipe");
    }
    const pid_t parent = getpid();
    const pid_t process = fork();
    if (process < 0) {
        throw launcher_error(fmt::format("rank {} cannot be started", global(rank)));
    }
    if (process == 0) {
        become(rank, command, out, error, parent);
    }
    close(out[1]);
    close(error[1]);
    Rank& own = ranks_[rank];
    own.process = process;
    own.streams[0].fd = out[0];
    own.streams[0].to = stdout;
    own.streams[1].fd = error[0];
    own.streams[1].to = stderr;
}

// In the child.
void LocalRanks::become(std::size_t rank, const std::vector<std::string>& command,
                        const std::array<int, 2>& out, const std::array<int, 2>& error,
                        pid_t parent) const {
    // A terminal's Ctrl-C comes from the parent alone: a second one would end a rank at once.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(1);
    }
    sigprocmask(SIG_SETMASK, &signals_.before(), nullptr);
    dup2(out[1], STDOUT_FILENO);
    dup2(error[1], STDERR_FILENO);
    for (const auto& [name, value] : {std::pair{"RANK", global(rank)},
                                      {"LOCAL_RANK", static_cast<int>(rank)},
                                      {"WORLD_SIZE", place_.world_size},
                                      {"LOCAL_WORLD_SIZE", spec_.ranks},
                                      {"GROUP_RANK", place_.number},
                                      {kLaunchNodes, place_.nodes},
                                      {kMostRanks, place_.most_ranks},
                                      {kLaunchRestarts, restarts_}}) {
        setenv(name, std::to_string(value).c_str(), 1);
    }
    setenv(kLaunchFolder, (folder_.path() / "store").c_str(), 1);
    if (place_.nodes > 1) {
        setenv("MASTER_ADDR", spec_.hosts.master_addr.c_str(), 1);
        setenv("MASTER_PORT", std::to_string(place_.master_port).c_str(), 1);
    }
    std::vector<char*> words;
    for (const std::string& word : command) {
        words.push_back(const_cast<char*>(word.c_str()));
    }
    words.push_back(nullptr);
    execv(words.front(), words.data());
    fmt::print(stderr, "gyre launch: {}: {}\n", words.front(), error_text(errno));
    std::fflush(stderr);
    _exit(kNoProgram);
}

// Whole lines, each with its rank, and what is drawn without an end of line.
void LocalRanks::pass_on(std::size_t rank, Stream& stream) {
    std::array<char, 16384> some;
    const ssize_t bytes = read(stream.fd, some.data(), some.size());
    if (bytes < 0 && (errno == EINTR || errno == EAGAIN)) {
        return;
    }
    const bool end = bytes <= 0;
    stream.line.append(some.data(), end ? 0 : static_cast<std::size_t>(bytes));
    if (end && !stream.line.empty()) {
        stream.line += '\n';
    }
    for (std::size_t to = 0; (to = stream.line.find('\n')) != std::string::npos;) {
        const std::string line = with_rank(global(rank), stream.line.substr(0, to));
        if (std::exchange(drawn_, false) && !line.starts_with(kClearLine)) {
            fmt::print(stdout, "{}", kClearLine);
            std::fflush(stdout);  // before what may come by standard error
        }
        fmt::print(stream.to, "{}\n", line);
        stream.line.erase(0, to + 1);
    }
    if (const std::size_t last = stream.line.rfind(kClearLine); last != std::string::npos) {
        fmt::print(stream.to, "{}", with_rank(global(rank), stream.line));
        stream.line.erase(0, last);  // and drawn again when more of it comes
        drawn_ = true;
    }
    std::fflush(stream.to);
    if (end) {
        close(stream.fd);
        stream.fd = -1;
    }
}

bool LocalRanks::running() const {
    for (const Rank& rank : ranks_) {
        if (rank.process != 0) {
            return true;
        }
    }
    return false;
}

void LocalRanks::signal_all(int signal) const {
    for (const Rank& rank : ranks_) {
        if (rank.process != 0) {
            kill(rank.process, signal);
        }
    }
}

void LocalRanks::tell_all(int signal) {
    for (Rank& rank : ranks_) {
        rank.told = true;
    }
    signal_all(signal);
}

void LocalRanks::take_signals(NodeMeeting* hosts) {
    for (int signal = signals_.next(); signal != 0; signal = signals_.next()) {
        if (signal == SIGCHLD) {
            continue;
        }
        if (Signals::asks_to_end(signal)) {
            if (asked_ && seconds_since(*asked_) < kOnceSeconds) {
                continue;
            }
            if (!asked_ && hosts != nullptr) {
                hosts->leave();
            }
            asked_ = Clock::now();
        }
        signal_all(signal);
    }
}

void LocalRanks::look_for_ends() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
        int status = 0;
        if (ranks_[r].process == 0 || waitpid(ranks_[r].process, &status, WNOHANG) <= 0) {
            continue;
        }
        ranks_[r].process = 0;
        const bool killed = WIFSIGNALED(status);
        const int code = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        // The others may notice a killed rank, and end themselves, before its parent can. So a
        // signal that was not sent from here is the cause, also if it is seen after an exit code.
        const bool cause = !failed_ || (killed && !ranks_[r].told && !signalled_);
        if (code != 0 && cause) {
            failed_ = failed_.value_or(Clock::now());
            code_ = code;
            signalled_ = killed;
            if (killed && !(ranks_[r].told && WTERMSIG(status) == SIGTERM)) {
                fmt::print(stderr, "gyre launch: rank {} was ended by signal {} ({})\n", global(r),
                           WTERMSIG(status), strsignal(WTERMSIG(status)));
            }
        }
    }
}

void LocalRanks::end_the_rest() {
    if (!failed_) {
        return;
    }
    // The cause is known and has been told: the others need not notice it, which takes seconds.
    if (signalled_ && may_restart() && restarts_ < spec_.max_restarts) {
        return tell_all(SIGKILL);
    }
    // A stopped rank can neither notice that another has failed nor follow a SIGTERM.
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
        const pid_t process = ranks_[r].process;
        if (process != 0 && state_of_process(process) == ProcessState::stopped) {
            fmt::print(stderr, "gyre launch: rank {} is stopped while another has failed: killed\n",
                       global(r));
            ranks_[r].told = true;
            kill(process, SIGKILL);
        }
    }
    if (seconds_since(*failed_) < kGraceSeconds * (urged_ + 1)) {
        return;
    }
    fmt::print(stderr, "gyre launch: ranks still run {:.0f} s after one failed: {}\n",
               seconds_since(*failed_), urged_ == 0 ? "told to end" : "killed");
    tell_all(urged_++ == 0 ? SIGTERM : SIGKILL);
}

int LocalRanks::wait(NodeMeeting* hosts) {
    std::vector<pollfd> waits;
    std::vector<std::pair<std::size_t, Stream*>> streams;
    do {
        waits = {{signals_.fd(), POLLIN, 0}};
        streams = {{0, nullptr}};
        for (std::size_t r = 0; r < ranks_.size(); ++r) {
            for (Stream& stream : ranks_[r].streams) {
                if (stream.fd >= 0) {
                    waits.push_back({stream.fd, POLLIN, 0});
                    streams.emplace_back(r, &stream);
                }
            }
        }
        poll(waits.data(), waits.size(), kTickMs);
        for (std::size_t i = 1; i < waits.size(); ++i) {
            if (waits[i].revents != 0) {
                pass_on(streams[i].first, *streams[i].second);
            }
        }
        take_signals(hosts);
        if (hosts != nullptr && hosts->is_awaited()) {
            tell_all(SIGTERM);
        }
        look_for_ends();
        end_the_rest();
        // A process that a rank has started may outlive it and keep its pipes open: not waited for.
    } while (running());
    for (const auto& [rank, stream] : streams) {
        pollfd more{stream == nullptr ? -1 : stream->fd, POLLIN, 0};
        while (more.fd >= 0 && poll(&more, 1, 0) == 1 && stream->fd >= 0) {
            pass_on(rank, *stream);
        }
    }
    return code_;
}

bool LocalRanks::may_restart() const {
    // Wrong flags or input, a loss that is not finite, and bits that differ will be so again.
    constexpr std::array kFinal = {ExitCode::success,  ExitCode::usage,   ExitCode::bad_input,
                                   ExitCode::diverged, ExitCode::differs, ExitCode::interrupted};
    return !asked_ && code_ != kNoProgram &&
           std::find(kFinal.begin(), kFinal.end(), static_cast<ExitCode>(code_)) == kFinal.end();
}

// Starts the ranks as often as they may, and the hosts agree. Returns the last exit code.
int run_generations(const LocalRanksSpec& spec, NodeMeeting* hosts, const Signals& signals,
                    const std::vector<std::string>& command) {
    double pause = 0.0;
    int restarts = 0, code = 0;
    for (;;) {
        int asked = 0;  // by a signal, to end
        NodePlace place{.world_size = spec.ranks, .most_ranks = spec.ranks};
        if (hosts != nullptr) {
            const auto met = hosts->meet([&](double seconds) {
                asked = signals.wait(seconds);
                return asked != 0;
            });
            if (!met) {
                fmt::print(stderr, "gyre launch: {}\n",
                           asked != 0 ? "asked to end" : "host 0 has ended the job");
                return asked != 0 ? 128 + asked : code;
            }
            place = *met;
        }
        const Clock::time_point begin = Clock::now();
        {
            LocalRanks ranks(spec, place, restarts, signals, command);
            code = ranks.wait(hosts);
            if (hosts != nullptr && (ranks.may_restart() || ranks.may_regroup()) &&
                hosts->regroups()) {
                continue;  // at once, and not counted
            }
            if (!ranks.may_restart() || restarts == spec.max_restarts) {
                return code;
            }
        }
        pause = seconds_since(begin) > kSettledSeconds
                    ? 0.0
                    : std::clamp(2.0 * pause, kLeastPauseSeconds, kMostPauseSeconds);
        fmt::print(stderr,
                   "gyre launch: exit code {}; all ranks start again in {} s (restart {} of {})\n",
                   code, pause, ++restarts, spec.max_restarts);
        if (const int signal = signals.wait(pause); signal != 0) {
            return 128 + signal;
        }
    }
}

}  // namespace

int run_local_ranks(const LocalRanksSpec& spec, const std::vector<std::string>& command) {
    std::unique_ptr<NodeMeeting> hosts;
    if (spec.hosts.most > 1 && spec.hosts.node != 0) {  // a signal ends the wait for host 0
        hosts = std::make_unique<NodeMeeting>(spec.hosts, spec.ranks);
    }
    const Signals signals;  // before threads begin, which take none
    if (spec.hosts.most > 1 && !hosts) {
        hosts = std::make_unique<NodeMeeting>(spec.hosts, spec.ranks);
    }
    const struct End {
        NodeMeeting* hosts;
        ~End() {
            if (hosts != nullptr) {
                hosts->end();
            }
        }
    } end{hosts.get()};
    return run_generations(spec, hosts.get(), signals, command);
}

}  // namespace gyre::comm
