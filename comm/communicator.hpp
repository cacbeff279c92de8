// How the ranks of a job talk to each other. One implementation per library; a single process has
// its own, in which every reduction is already complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "kernels/device/device.hpp"

namespace gyre::comm {

// An operation under way. Destroying it does not wait; the data stays the operation's until then.
class Request {
 public:
    virtual ~Request() = default;
    // The host waits until the operation is complete on this rank. Throws Error(communication).
    virtual void wait() = 0;
    // The device's compute stream waits: its next calls see the result. If the operation does
    // not run on the device, the host waits instead, and true says that it is complete.
    virtual bool wait_on_stream() {
        wait();
        return true;
    }
    // It was captured in a graph, and is not under way: nobody will wait for it.
    virtual void abandon() {}
    // For timelines, once it is complete: when it ran, by the host's clock, or the device's event
    // behind it. Neither, if there was nothing to do.
    struct Ran {
        Clock::time_point begin = {}, end = {};
        std::optional<Device::Event> event = {};
    };
    virtual std::optional<Ran> ran() const { return std::nullopt; }
};

class Communicator {
 public:
    virtual ~Communicator() = default;

    virtual std::string description() const = 0;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    virtual int local_rank() const = 0;  // among the ranks of this host
    virtual int local_size() const = 0;
    // This host's address, as a number, on the network that the ranks talk over; empty: not known.
    virtual std::string address() const { return {}; }
    // True if the ranks were started one by one: each must report what ends the job.
    virtual bool own_terminal() const { return false; }

    // True if started collectives work in this device's memory, ordered with its calls; otherwise
    // they work in the host's. Called by all ranks before the first start(); the first call
    // decides.
    virtual bool use_device(Device& device) { return device.host_memory(); }
    // All ranks start the same collectives in the same order. The data must stay untouched until
    // the request's wait() returns.
    virtual std::unique_ptr<Request> start(const Collective& collective) = 0;
    // True if the sums of started collectives are those of the tree over the ranks
    // (base/sum_tree.hpp), or can be: Collective::in_tree; after use_device(). Two terms have one
    // order of addition only.
    virtual bool sums_in_tree() const { return size() <= 2; }
    virtual bool can_sum_in_tree() const { return sums_in_tree(); }
    // An operation of this rank's that contains collectives, such as a graph of them: returns what
    // the rank is to wait for in its place. In the same order on all ranks, too.
    virtual std::unique_ptr<Request> track(std::unique_ptr<Request> operation,
                                           const Label& /*label*/) {
        return operation;
    }
    // Blocking and in the host's memory, whatever is under way: for figures that need more than
    // float's 24 bits.
    virtual void allreduce_sum(std::span<double> data) = 0;
    virtual void broadcast(void* data, std::size_t bytes, int root) = 0;
    virtual void barrier() = 0;
    // The error of collectives under way, which may therefore never complete; empty: none. For the
    // watching thread.
    virtual std::string async_error() { return {}; }
    // Ends all ranks of the job at once with this exit code. Does not return.
    [[noreturn]] virtual void abort(int exit_code) noexcept = 0;

    bool is_root() const { return rank() == 0; }
};

// The communicator this process was launched for. It is MPI's if mpirun started the ranks, or srun
// with --mpi=pmix. It is Gloo's if `gyre launch`, torchrun or plain srun started several, or if
// they meet as env:// describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). On GPUs, NCCL's takes
// over from either. Otherwise the process is alone. Throws Error(communication) if launcher and MPI
// disagree.
std::unique_ptr<Communicator> make_communicator();

std::unique_ptr<Communicator> make_single_communicator();
// Loads and initialises MPI; MPI is finalised when the communicator is destroyed. Throws
// Error(communication) if it is not there.
std::unique_ptr<Communicator> make_mpi_communicator();

// The version and the file of the library found, for `gyre info`; usable without starting it.
std::string mpi_library_version();

// The text of rank `root`, on every rank.
std::string broadcast_string(Communicator& comm, std::string text, int root);

// One named fact that must be the same on all ranks, such as an option or a hash.
struct ManifestEntry {
    std::string name, value;
};
// Compares the entries of all ranks with rank 0's; throws Error(communication) on every rank if any
// differs, naming the entry, both values and the rank.
void require_same_manifest(Communicator& comm, const std::vector<ManifestEntry>& entries);

// An exception that is not an Error: a bug, or too little memory.
Error internal_error(const std::exception& other);
// True if it says that memory has ended, or that no thread can be started.
bool is_out_of_resources(const std::exception& other);

// Calls work() on every rank and returns only if it succeeded on all of them. Otherwise every rank
// throws the Error of the lowest rank that failed, so that it is printed once and no rank is left
// waiting for another.
void agree(Communicator& comm, const std::function<void()>& work);

// An error that all ranks have in common: rank 0 prints it, and all end in an orderly way.
class AgreedError : public Error {
 public:
    using Error::Error;
};

}  // namespace gyre::comm
