// Bounds the start of a rank, until the watchdog is up: MPI's own start-up and Gloo's connecting of
// the ranks may wait for a rank that is stopped or gone, and cannot be interrupted.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "base/option_names.hpp"

namespace gyre::comm {

// News of the other ranks while a rank starts. Called by one thread at a time.
class StartNews {
 public:
    struct News {
        std::string gone;   // who has ended for certain, so that waiting is of no use
        std::string known;  // what else there is to say about who is missing
    };
    virtual ~StartNews() = default;
    // `last`: the answer will be printed; if not, nothing is asked that costs much.
    virtual News news(bool last) = 0;
    virtual void started() {}  // this rank's start is over
    // The process ends now, for this reason.
    virtual void leave(const std::string& /*reason*/) {}
};

class StartAlarm {
 public:
    // Time counts from now on.
    explicit StartAlarm(double seconds, Wording wording = {})
        : seconds_(seconds), wording_(std::move(wording)) {}
    ~StartAlarm() { stop(); }
    StartAlarm(const StartAlarm&) = delete;
    StartAlarm& operator=(const StartAlarm&) = delete;

    // From now until stop(), a thread ends this process with a message and exit code 4 when another
    // rank has ended, or at the deadline and `grace` seconds. The higher ranks of those that share
    // a terminal let the lower ones speak first.
    void watch(int rank, double grace, bool own_terminal, std::unique_ptr<StartNews> others);
    // The start has succeeded, or was not watched.
    void stop();
    // After an error: stops, and adds to its message what is known of the others. Takes up to a
    // second, until it is known that somebody has ended.
    std::string explain(std::string message);

 private:
    void run();
    void stop_thread();

    const Clock::time_point begin_ = Clock::now();
    const double seconds_;
    const Wording wording_;
    double limit_ = 0.0;
    int rank_ = 0;
    bool own_terminal_ = false;
    std::unique_ptr<StartNews> others_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

enum class ProcessState { running, stopped, gone };
// A process of this host and this process's namespace of numbers.
ProcessState state_of_process(int process);

// MPI's other ranks on this host, as the system's table of processes shows them.
std::unique_ptr<StartNews> mpi_start_news(int rank);

}  // namespace gyre::comm
