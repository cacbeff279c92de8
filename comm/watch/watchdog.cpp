#include "comm/watch/watchdog.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/host_name.hpp"
#include "comm/forwarding_communicator.hpp"
#include "comm/watch/watcher.hpp"

namespace gyre::comm {
namespace {

// Deletes a communicator. What its library does then may wait for all ranks, as MPI_Finalize does,
// without end for one that is stopped; the watcher has ended by then.
void end_in_time(Communicator* comm, const WatchOptions& options) {
    const int rank = comm->rank();
    std::promise<void> ended;
    std::thread alarm([&, waiting = ended.get_future()] {
        const std::chrono::duration<double> limit(options.timeout_seconds);
        if (waiting.wait_for(limit) == std::future_status::timeout) {
            print_end(rank, host_name(),
                      fmt::format("all is done here, but the ranks have not parted within "
                                  "`timeout` ({:g} s): another one is stopped, or its host is lost",
                                  options.timeout_seconds),
                      options);
            std::_Exit(static_cast<int>(ExitCode::communication));
        }
    });
    delete comm;
    ended.set_value();
    alarm.join();
}

class WatchedCommunicator final : public ForwardingCommunicator {
 public:
    WatchedCommunicator(std::unique_ptr<Communicator> inner, const WatchOptions& options)
        : ForwardingCommunicator(
              {inner.release(), [options](Communicator* comm) { end_in_time(comm, options); }}),
          watcher_(this->inner(), options) {}

    bool use_device(Device& device) override {
        bool result = false;
        watched({Watcher::kSetUp}, [&] { result = inner().use_device(device); });
        return result;
    }
    std::unique_ptr<Request> start(const Collective& collective) override {
        return begun(label_of(collective), [&] { return inner().start(collective); });
    }
    std::unique_ptr<Request> track(std::unique_ptr<Request> operation,
                                   const Label& label) override {
        return begun(label, [&] { return inner().track(std::move(operation), label); });
    }
    void allreduce_sum(std::span<double> data) override {
        watched({"allreduce(double)", static_cast<std::int64_t>(data.size_bytes())},
                [&] { inner().allreduce_sum(data); });
    }
    void broadcast(void* data, std::size_t bytes, int root) override {
        watched({"broadcast", static_cast<std::int64_t>(bytes)},
                [&] { inner().broadcast(data, bytes, root); });
    }
    void barrier() override {
        watched({"barrier"}, [&] { inner().barrier(); });
    }

 private:
    class WatchedRequest;

    FlightRecorder& recorder() { return watcher_.recorder(); }

    template <typename Work>
    std::unique_ptr<Request> begun(const Label& label, const Work& work);
    template <typename Work>
    void watched(const Label& label, const Work& work);
    template <typename Work>
    auto guarded(const Work& work) -> decltype(work());

    Watcher watcher_;
};

class WatchedCommunicator::WatchedRequest final : public Request {
 public:
    WatchedRequest(WatchedCommunicator& comm, std::int64_t number, std::unique_ptr<Request> inner)
        : comm_(comm), number_(number), inner_(std::move(inner)) {}
    // If an error prevented the wait, the device may be busy with the operation for ever.
    ~WatchedRequest() override {
        if (!finished_) {
            comm_.recorder().wait_on_stream(number_);
        }
    }
    void wait() override {
        if (finished_) {
            return;
        }
        comm_.recorder().wait(number_);
        comm_.guarded([&] { inner_->wait(); });
        finish();
    }
    bool wait_on_stream() override {
        if (!finished_) {
            comm_.recorder().wait(number_);
            if (comm_.guarded([&] { return inner_->wait_on_stream(); })) {
                finish();
            } else {
                comm_.recorder().wait_on_stream(number_);
            }
        }
        return finished_;
    }
    void abandon() override { finish(); }
    std::optional<Ran> ran() const override { return inner_->ran(); }

 private:
    void finish() {
        comm_.recorder().finish(number_);
        finished_ = true;
    }

    WatchedCommunicator& comm_;
    const std::int64_t number_;
    std::unique_ptr<Request> inner_;
    bool finished_ = false;
};

template <typename Work>
std::unique_ptr<Request> WatchedCommunicator::begun(const Label& label, const Work& work) {
    if (label.origin.step >= 0) {
        watcher_.set_step(label.origin.step);
    }
    const std::int64_t number = recorder().start(label);
    recorder().wait(number);  // a library that connects when it is first used may block
    auto request = guarded(work);
    recorder().resume(number);
    return std::make_unique<WatchedRequest>(*this, number, std::move(request));
}

// Runs a call that returns when its collective is complete.
template <typename Work>
void WatchedCommunicator::watched(const Label& label, const Work& work) {
    const std::int64_t number = recorder().start(label);
    recorder().wait(number);
    guarded(work);
    recorder().finish(number);
}

// Runs a call of the inner library. Its error seldom says which rank is gone, and every rank gets
// one: so the watchdog's thread, which knows, reports it and ends the process.
template <typename Work>
auto WatchedCommunicator::guarded(const Work& work) -> decltype(work()) {
    try {
        return work();
    } catch (const AgreedError&) {
        throw;
    } catch (const Error& error) {
        if (error.code() != ExitCode::communication) {
            throw;
        }
        watcher_.set_failure(error.what());
    }
    for (;;) {
        std::this_thread::sleep_for(std::chrono::hours(1));
    }
}

}  // namespace

std::unique_ptr<Communicator> make_watched_communicator(std::unique_ptr<Communicator> inner,
                                                        const WatchOptions& options) {
    if (inner->size() == 1) {
        return inner;
    }
    return std::make_unique<WatchedCommunicator>(std::move(inner), options);
}

}  // namespace gyre::comm
