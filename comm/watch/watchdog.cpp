#include "comm/watch/watchdog.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "comm/watch/flight_recorder.hpp"
#include "comm/watch/link.hpp"
#include "kernels/base/clock.hpp"
#include "kernels/base/host_name.hpp"
#include "kernels/base/printable.hpp"

namespace gyre::comm {
namespace {

constexpr std::chrono::milliseconds kPulse{200};  // between two messages of a rank
constexpr double kConnectSeconds = 5.0;
constexpr double kSilentSeconds = 3.0;  // after which a rank counts as not answering
constexpr double kGoneSeconds = 1.0;    // that the launcher gets to end the job of a dead rank
constexpr unsigned kAbortSeconds = 5;   // that the library's abort gets
constexpr double kAskSeconds = 1.0;     // between two questions whether the library has failed
constexpr double kSpeechSeconds = 1.0;  // that a rank waits for another to report
constexpr double kNewsSeconds = 1.5;    // that the news of an ended process may take
constexpr const char* kSetUp = "set-up of reductions";

// How far a rank is. Sent as it is: all ranks run the same program on the same kind of machine.
struct Status {
    std::int32_t rank = 0;
    std::int32_t bucket = -1;
    std::int64_t started = 0, finished = 0;  // collectives
    std::int64_t step = -1;
    float waiting = -1.0f;  // seconds; < 0: the rank does not wait
    float silent = 0.0f;    // seconds that rank 0 has not heard of it
    enum Flag : std::int32_t { kLeaving = 1, kClosed = 2, kReporting = 4, kFailing = 8 };
    std::int32_t flags = 0;
    std::int32_t padding = 0;
};

struct Hello {
    std::uint64_t token = 0;
    std::int64_t rank = 0;
};

class WatchedCommunicator final : public Communicator {
 public:
    WatchedCommunicator(std::unique_ptr<Communicator> inner, const WatchOptions& options)
        : inner_(std::move(inner)), options_(options), host_(host_name()) {
        for (int r = 0; r < size(); ++r) {
            hosts_.push_back(printable(broadcast_string(*inner_, host_, r)));
        }
        table_.resize(static_cast<std::size_t>(size()));
        heard_.resize(table_.size(), Clock::now());
        for (int r = 0; r < size(); ++r) {
            table_[static_cast<std::size_t>(r)].rank = r;
        }
        connect();
        thread_ = std::thread([this] { watch(); });
    }
    ~WatchedCommunicator() override {
        leaving_ = true;
        thread_.join();
    }

    std::string description() const override { return inner_->description(); }
    int rank() const override { return inner_->rank(); }
    int size() const override { return inner_->size(); }
    int local_rank() const override { return inner_->local_rank(); }
    int local_size() const override { return inner_->local_size(); }
    bool own_terminal() const override { return inner_->own_terminal(); }
    void annotate(std::int64_t step, int bucket) override {
        step_ = step;
        bucket_ = bucket;
    }

    bool use_device(Device& device) override {
        bool result = false;
        watched(kSetUp, 0, [&] { result = inner_->use_device(device); });
        return result;
    }
    std::shared_ptr<void> register_buffer(void* data, std::size_t bytes) override {
        return inner_->register_buffer(data, bytes);
    }
    std::string async_error() override { return inner_->async_error(); }
    std::unique_ptr<Request> allreduce_sum_async(void* data, std::int64_t elems,
                                                 DataType type) override {
        return begun(fmt::format("allreduce({})", name_of(type)),
                     static_cast<std::size_t>(elems) * bytes_of(type),
                     [&] { return inner_->allreduce_sum_async(data, elems, type); });
    }
    std::unique_ptr<Request> allgather_async(void* data, std::size_t bytes) override {
        return begun("allgather", bytes, [&] { return inner_->allgather_async(data, bytes); });
    }
    std::unique_ptr<Request> track(std::unique_ptr<Request> operation, const std::string& kind,
                                   std::int64_t bytes) override {
        return begun(kind, static_cast<std::size_t>(bytes), [&] { return std::move(operation); });
    }
    void allreduce_sum(std::span<double> data) override {
        watched("allreduce(double)", data.size_bytes(), [&] { inner_->allreduce_sum(data); });
    }
    void broadcast(void* data, std::size_t bytes, int root) override {
        watched("broadcast", bytes, [&] { inner_->broadcast(data, bytes, root); });
    }
    void barrier() override {
        watched("barrier", 0, [&] { inner_->barrier(); });
    }
    [[noreturn]] void abort(int exit_code) noexcept override {
        inner_->abort(exit_code);
        std::_Exit(exit_code);
    }

 private:
    class WatchedRequest final : public Request {
     public:
        WatchedRequest(WatchedCommunicator& comm, std::int64_t number,
                       std::unique_ptr<Request> inner)
            : comm_(comm), number_(number), inner_(std::move(inner)) {}
        // Where an error has come between, the device may be busy with it for ever.
        ~WatchedRequest() override {
            if (!finished_) {
                comm_.recorder_.follow(number_);
            }
        }
        void wait() override {
            if (finished_) {
                return;
            }
            comm_.recorder_.wait(number_);
            comm_.guarded([&] { inner_->wait(); });
            finish();
        }
        bool follow() override {
            if (!finished_) {
                comm_.recorder_.wait(number_);
                if (comm_.guarded([&] { return inner_->follow(); })) {
                    finish();
                } else {
                    comm_.recorder_.follow(number_);
                }
            }
            return finished_;
        }
        void forget() override { finish(); }

     private:
        void finish() {
            comm_.recorder_.finish(number_);
            finished_ = true;
        }

        WatchedCommunicator& comm_;
        const std::int64_t number_;
        std::unique_ptr<Request> inner_;
        bool finished_ = false;
    };

    template <typename Work>
    std::unique_ptr<Request> begun(const std::string& kind, std::size_t bytes, Work work) {
        const std::int64_t number =
            recorder_.start(kind, static_cast<std::int64_t>(bytes), step_, bucket_);
        recorder_.wait(number);  // a library that connects when it is first used may block
        auto request = guarded(work);
        recorder_.resume(number);
        return std::make_unique<WatchedRequest>(*this, number, std::move(request));
    }

    template <typename Work>
    void watched(const char* kind, std::size_t bytes, Work work) {
        const std::int64_t number = recorder_.start(kind, static_cast<std::int64_t>(bytes), -1, -1);
        recorder_.wait(number);
        guarded(work);
        recorder_.finish(number);
    }

    // Runs a call of the library inside. Its error seldom knows which rank is gone, and each rank
    // meets one: the watchdog's thread, which does, reports it and ends the process.
    template <typename Work>
    auto guarded(const Work& work) -> decltype(work()) {
        try {
            return work();
        } catch (const AgreedError&) {
            throw;
        } catch (const Error& error) {
            if (error.code() != ExitCode::communication) {
                throw;
            }
            const std::lock_guard lock(failure_mutex_);
            failure_ = error.what();
        }
        for (;;) {
            std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
    std::string failure() {
        const std::lock_guard lock(failure_mutex_);
        return failure_;
    }

    // Collective: everybody's link to rank 0.
    void connect() {
        std::string where;
        std::uint16_t port = 0;
        Hello hello;
        const bool one_host = std::all_of(hosts_.begin(), hosts_.end(),
                                          [&](const std::string& h) { return h == hosts_[0]; });
        if (is_root()) {
            listener_ = listen_anywhere(one_host, port);
            std::random_device random;
            hello.token = std::uint64_t{random()} << 32 | random();
            where = own_addresses(one_host);
        }
        where = broadcast_string(*inner_, where, 0);
        inner_->broadcast(&port, sizeof port, 0);
        inner_->broadcast(&hello.token, sizeof hello.token, 0);
        hello.rank = rank();
        joined_.resize(table_.size());
        if (is_root()) {
            links_.resize(table_.size());
            accept_all(hello.token);
            return;
        }
        links_.resize(1);
        for (std::size_t at = 0; port != 0 && at < where.size() && !links_[0].open();) {
            const std::size_t end = std::min(where.find(' ', at), where.size());
            Socket socket = connect_to(where.substr(at, end - at), port, 2000);
            at = end + 1;
            if (socket.open()) {
                links_[0] = Link(std::move(socket));
                links_[0].send(&hello, sizeof hello);
                joined_[0] = true;
            }
        }
        if (!links_[0].open()) {
            fmt::print(stderr,
                       "gyre: rank {} on {}: no connection to rank 0's watchdog on {} (port {}); "
                       "waits still end after --timeout, but cannot name who is late\n",
                       rank(), host_, hosts_[0], port);
        }
    }

    void accept_all(std::uint64_t token) {
        const auto begin = Clock::now();
        std::vector<Link> strangers;
        int missing = size() - 1;
        while (missing > 0 && listener_.open() && seconds_since(begin) < kConnectSeconds) {
            pollfd wait{listener_.fd(), POLLIN, 0};
            if (poll(&wait, 1, 10) == 1) {
                strangers.emplace_back(
                    Socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC)));
            }
            for (Link& link : strangers) {
                Hello hello;
                if (link.open() && link.receive(&hello, sizeof hello)) {
                    if (hello.token == token && hello.rank > 0 && hello.rank < size()) {
                        links_[static_cast<std::size_t>(hello.rank)] = std::move(link);
                        joined_[static_cast<std::size_t>(hello.rank)] = true;
                        --missing;
                    }
                    link.close();
                }
            }
        }
        listener_.close();
    }

    Status own_status() const {
        Status status;
        status.rank = rank();
        status.started = recorder_.started();
        status.finished = recorder_.finished();
        status.step = step_;
        status.bucket = bucket_;
        status.flags = (leaving_ ? Status::kLeaving : 0) | (reporting_ ? Status::kReporting : 0) |
                       (failing_ ? Status::kFailing : 0);
        if (const auto pending = this->pending()) {
            status.waiting = static_cast<float>(pending->seconds);
        }
        return status;
    }

    // What this rank waits for: its host, or else its device, for so long that the host, which
    // does not run far ahead, must be waiting for the device in some call or other.
    std::optional<FlightRecorder::Waiting> pending() const {
        if (const auto waiting = recorder_.waiting()) {
            return waiting;
        }
        const auto following = recorder_.following();
        return following && following->seconds >= options_.warning_seconds ? following
                                                                           : std::nullopt;
    }

    void exchange() {
        const Status own = own_status();
        table_[static_cast<std::size_t>(rank())] = own;
        heard_[static_cast<std::size_t>(rank())] = Clock::now();
        const std::size_t bytes = table_.size() * sizeof(Status);
        if (!is_root()) {
            links_[0].send(&own, sizeof own);
            std::vector<Status> news(table_.size());
            while (links_[0].receive(news.data(), bytes)) {
                table_ = news;
                table_[static_cast<std::size_t>(rank())] = own;
                heard_[0] = Clock::now();
            }
            table_[0].silent = static_cast<float>(seconds_since(heard_[0]));
            if (joined_[0] && !links_[0].open()) {
                table_[0].flags |= Status::kClosed;
            }
            return;
        }
        for (std::size_t r = 1; r < table_.size(); ++r) {
            Status news;
            while (links_[r].receive(&news, sizeof news)) {
                table_[r] = news;
                heard_[r] = Clock::now();
            }
            table_[r].silent = static_cast<float>(seconds_since(heard_[r]));
            if (joined_[r] && !links_[r].open()) {
                table_[r].flags |= Status::kClosed;
            }
        }
        for (std::size_t r = 1; r < table_.size(); ++r) {
            links_[r].send(table_.data(), bytes);
        }
    }

    void watch() {
        std::int64_t warned_of = -1;
        Clock::time_point last_whole = Clock::now();  // when nobody was gone, or nobody waited
        Clock::time_point last_asked = Clock::now();
        for (;; pause()) {
            exchange();
            if (leaving_) {
                return;
            }
            if (const std::string failure = this->failure(); !failure.empty()) {
                failing_ = true;
                for (const auto begin = Clock::now();
                     std::none_of(table_.begin(), table_.end(), at_fault) &&
                     seconds_since(begin) < kNewsSeconds;) {
                    exchange();
                    std::this_thread::sleep_for(kPulse / 4);
                }
                fail(fmt::format("{}; {}", failure, absent_ranks()));
            }
            if (seconds_since(last_asked) >= kAskSeconds) {
                last_asked = Clock::now();
                if (const std::string error = inner_->async_error(); !error.empty()) {
                    auto collective = recorder_.last().value_or(Collective{});
                    if (const auto following = recorder_.following()) {
                        collective = following->collective;
                    }
                    fail(
                        fmt::format("{}; under way: {}; {}. A rank, its host or its network may "
                                    "be gone",
                                    error, describe(collective), late_ranks(collective)));
                }
            }
            const auto waiting = pending();
            // A process that has ended without taking its leave will never arrive.
            if (!waiting || std::none_of(table_.begin(), table_.end(), gone)) {
                last_whole = Clock::now();
            }
            if (!waiting) {
                continue;
            }
            const bool set_up = waiting->collective.kind == kSetUp;
            if (waiting->seconds >= (set_up ? options_.setup_seconds : options_.timeout_seconds) ||
                seconds_since(last_whole) >= kGoneSeconds) {
                fail(
                    fmt::format("no progress for {:.0f} s in {}; {}. Look at the late rank first "
                                "(is it running? its host's log, memory, network); --timeout "
                                "sets how long a wait may last",
                                waiting->seconds, describe(waiting->collective),
                                late_ranks(waiting->collective)));
            }
            if (waiting->seconds >= options_.warning_seconds && !set_up &&
                warned_of != waiting->collective.number) {
                warned_of = waiting->collective.number;
                if (speaks()) {
                    fmt::print(stderr, "gyre: waiting for {:.0f} s in {}; {}\n", waiting->seconds,
                               describe(waiting->collective), late_ranks(waiting->collective));
                }
            }
        }
    }
    void pause() const {
        for (auto end = Clock::now() + kPulse; Clock::now() < end && !leaving_;) {
            std::this_thread::sleep_for(kPulse / 10);
        }
    }

    static bool gone(const Status& s) {
        return (s.flags & Status::kClosed) != 0 && (s.flags & Status::kLeaving) == 0;
    }
    // Gone, and not because it had noticed that another one is.
    static bool at_fault(const Status& s) { return gone(s) && (s.flags & Status::kFailing) == 0; }
    std::string absent_ranks() const {
        std::string text;
        for (const Status& s : table_) {
            if (s.rank != rank() && (at_fault(s) || (!gone(s) && s.silent >= kSilentSeconds))) {
                text += fmt::format("{}{} ({})", text.empty() ? "gone: " : ", ", name(s),
                                    how_absent(s));
            }
        }
        return text.empty() ? "no other rank's process has ended" : text;
    }
    static std::string how_absent(const Status& s) {
        return !gone(s)
                   ? fmt::format("silent for {:.0f} s: stopped, or its host or network is gone",
                                 s.silent)
               : at_fault(s) ? "its process has ended"
                             : "it has given up, too";
    }

    bool somebody_reports() const {
        return std::any_of(table_.begin(), table_.end(), [&](const Status& s) {
            return s.rank != rank() && (s.flags & Status::kReporting) != 0;
        });
    }

    // One rank speaks for the job: the lowest that waits and is heard.
    bool speaks() const {
        if (somebody_reports()) {
            return false;
        }
        for (const Status& s : table_) {
            if (s.rank == rank()) {
                return true;
            }
            if (s.waiting >= 0.0f && s.silent < kSilentSeconds && !gone(s)) {
                return false;
            }
        }
        return true;
    }

    std::string name(const Status& s) const {
        return fmt::format("rank {} on {}", s.rank, hosts_[static_cast<std::size_t>(s.rank)]);
    }
    static std::string describe(const Collective& c) {
        return fmt::format(
            "collective {}, {} of {} bytes{}", c.number, c.kind, c.bytes,
            c.step < 0 ? "" : fmt::format(" (step {}, bucket {})", c.step + 1, c.bucket));
    }
    std::string late_ranks(const Collective& c) const {
        std::string late, arrived;
        for (const Status& s : table_) {
            if (s.started > c.number) {
                arrived += fmt::format("{}{}", arrived.empty() ? "" : ", ", s.rank);
                if (!gone(s) && s.silent < kSilentSeconds) {
                    continue;
                }
            }
            late +=
                fmt::format("{}{} ({})", late.empty() ? "" : "; ", name(s),
                            gone(s) || s.silent >= kSilentSeconds
                                ? how_absent(s)
                                : fmt::format("heard of {:.0f} s ago, at collective {}, step {}",
                                              s.silent, s.started, s.step + 1));
        }
        return fmt::format("arrived: rank{} {}; not answering or not arrived: {}",
                           arrived.find(',') == std::string::npos ? "" : "s",
                           arrived.empty() ? "none" : arrived,
                           late.empty() ? "none: the library is stuck" : late);
    }

    // Reports, keeps the flight record, and ends the job.
    [[noreturn]] void fail(const std::string& reason) {
        failing_ = true;
        if (!options_.flight_record.empty()) {
            std::ofstream(fmt::format("{}.rank{}.json", options_.flight_record, rank()))
                << recorder_.json(rank(), size(), host_, reason) << "\n";
        }
        // The lowest rank that waits reports, unless it notices nothing.
        bool speak = speaks();
        for (const auto begin = Clock::now();
             !speak && !somebody_reports() && !(speak = seconds_since(begin) >= kSpeechSeconds);) {
            std::this_thread::sleep_for(kPulse / 4);
            exchange();
        }
        if (speak) {
            reporting_ = true;
        }
        exchange();  // the others then hold their tongues, even when this process is gone
        if (speak || own_terminal()) {
            fmt::print(stderr, "gyre: rank {} on {}: {}. Ending the job with exit code {}\n",
                       rank(), host_, printable(reason, true),
                       static_cast<int>(ExitCode::communication));
            std::fflush(stderr);
        } else {
            // The one that speaks may still be writing; its abort would cut it off.
            std::this_thread::sleep_for(std::chrono::milliseconds(500));
        }
        // The library's abort may itself hang on the very rank that is gone.
        std::thread([] {
            std::this_thread::sleep_for(std::chrono::seconds(kAbortSeconds));
            std::_Exit(static_cast<int>(ExitCode::communication));
        }).detach();
        abort(static_cast<int>(ExitCode::communication));
    }

    std::unique_ptr<Communicator> inner_;
    const WatchOptions options_;
    const std::string host_;
    std::vector<std::string> hosts_;  // [rank]
    FlightRecorder recorder_;
    std::atomic<std::int64_t> step_{-1};
    std::atomic<int> bucket_{-1};
    std::atomic<bool> leaving_{false};
    std::mutex failure_mutex_;
    std::string failure_;  // the library's error that a rank has met
    // The thread's.
    bool reporting_ = false, failing_ = false;
    Socket listener_;
    std::vector<Link> links_;    // rank 0: to each rank; others: [0], to rank 0
    std::vector<bool> joined_;   // [rank]: the link was made, so that its end means something
    std::vector<Status> table_;  // [rank]
    std::vector<Clock::time_point> heard_;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<Communicator> make_watched_communicator(std::unique_ptr<Communicator> inner,
                                                        const WatchOptions& options) {
    if (inner->size() == 1) {
        return inner;
    }
    return std::make_unique<WatchedCommunicator>(std::move(inner), options);
}

}  // namespace gyre::comm
