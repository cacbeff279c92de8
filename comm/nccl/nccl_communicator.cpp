// The communicator over NCCL (2.14 or later).
//
// NCCL's communicator is non-blocking: calls that would wait for other ranks return at once and are
// polled, so that every wait here has a deadline. A collective runs on the device's copy stream;
// the host waits for it only when a step is synchronized. NCCL's abort may itself hang, so it gets
// a separate thread and a few seconds.
#include "comm/nccl/nccl_communicator.hpp"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>

#include "base/clock.hpp"
#include "base/host_name.hpp"
#include "comm/forwarding_communicator.hpp"
#include "comm/nccl/nccl_library.hpp"

namespace gyre::comm {
namespace {

constexpr double kNcclAbortSeconds = 2.0;  // limit for NCCL's abort
constexpr double kFinalizeSeconds = 10.0;  // limit for the last reductions at the end
// NCCL's thread mostly needs some 20 us for a call; sleeping at once would delay every bucket.
constexpr double kYieldSeconds = 200e-6;
constexpr std::chrono::microseconds kNcclPollInterval{50};

nccl::Type nccl_type(DataType type) {
    return type == DataType::float32    ? nccl::float32
           : type == DataType::bfloat16 ? nccl::bfloat16
                                        : nccl::float16;
}

// Calls an NCCL function and checks its result, even if the result comes later.
#define GYRE_NCCL(lock, function, ...)                                                      \
    finish(lock, library_->function(__VA_ARGS__), #function "(" #__VA_ARGS__ ")", __FILE__, \
           __LINE__)

class NcclCommunicator final : public ForwardingCommunicator {
 public:
    // host: the inner communicator, in host memory.
    NcclCommunicator(std::unique_ptr<Communicator> host, const NcclOptions& options)
        : ForwardingCommunicator(std::move(host)), options_(options), host_name_(host_name()) {}
    ~NcclCommunicator() override;

    std::string description() const override {
        return comm_ == nullptr ? inner().description()
                                : fmt::format("NCCL ({}), started over {}", library_->version(),
                                              inner().description());
    }
    bool use_device(Device& device) override;
    std::unique_ptr<Request> start(const Collective& collective) override;
    bool sums_in_tree() const override {
        return device_ == nullptr ? inner().sums_in_tree() : Communicator::sums_in_tree();
    }
    bool can_sum_in_tree() const override {
        return device_ == nullptr ? inner().can_sum_in_tree() : Communicator::sums_in_tree();
    }
    std::string async_error() override;
    [[noreturn]] void abort(int exit_code) noexcept override;

 private:
    class Operation;

    bool usable(const DeviceIdentity& own);
    void refuse_shared_gpus(const DeviceIdentity& own);
    void connect();
    void initialise(const nccl::UniqueId& id);
    // Waits until NCCL's answer is final; if it is an error, aborts NCCL and throws. The caller
    // holds the lock.
    void finish(const std::unique_lock<std::mutex>& lock, nccl::Result result,
                const char* expression, const char* file, int line);
    std::string error_text(nccl::Result result) const;
    void abort_nccl() noexcept;
    void abort_nccl(const std::unique_lock<std::mutex>& lock) noexcept;
    void stop_if_aborted() const;

    const NcclOptions options_;
    const std::string host_name_;
    Device* device_ = nullptr;
    std::optional<bool> chosen_;  // whether collectives run over NCCL, once decided
    std::unique_ptr<nccl::Library> library_;
    std::mutex mutex_;  // one NCCL call at a time, except the abort
    nccl::Handle comm_ = nullptr;
    std::atomic<bool> aborted_{false}, abort_begun_{false};
};

class NcclCommunicator::Operation final : public Request {
 public:
    Operation(NcclCommunicator& comm, std::optional<Device::Event> end)
        : comm_(comm), device_(*comm.device_), end_(end) {}
    void wait() override {
        if (end_ && !done_) {
            device_.synchronize(*end_);
            comm_.stop_if_aborted();
        }
        done_ = true;
    }
    bool wait_on_stream() override {
        if (end_) {
            device_.wait(*end_);
        }
        return !end_;
    }
    std::optional<Ran> ran() const override {
        return end_ ? std::optional(Ran{.event = end_}) : std::nullopt;
    }

 private:
    NcclCommunicator& comm_;
    Device& device_;
    const std::optional<Device::Event> end_;  // none: nothing to do
    bool done_ = false;
};

NcclCommunicator::~NcclCommunicator() {
    if (comm_ == nullptr || aborted_) {
        return;
    }
    // Errors cannot be reported here; NCCL is aborted if it does not end in time.
    const Clock::time_point begin = Clock::now();
    nccl::Result state = library_->comm_finalize(comm_);
    while (state == nccl::in_progress && seconds_since(begin) < kFinalizeSeconds) {
        std::this_thread::sleep_for(kNcclPollInterval);
        if (library_->comm_get_async_error(comm_, &state) != nccl::success) {
            break;
        }
    }
    if (state == nccl::success) {
        library_->comm_destroy(comm_);
    } else {
        abort_nccl();
    }
}

bool NcclCommunicator::use_device(Device& device) {
    if (!chosen_) {
        const DeviceIdentity own = device.device_identity();
        chosen_ = usable(own);
        if (*chosen_) {
            connect();
        }
    }
    if (!*chosen_ || device.host_memory()) {
        device_ = nullptr;
        return inner().use_device(device);
    }
    device_ = &device;
    return true;
}

// Collective. Returns whether all ranks can use NCCL, and loads it if so.
bool NcclCommunicator::usable(const DeviceIdentity& own) {
    // The stand-in is used only on request; for "auto" the emulated GPU counts as a CPU.
    const bool gpu = !own.uuid.empty() && (options_.required || !own.emulated);
    std::vector<double> gpus(static_cast<std::size_t>(size()));
    gpus[static_cast<std::size_t>(rank())] = gpu ? 1.0 : 0.0;
    inner().allreduce_sum(gpus);
    int count = 0, without = -1;
    for (int r = size() - 1; r >= 0; --r) {
        const bool has = gpus[static_cast<std::size_t>(r)] != 0.0;
        count += has;
        without = has ? without : r;
    }
    if (without >= 0 && options_.required) {
        throw AgreedError(ExitCode::usage,
                          fmt::format("`comm` nccl reduces in CUDA GPU memory, but rank {} "
                                      "on {} uses the CPU; use `device` cuda, or `comm` auto",
                                      without, broadcast_string(inner(), host_name_, without)));
    }
    std::string reason = without < 0 ? "" : fmt::format("rank {} has no CUDA GPU", without);
    if (reason.empty()) {
        refuse_shared_gpus(own);
        try {
            agree(inner(), [&] {
                library_ = std::make_unique<nccl::Library>();
                if (library_->emulated != own.emulated) {
                    library_.reset();
                    throw usage_error(
                        own.emulated ? "`comm` nccl needs CUDA GPUs, which `device` emulated is "
                                       "not; use `comm` auto"
                                     : "the library in GYRE_NCCL_LIBRARY is the tests' stand-in "
                                       "for NCCL, which cannot use GPUs; unset that");
                }
            });
            return true;
        } catch (const AgreedError& error) {
            if (options_.required) {
                throw;
            }
            reason = error.what();
        }
    }
    if (count > 0 && is_root()) {
        fmt::print(stderr, "gyre: NCCL is not used, gradients are reduced in host memory: {}\n",
                   reason);
    }
    return false;
}

// Collective. Rejects shared GPUs, because NCCL would hang or fail without saying why.
void NcclCommunicator::refuse_shared_gpus(const DeviceIdentity& own) {
    struct Place {
        std::string host, bus_id, uuid;
        bool same_gpu(const Place& other) const {
            return uuid == other.uuid || (host == other.host && bus_id == other.bus_id);
        }
    };
    std::vector<Place> places;
    for (int r = 0; r < size(); ++r) {
        places.push_back({broadcast_string(inner(), host_name_, r),
                          broadcast_string(inner(), own.bus_id, r),
                          broadcast_string(inner(), own.uuid, r)});
    }
    std::string table;
    for (std::size_t r = 0; r < places.size(); ++r) {
        for (std::size_t other = 0; other < places.size(); ++other) {
            if (other != r && places[r].same_gpu(places[other])) {
                table += fmt::format("\n  {:>4}  {:<24}  {:<14}  {}", r, places[r].host,
                                     places[r].bus_id, places[r].uuid);
                break;
            }
        }
    }
    if (table.empty()) {
        return;
    }
    table = fmt::format("\n  rank  {:<24}  {:<14}  UUID", "host", "PCI bus id") + table;
    if (!options_.share_gpu) {
        throw AgreedError(ExitCode::communication,
                          fmt::format("ranks share a GPU, which is slower than one rank and which "
                                      "NCCL does not allow; start one rank per GPU (look at "
                                      "CUDA_VISIBLE_DEVICES and at how the launcher binds GPUs), "
                                      "or, for experiments, add `share-gpu`{}",
                                      table));
    }
    // NCCL tells GPUs apart by host and bus id: each rank claims a separate host, so NCCL must not
    // use transports that work only within a host.
    setenv("NCCL_HOSTID", fmt::format("{}-rank-{}", host_name_, rank()).c_str(), 1);
    setenv("NCCL_P2P_DISABLE", "1", 0);
    setenv("NCCL_SHM_DISABLE", "1", 0);
    if (is_root()) {
        fmt::print(stderr,
                   "gyre: ranks share a GPU: NCCL is told that every rank is on a separate host "
                   "(NCCL_HOSTID, NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1), so its times mean "
                   "nothing:{}\n",
                   table);
    }
}

// Collective. Starts NCCL on all ranks.
void NcclCommunicator::connect() {
    nccl::UniqueId id{};
    agree(inner(), [&] {
        if (is_root()) {
            const std::unique_lock lock(mutex_);
            GYRE_NCCL(lock, get_unique_id, &id);
        }
    });
    inner().broadcast(&id, sizeof id, 0);
    agree(inner(), [&] { initialise(id); });
}

void NcclCommunicator::initialise(const nccl::UniqueId& id) {
    nccl::Config config;
    const Clock::time_point begin = Clock::now();
    nccl::Handle comm = nullptr;
    nccl::Result state = library_->comm_init_rank_config(&comm, size(), id, rank(), &config);
    {
        const std::lock_guard lock(mutex_);
        comm_ = comm;
    }
    while (state == nccl::in_progress && seconds_since(begin) < options_.init_timeout) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const std::lock_guard lock(mutex_);
        if (const auto asked = library_->comm_get_async_error(comm_, &state);
            asked != nccl::success) {
            state = asked;
        }
    }
    if (state == nccl::success) {
        return;
    }
    const std::string what =
        state == nccl::in_progress
            ? fmt::format("has not connected the {} ranks within {:g} s (`init-timeout`)", size(),
                          options_.init_timeout)
            : fmt::format("could not connect the {} ranks: {}", size(), error_text(state));
    abort_nccl();
    throw Error(ExitCode::communication,
                fmt::format("NCCL {} {}, on rank {} on {}; it may have picked a network interface "
                            "that does not lead to the other hosts (set NCCL_SOCKET_IFNAME to one "
                            "that does), or a firewall may block it; NCCL_DEBUG=INFO shows what it "
                            "tries, and `comm` mpi or gloo does not need NCCL",
                            library_->version(), what, rank(), host_name_));
}

std::string NcclCommunicator::error_text(nccl::Result result) const {
    const char* details = library_->get_last_error(comm_);
    return fmt::format("{}{}{}", library_->get_error_string(result),
                       details != nullptr && *details != '\0' ? "; NCCL says: " : "",
                       details == nullptr ? "" : details);
}

void NcclCommunicator::finish(const std::unique_lock<std::mutex>& lock, nccl::Result result,
                              const char* expression, const char* file, int line) {
    if (result == nccl::in_progress) {
        const Clock::time_point begin = Clock::now();
        while (result == nccl::in_progress && !aborted_ &&
               seconds_since(begin) < options_.collective_timeout) {
            if (const auto asked = library_->comm_get_async_error(comm_, &result);
                asked != nccl::success) {
                result = asked;
            }
            if (result != nccl::in_progress) {
                break;
            }
            if (seconds_since(begin) < kYieldSeconds) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(kNcclPollInterval);
            }
        }
    }
    stop_if_aborted();
    if (result == nccl::success) {
        return;
    }
    const Error error(
        ExitCode::communication,
        fmt::format("NCCL: {} failed: {} ({}:{}, rank {} on {}); a rank, its host or its network "
                    "may be gone: look at the other ranks' messages, and run with NCCL_DEBUG=INFO",
                    expression, error_text(result), file, line, rank(), host_name_));
    // Memory is released only when the device is done, which may never happen.
    abort_nccl(lock);
    throw error;
}

std::unique_ptr<Request> NcclCommunicator::start(const Collective& c) {
    if (device_ == nullptr) {
        return inner().start(c);
    }
    if (c.count == 0) {
        return std::make_unique<Operation>(*this, std::nullopt);
    }
    void* const data = c.data;
    const auto count = static_cast<std::size_t>(c.count);
    const nccl::Type type = nccl_type(c.type);
    const Device::Event end = device_->submit_to_copy_stream([&](void* stream) {
        const std::unique_lock lock(mutex_);
        stop_if_aborted();
        switch (c.kind) {
            case Collective::Kind::all_reduce:
                GYRE_NCCL(lock, all_reduce, data, data, count, type, nccl::sum, comm_, stream);
                return;
            case Collective::Kind::all_gather: {
                const void* const own = static_cast<std::byte*>(data) + rank() * bytes_of(c);
                GYRE_NCCL(lock, all_gather, own, data, count, type, comm_, stream);
                return;
            }
            case Collective::Kind::reduce_scatter: {
                void* const own = static_cast<std::byte*>(data) + rank() * bytes_of(c);
                GYRE_NCCL(lock, reduce_scatter, data, own, count, type, nccl::sum, comm_, stream);
                return;
            }
        }
    });
    return std::make_unique<Operation>(*this, end);
}

std::string NcclCommunicator::async_error() {
    // A thread that holds the lock looks for errors itself.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock && comm_ != nullptr && !aborted_) {
        nccl::Result state = nccl::success;
        const nccl::Result asked = library_->comm_get_async_error(comm_, &state);
        state = asked == nccl::success ? state : asked;
        if (state != nccl::success && state != nccl::in_progress) {
            return fmt::format("NCCL reports: {} (NCCL_DEBUG=INFO says more)", error_text(state));
        }
    }
    return inner().async_error();
}

// Ends NCCL's work on the device, as far as possible.
void NcclCommunicator::abort_nccl() noexcept {
    const Clock::time_point begin = Clock::now();
    aborted_ = true;
    // No thread should be inside NCCL, but one that is may be stuck there.
    std::unique_lock lock(mutex_, std::defer_lock);
    while (!lock.try_lock() && seconds_since(begin) < 1.0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    abort_nccl(lock);
}

void NcclCommunicator::abort_nccl(const std::unique_lock<std::mutex>&) noexcept {
    aborted_ = true;
    if (comm_ == nullptr || abort_begun_.exchange(true)) {
        return;
    }
    const Clock::time_point begin = Clock::now();
    try {
        const auto done = std::make_shared<std::atomic<bool>>(false);
        std::thread([done, abort = library_->comm_abort, comm = comm_] {
            abort(comm);
            *done = true;
        }).detach();
        while (!*done && seconds_since(begin) < kNcclAbortSeconds) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    } catch (const std::exception&) {
        // If no thread can be started, NCCL is not aborted; the process is about to end.
    }
}

// After an abort the device continues without the sums; the aborting thread is about to end the
// process.
void NcclCommunicator::stop_if_aborted() const {
    if (aborted_) {
        std::this_thread::sleep_for(std::chrono::seconds(10));
        throw Error(ExitCode::communication, "NCCL was aborted");
    }
}

void NcclCommunicator::abort(int exit_code) noexcept {
    abort_nccl();
    inner().abort(exit_code);
    std::_Exit(exit_code);
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host,
                                                     const NcclOptions& options) {
    return std::make_unique<NcclCommunicator>(std::move(host), options);
}

}  // namespace gyre::comm
