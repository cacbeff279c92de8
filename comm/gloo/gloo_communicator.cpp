// The communicator over Gloo's TCP transport, for CPU ranks on hosts without MPI.
//
// Gloo's collectives block, so gradient reductions run one after another on a thread of their own,
// in the order of the calls. They and the few other collectives have a context (a set of
// connections) each, so that both may be under way. Of small reductions every rank sends its terms
// to all others when they are asked for, and the thread adds up what comes.
#include <fmt/format.h>
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "base/clock.hpp"
#include "base/host_name.hpp"
#include "base/printable.hpp"
#include "comm/communicator.hpp"
#include "comm/gloo/job_device.hpp"
#include "comm/launch/meeting_error.hpp"
#include "comm/launch/rendezvous.hpp"
#include "comm/launch/start_alarm.hpp"
#include "comm/launch/tcp_address.hpp"
#include "comm/term_sums.hpp"

namespace gyre::comm {
namespace {

constexpr double kConnectGrace = 5.0;  // after --init-timeout, for ranks that met just before

// Our store in the form that Gloo asks for.
class GlooStore final : public gloo::rendezvous::Store {
 public:
    // peer: the rank whose address was asked for last, which Gloo then waits for.
    GlooStore(gyre::comm::Store& store, std::string prefix, const Place& place, int& peer)
        : store_(store), prefix_(std::move(prefix)), place_(place), peer_(peer) {}

    void set(const std::string& key, const std::vector<char>& data) override {
        store_.set(prefix_ + key, std::string(data.begin(), data.end()));
    }
    std::vector<char> get(const std::string& key) override {
        const std::string value = ask(key);
        return {value.begin(), value.end()};
    }
    void wait(const std::vector<std::string>& keys) override {
        for (const std::string& key : keys) {
            ask(key);
        }
    }
    void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override {
        wait(keys);  // the store has the deadline of the start
    }

 private:
    // Gloo's keys end in the number of the rank that sets them.
    std::string ask(const std::string& key) {
        const std::size_t digits = key.find_last_not_of("0123456789") + 1;
        peer_ = digits < key.size() ? std::atoi(key.c_str() + digits) : -1;
        return store_.get(prefix_ + key, place_.name(peer_));
    }

    gyre::comm::Store& store_;
    std::string prefix_;
    const Place& place_;
    int& peer_;
};

// The address at which this rank listens for the others.
std::string own_address(const Store& store, bool one_host) {
    if (std::getenv(kInterfaceVariable) == nullptr) {
        if (!store.local_address().empty()) {
            return store.local_address();
        }
        if (one_host) {
            return "127.0.0.1";
        }
    }
    std::string address = listening_address();
    if (address.empty()) {
        throw Error(ExitCode::communication,
                    fmt::format("{} has no address that other hosts could reach; name the network "
                                "interface in {}",
                                host_name(), kInterfaceVariable));
    }
    return address;
}

// Bytes that a rank receives for a sum: up to this size all terms are sent directly to all others.
// In Gloo's ring a rank waits for twice as many messages as there are ranks, one after another, and
// each wakes Gloo's thread and then ours, which may take 100 us on a virtual machine.
constexpr std::size_t kDirectBytes = 128 << 10;
constexpr std::uint8_t kDirectSlotPrefix = 0x40, kSumSlotPrefix = 0x41;  // Gloo's own are 1 to 8

class GlooCommunicator final : public Communicator {
 public:
    GlooCommunicator(const StartUp& start_up, const LaunchSpec& options, StartAlarm& alarm);
    ~GlooCommunicator() override;

    std::string description() const override {
        return fmt::format("Gloo over TCP, met at {}", where_);
    }
    int rank() const override { return rank_; }
    int size() const override { return size_; }
    int local_rank() const override { return place_.local_rank; }
    int local_size() const override { return place_.local_size; }
    bool can_sum_in_tree() const override { return true; }
    std::string address() const override { return address_; }
    bool own_terminal() const override { return own_terminal_; }
    std::unique_ptr<Request> start(const Collective& collective) override;
    void allreduce_sum(std::span<double> data) override;
    void broadcast(void* data, std::size_t bytes, int root) override;
    void barrier() override;
    [[noreturn]] void abort(int exit_code) noexcept override;

 private:
    struct Operation {
        Collective collective;
        std::uint32_t number;
        bool done = false;
        std::string failure{};
        Request::Ran ran{};
        std::vector<std::byte> terms{};                            // [ranks][count], of a small sum
        std::unique_ptr<gloo::transport::UnboundBuffer> buffer{};  // of the terms
        std::string name() const {
            return fmt::format("{} {} ({} bytes)", name_of(collective.kind), number, bytes());
        }
        std::size_t bytes() const { return static_cast<std::size_t>(bytes_of(collective)); }
    };
    class Waiter;

    void connect_all();
    std::shared_ptr<gloo::Context> connect(const std::string& name,
                                           std::shared_ptr<gloo::transport::Device>& device);
    // Runs one of Gloo's operations, and says which it was if it fails.
    template <typename Work>
    void run(const std::string& what, Work&& work);
    // sum: of two arrays of T. gloo::sum is compiled for any processor, and several times slower
    // than ours.
    template <typename T>
    void allreduce(const std::shared_ptr<gloo::Context>& context, T* data, std::size_t elems,
                   std::uint32_t tag, TermSum sum);
    void run_operation(const Operation& operation);
    void send_terms(Operation& operation);
    void add_terms(const Operation& operation);
    // A rank's part of the data of a sum.
    ByteRange share(const Operation& operation, int rank) const;
    // The rank's share becomes the sum.
    void reduce_shares(const Operation& operation);
    // Every rank gets all shares.
    void gather_shares(const Operation& operation);
    void reduce();  // the thread's loop

    int rank_, size_;
    bool own_terminal_;
    std::chrono::milliseconds timeout_;
    std::string where_, address_;
    std::shared_ptr<gyre::comm::Store> store_;  // kept, so that a second job finds the place taken
    Place place_;
    std::shared_ptr<gloo::Context> control_, gradients_;
    std::uint32_t control_tag_ = 0, started_ = 0;
    std::vector<std::byte> scratch_;  // the thread's
    TreeSum tree_;                    // the thread's

    std::mutex mutex_;  // guards everything below
    std::condition_variable wake_, done_;
    std::deque<std::shared_ptr<Operation>> waiting_;
    bool stopping_ = false;
    std::thread thread_;
};

class GlooCommunicator::Waiter final : public Request {
 public:
    Waiter(GlooCommunicator& comm, std::shared_ptr<Operation> operation)
        : comm_(comm), operation_(std::move(operation)) {}
    void wait() override {
        std::unique_lock lock(comm_.mutex_);
        comm_.done_.wait(lock, [this] { return operation_->done; });
        if (!operation_->failure.empty()) {
            throw Error(ExitCode::communication, operation_->failure);
        }
    }
    std::optional<Ran> ran() const override {
        const std::lock_guard lock(comm_.mutex_);
        const bool any = operation_->ran.end > operation_->ran.begin;
        return any ? std::optional(operation_->ran) : std::nullopt;
    }

 private:
    GlooCommunicator& comm_;
    std::shared_ptr<Operation> operation_;
};

Error over_gloo(const std::string& what, const std::exception& error) {
    return is_out_of_resources(error)
               ? internal_error(error)
               : Error(ExitCode::communication,
                       fmt::format("{} over Gloo failed: {}", what, printable(error.what())));
}

template <typename Work>
void GlooCommunicator::run(const std::string& what, Work&& work) {
    try {
        work();
    } catch (const Error&) {
        throw;
    } catch (const std::exception& error) {  // Gloo's have several bases
        throw over_gloo(what, error);
    }
}

template <typename T>
void GlooCommunicator::allreduce(const std::shared_ptr<gloo::Context>& context, T* data,
                                 std::size_t elems, std::uint32_t tag, TermSum sum) {
    gloo::AllreduceOptions options(context);
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options.setOutput(data, elems);
    options.setTag(tag);
    options.setReduceFunction(sum);
    gloo::allreduce(options);
}

void GlooCommunicator::run_operation(const Operation& o) {
    const Collective& c = o.collective;
    switch (c.kind) {
        case Collective::Kind::all_reduce: {
            const auto elems = static_cast<std::size_t>(c.count);
            if (o.buffer != nullptr) {
                add_terms(o);
            } else if (c.in_tree && !sums_in_tree()) {
                reduce_shares(o);
                gather_shares(o);
            } else if (c.type == DataType::float32) {
                allreduce(gradients_, static_cast<float*>(c.data), elems, o.number,
                          term_sum_of(c.type));
            } else {
                allreduce(gradients_, static_cast<std::uint16_t*>(c.data), elems, o.number,
                          term_sum_of(c.type));
            }
            return;
        }
        case Collective::Kind::all_gather: {
            gloo::AllgatherOptions options(gradients_);
            options.setOutput(static_cast<char*>(c.data),
                              o.bytes() * static_cast<std::size_t>(size_));
            options.setTag(o.number);
            gloo::allgather(options);
            return;
        }
        case Collective::Kind::reduce_scatter:
            reduce_shares(o);
            return;
    }
}

ByteRange GlooCommunicator::share(const Operation& o, int rank) const {
    const Collective& c = o.collective;
    const auto width = static_cast<std::int64_t>(bytes_of(c.type));
    if (c.kind == Collective::Kind::reduce_scatter) {
        return {rank * bytes_of(c), bytes_of(c)};
    }
    const std::int64_t begin = c.count * rank / size_, end = c.count * (rank + 1) / size_;
    return {begin * width, (end - begin) * width};
}

// Each rank gets all terms of its share and adds them up: (size - 1) / size of the data each way,
// as in a ring, without its chain of messages.
void GlooCommunicator::reduce_shares(const Operation& o) {
    const Collective& c = o.collective;
    const ByteRange own = share(o, rank_);
    const auto bytes = static_cast<std::size_t>(own.bytes);
    const auto at = [&](int rank) { return static_cast<std::size_t>(rank) * bytes; };
    scratch_.resize(at(size_));
    const auto terms = gradients_->createUnboundBuffer(scratch_.data(), scratch_.size());
    const auto data =
        gradients_->createUnboundBuffer(c.data, static_cast<std::size_t>(all_of(c, size_).bytes));
    const auto slot = gloo::Slot::build(kDirectSlotPrefix, o.number);
    for (int i = 1; i < size_; ++i) {
        const int from = (rank_ + size_ - i) % size_;
        terms->recv(from, slot, at(from), bytes);
    }
    for (int i = 1; i < size_; ++i) {
        const int to = (rank_ + i) % size_;
        const ByteRange sent = share(o, to);
        data->send(to, slot, static_cast<std::size_t>(sent.begin_bytes),
                   static_cast<std::size_t>(sent.bytes));
    }
    for (int i = 1; i < size_; ++i) {
        terms->waitRecv();
        data->waitSend();
    }
    tree_.add_received(c.type, size_, rank_, bytes / bytes_of(c.type),
                       static_cast<std::byte*>(c.data) + own.begin_bytes, scratch_.data());
}

void GlooCommunicator::gather_shares(const Operation& o) {
    const Collective& c = o.collective;
    const auto data = gradients_->createUnboundBuffer(c.data, o.bytes());
    const auto slot = gloo::Slot::build(kSumSlotPrefix, o.number);
    const auto with = [&](int rank, const auto& call) {
        const ByteRange part = share(o, rank);
        call(static_cast<std::size_t>(part.begin_bytes), static_cast<std::size_t>(part.bytes));
    };
    for (int i = 1; i < size_; ++i) {
        const int from = (rank_ + size_ - i) % size_;
        with(from, [&](std::size_t at, std::size_t bytes) { data->recv(from, slot, at, bytes); });
    }
    for (int i = 1; i < size_; ++i) {
        const int to = (rank_ + i) % size_;
        with(rank_, [&](std::size_t at, std::size_t bytes) { data->send(to, slot, at, bytes); });
    }
    for (int i = 1; i < size_; ++i) {
        data->waitRecv();
        data->waitSend();
    }
}

std::shared_ptr<gloo::Context> GlooCommunicator::connect(
    const std::string& name, std::shared_ptr<gloo::transport::Device>& device) {
    auto context = std::make_shared<gloo::rendezvous::Context>(rank_, size_);
    const auto left = store_->deadline - std::chrono::steady_clock::now();
    context->setTimeout(std::max(std::chrono::milliseconds(1000),
                                 std::chrono::duration_cast<std::chrono::milliseconds>(left)));
    int peer = -1;
    GlooStore store(*store_, name + "/", place_, peer);
    try {
        context->connectFullMesh(store, device);
    } catch (const Error&) {
        throw;
    } catch (const std::exception& error) {
        throw over_gloo("connecting to " + (peer < 0 ? "the ranks" : place_.name(peer)), error);
    }
    context->setTimeout(timeout_);
    return context;
}

GlooCommunicator::GlooCommunicator(const StartUp& start_up, const LaunchSpec& options,
                                   StartAlarm& alarm)
    : rank_(start_up.rank),
      size_(start_up.world_size),
      own_terminal_(start_up.own_terminal),
      timeout_(static_cast<std::int64_t>(options.collective_timeout() * 1000.0)) {
    // Gloo writes to its connections in a way that ends the process if the other side is gone.
    std::signal(SIGPIPE, SIG_IGN);
    Meeting meeting = meet(start_up, options.init_timeout);
    store_ = std::move(meeting.store);
    place_ = std::move(meeting.place);
    where_ = store_->where();
    alarm.watch(rank_, kConnectGrace, own_terminal_, store_start_news(store_, place_, rank_));
    try {
        connect_all();
        barrier();
    } catch (const Error& error) {
        const std::string message = alarm.explain(error.what());
        give_up_start(*store_, rank_, message);
        throw Error(error.code(), message);
    }
    thread_ = std::thread([this] { reduce(); });
}

void GlooCommunicator::connect_all() {
    run("connecting the ranks", [&] {
        address_ = own_address(*store_, place_.one_host);
        auto device = make_job_device(gloo::transport::tcp::attr(address_.c_str()), place_.token);
        control_ = connect("control", device);
        gradients_ = connect("gradients", device);
    });
}

GlooCommunicator::~GlooCommunicator() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
}

void GlooCommunicator::reduce() {
    std::unique_lock lock(mutex_);
    std::string failure;  // after the first, the ranks' order of reductions is lost
    for (;;) {
        wake_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
        if (stopping_) {
            return;
        }
        const std::shared_ptr<Operation> next = waiting_.front();
        waiting_.pop_front();
        lock.unlock();
        if (failure.empty()) {
            failure = next->failure;
        }
        if (failure.empty() && next->collective.count > 0) {
            next->ran.begin = Clock::now();
            try {
                run(next->name(), [&] { run_operation(*next); });
                next->ran.end = Clock::now();
            } catch (const Error& error) {
                failure = error.what();
            }
        }
        lock.lock();
        next->failure = failure;
        next->done = true;
        done_.notify_all();
    }
}

std::unique_ptr<Request> GlooCommunicator::start(const Collective& collective) {
    auto o = std::make_shared<Operation>(Operation{collective, started_++});
    const std::size_t received = o->bytes() * static_cast<std::size_t>(size_ - 1);
    if (collective.kind == Collective::Kind::all_reduce && received > 0 &&
        received <= kDirectBytes) {
        try {
            run(o->name(), [&] { send_terms(*o); });
        } catch (const Error& error) {
            o->failure = error.what();
        }
    }
    {
        const std::lock_guard lock(mutex_);
        waiting_.push_back(o);
    }
    wake_.notify_one();
    return std::make_unique<Waiter>(*this, std::move(o));
}

void GlooCommunicator::send_terms(Operation& o) {
    const std::size_t bytes = o.bytes();
    const auto at = [&](int rank) { return static_cast<std::size_t>(rank) * bytes; };
    o.terms.resize(at(size_));
    std::memcpy(o.terms.data() + at(rank_), o.collective.data, bytes);
    o.buffer = gradients_->createUnboundBuffer(o.terms.data(), o.terms.size());
    const auto slot = gloo::Slot::build(kDirectSlotPrefix, o.number);
    for (int i = 1; i < size_; ++i) {
        const int from = (rank_ + size_ - i) % size_;
        o.buffer->recv(from, slot, at(from), bytes);
    }
    for (int i = 1; i < size_; ++i) {
        o.buffer->send((rank_ + i) % size_, slot, at(rank_), bytes);
    }
}

void GlooCommunicator::add_terms(const Operation& o) {
    for (int i = 1; i < size_; ++i) {
        o.buffer->waitRecv();
        o.buffer->waitSend();
    }
    const Collective& c = o.collective;
    tree_.add_up(
        c.type, size_, static_cast<std::size_t>(c.count),
        [&](int rank) { return o.terms.data() + static_cast<std::size_t>(rank) * o.bytes(); },
        static_cast<std::byte*>(c.data));
}

void GlooCommunicator::allreduce_sum(std::span<double> data) {
    const std::uint32_t tag = control_tag_++;
    if (!data.empty()) {
        run(fmt::format("the sum of {} doubles", data.size()),
            [&] { allreduce(control_, data.data(), data.size(), tag, &gloo::sum<double>); });
    }
}

void GlooCommunicator::broadcast(void* data, std::size_t bytes, int root) {
    const std::uint32_t tag = control_tag_++;
    if (bytes == 0) {
        return;
    }
    run(fmt::format("the broadcast of {} bytes from rank {}", bytes, root), [&] {
        gloo::BroadcastOptions options(control_);
        options.setOutput(static_cast<char*>(data), bytes);
        options.setRoot(root);
        options.setTag(tag);
        gloo::broadcast(options);
    });
}

void GlooCommunicator::barrier() {
    const std::uint32_t tag = control_tag_++;
    run("a barrier", [&] {
        gloo::BarrierOptions options(control_);
        options.setTag(tag);
        gloo::barrier(options);
    });
}

void GlooCommunicator::abort(int exit_code) noexcept {
    // The others see their connections to this rank closed, in their next collective at the latest.
    store_->leave();
    std::_Exit(exit_code);
}

}  // namespace

bool gloo_available() {
    return true;
}

std::unique_ptr<Communicator> make_gloo_communicator(const StartUp& start_up,
                                                     const LaunchSpec& options, StartAlarm& alarm) {
    return std::make_unique<GlooCommunicator>(start_up, options, alarm);
}

}  // namespace gyre::comm
