// The communicator over MPI: a module that mpi_module.cpp loads. It is compiled with Open MPI's
// mpi.h, and with that of MPI 5.0's standard binary interface (abi/mpi.h).
//
// Gradient reductions are non-blocking and run on a separate communicator. They are cut into
// pieces, and only a few pieces are under way at a time: MPI's temporary copies then stay small,
// are reused and fit the cache, and the sum of one piece overlaps the transfer of the next. MPI
// makes progress only inside its calls, so something has to call it while the backward pass
// computes: each new reduction advances the earlier ones, and a helper thread does so every 100 us
// while much is left. Small reductions are not worth waking a thread. One mutex guards every call,
// so MPI_THREAD_SERIALIZED is enough. docs/design.md has the measurements behind these choices.
#include <dlfcn.h>
#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>

#include "base/host_name.hpp"
#include "comm/communicator.hpp"
#include "comm/launch/backoff.hpp"
#include "comm/term_sums.hpp"

namespace gyre::comm {
namespace {

constexpr std::int64_t kPieceElems = 1 << 20;  // 4 MiB
constexpr std::size_t kPiecesUnderWay = 2;
constexpr std::int64_t kBackgroundBytes = 1 << 20;  // left to reduce before the thread helps
constexpr std::chrono::microseconds kPollInterval{100};
constexpr std::int64_t kMostBytes = 1 << 30;  // in one MPI call: counts are ints

void check(int result, const char* expression, const char* file, int line) {
    if (result == MPI_SUCCESS) {
        return;
    }
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0, rank = -1;
    MPI_Error_string(result, text.data(), &length);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    throw Error(ExitCode::communication,
                fmt::format("{} failed: {} ({}:{}, rank {} on {}); a rank or its host may be gone",
                            expression, text.data(), file, line, rank, host_name()));
}
#define GYRE_MPI(call) check(call, #call, __FILE__, __LINE__)

// MPI 3 has no 16-bit floats.
template <DataType type>
void add_narrow(void* in, void* inout, int* elems, MPI_Datatype*) {
    term_sum_of(type)(inout, inout, in, static_cast<std::size_t>(*elems));
}

// The lists and terms of a sum of shares, which MPI uses while it is under way.
struct Exchange {
    std::vector<int> send_counts, send_offsets, receive_counts, receive_offsets;
    std::vector<std::byte> terms;  // [ranks][elements of the own share]
};

// Sets variables that must be set before MPI starts. Values set by the user are kept.
void configure_open_mpi() {
    const auto set = [](const char* name, const char* value) {
        setenv(fmt::format("OMPI_MCA_{}", name).c_str(), value, 0);
    };
    // A ring sends 2 (n-1)/n of the data instead of all of it log2(n) times.
    set("coll_libnbc_iallreduce_algorithm", "1");
    // The put and get protocols are excluded: over TCP they make exchanges half duplex, up to three
    // times slower.
    set("btl_tcp_flags", "send,inplace,need-ack,need-csum,hetero-rdma");
    // Ranks wait by polling; if there are more ranks than processors, they must yield.
    const char* ranks = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    if (ranks != nullptr && std::atol(ranks) > sysconf(_SC_NPROCESSORS_ONLN)) {
        set("mpi_yield_when_idle", "1");
    }
}

std::string library_version() {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);
    const std::string version(text.data(), static_cast<std::size_t>(length));
    // Open MPI's continues behind a comma, MPICH's in more lines, of which the first has a tab.
    std::string first = version.substr(0, version.find_first_of(",\n"));
    std::replace(first.begin(), first.end(), '\t', ' ');
    return first;
}

class MpiCommunicator final : public Communicator {
 public:
    MpiCommunicator();
    ~MpiCommunicator() override;

    std::string description() const override { return fmt::format("MPI ({})", library_version()); }
    int rank() const override { return rank_; }
    int size() const override { return size_; }
    int local_rank() const override { return local_rank_; }
    int local_size() const override { return local_size_; }
    bool can_sum_in_tree() const override { return true; }
    std::unique_ptr<Request> start(const Collective& collective) override;
    void allreduce_sum(std::span<double> data) override;
    void broadcast(void* data, std::size_t bytes, int root) override;
    void barrier() override;
    [[noreturn]] void abort(int exit_code) noexcept override;

 private:
    class Operation;
    struct Piece {
        Collective part;
        Operation* owner;
        std::int64_t row_elems;  // from one row of a reduce_scatter to the next
        MPI_Request request = MPI_REQUEST_NULL;
        std::unique_ptr<Exchange> exchange = nullptr;  // of a sum of shares under way
        // Of a sum in the tree that every rank gets: its shares travel twice.
        enum class Stage { terms, summed, sums } stage = Stage::terms;
        bool done = false;
        bool in_tree() const { return part.kind == Collective::Kind::all_reduce && part.in_tree; }
    };
    void begin(Piece& piece);
    // The elements of a piece that a rank adds up: [begin, begin + count).
    struct Share {
        int begin, count;
    };
    Share share(const Piece& piece, int rank) const;
    // Sends each rank all terms of its share, and the sum of the own one to all.
    void begin_terms(Piece& piece);
    void begin_sums(Piece& piece);
    // What was asked for has come: adds up the terms, or ends the piece.
    void arrived(Piece& piece);
    void advance();        // tests the pieces under way and starts waiting ones; needs the mutex
    void make_progress();  // the loop of the helper thread
    // Waits for the operation that `call`, which gets a request, starts on the control
    // communicator.
    template <typename Call>
    void complete(Call call);

    struct Sum {
        MPI_Datatype type;
        MPI_Op operation;
    };
    Sum sums_[3] = {{MPI_FLOAT, MPI_SUM}, {MPI_UINT16_T, MPI_OP_NULL}, {MPI_UINT16_T, MPI_OP_NULL}};

    SpinTime spin_;     // how long waiting threads spin
    std::mutex mutex_;  // guards MPI and everything below
    // sums_comm_: of begin_sums(), which ranks call in the order of the pieces, but at other times
    // between their calls of begin().
    MPI_Comm control_ = MPI_COMM_NULL, gradients_ = MPI_COMM_NULL, sums_comm_ = MPI_COMM_NULL;
    int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
    std::deque<Piece> waiting_, under_way_;  // in the order of the calls, the same on all ranks
    std::vector<std::unique_ptr<Exchange>> exchanges_;  // unused, kept for their memory
    TreeSum tree_;
    std::int64_t bytes_left_ = 0;
    bool stopping_ = false;
    std::condition_variable wake_;
    std::thread thread_;
};

class MpiCommunicator::Operation final : public Request {
 public:
    Operation(MpiCommunicator& comm, const Collective& collective) : comm_(comm) {
        const std::int64_t piece_elems = most_piece_elems(collective, comm.size_);
        const auto width = static_cast<std::int64_t>(bytes_of(collective.type));
        const std::lock_guard lock(comm_.mutex_);
        for (std::int64_t at = 0; at < collective.count; at += piece_elems) {
            Collective part = collective;
            part.data = static_cast<std::byte*>(collective.data) + at * width;
            part.count = std::min(piece_elems, collective.count - at);
            part.in_tree = collective.in_tree && !comm.sums_in_tree();
            comm_.waiting_.push_back({part, this, collective.count});
            comm_.bytes_left_ += bytes_of(part);
            ++pieces_left_;
        }
        comm_.advance();
        if (comm_.bytes_left_ >= kBackgroundBytes) {
            comm_.wake_.notify_one();
        }
    }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    // MPI writes into the data until the last piece is done, and non-blocking collectives cannot
    // be cancelled. If an error leads here, it ends the job.
    ~Operation() override {
        const std::lock_guard lock(comm_.mutex_);
        for (auto* pieces : {&comm_.waiting_, &comm_.under_way_}) {
            for (Piece& piece : *pieces) {
                piece.owner = piece.owner == this ? nullptr : piece.owner;
            }
        }
    }

    void wait() override {
        for (Backoff backoff(comm_.spin_);; backoff.pause()) {
            {
                const std::lock_guard lock(comm_.mutex_);
                if (pieces_left_ > 0) {
                    comm_.advance();
                }
                if (pieces_left_ == 0) {
                    return;
                }
            }
        }
    }

    void piece_begins() { ran_.begin = std::min(ran_.begin, Clock::now()); }
    void piece_done() {
        --pieces_left_;
        ran_.end = Clock::now();
    }
    std::optional<Ran> ran() const override {
        const std::lock_guard lock(comm_.mutex_);
        return ran_.end > ran_.begin ? std::optional(ran_) : std::nullopt;
    }

 private:
    static std::int64_t most_piece_elems(const Collective& collective, int ranks) {
        if (collective.kind == Collective::Kind::all_reduce) {
            return kPieceElems;
        }
        // Offsets of rows are ints, and a gathering is one piece, as its rows are not contiguous.
        const bool sums = collective.kind == Collective::Kind::reduce_scatter;
        if (sums ? collective.count * ranks > std::numeric_limits<int>::max()
                 : bytes_of(collective) > kMostBytes) {
            throw Error(ExitCode::internal,
                        fmt::format("{} of {} bytes per rank exceeds the limit of one MPI call",
                                    name_of(collective.kind), bytes_of(collective)));
        }
        return std::max<std::int64_t>(1, sums ? kPieceElems / ranks : collective.count);
    }

    MpiCommunicator& comm_;
    // Guarded by the communicator's mutex.
    int pieces_left_ = 0;
    Ran ran_ = {.begin = Clock::time_point::max()};
};

void MpiCommunicator::begin(Piece& piece) {
    const Collective& part = piece.part;
    switch (part.kind) {
        case Collective::Kind::all_reduce: {
            if (part.in_tree) {
                begin_terms(piece);
                return;
            }
            const Sum& sum = sums_[static_cast<std::size_t>(part.type)];
            GYRE_MPI(MPI_Iallreduce(MPI_IN_PLACE, part.data, static_cast<int>(part.count), sum.type,
                                    sum.operation, gradients_, &piece.request));
            return;
        }
        case Collective::Kind::all_gather:
            GYRE_MPI(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, part.data,
                                    static_cast<int>(bytes_of(part)), MPI_BYTE, gradients_,
                                    &piece.request));
            return;
        case Collective::Kind::reduce_scatter:
            begin_terms(piece);
            return;
    }
}

MpiCommunicator::Share MpiCommunicator::share(const Piece& piece, int rank) const {
    const std::int64_t count = piece.part.count;
    if (!piece.in_tree()) {
        return {static_cast<int>(rank * piece.row_elems), static_cast<int>(count)};
    }
    const std::int64_t begin = count * rank / size_, end = count * (rank + 1) / size_;
    return {static_cast<int>(begin), static_cast<int>(end - begin)};
}

// MPI's own reduce_scatter (Open MPI 4) reduces all rows on one rank, which distributes them, and
// adds in an order that the library chooses.
void MpiCommunicator::begin_terms(Piece& piece) {
    const Collective& part = piece.part;
    if (exchanges_.empty()) {
        exchanges_.push_back(std::make_unique<Exchange>());
    }
    piece.exchange = std::move(exchanges_.back());
    exchanges_.pop_back();
    Exchange& e = *piece.exchange;
    const auto ranks = static_cast<std::size_t>(size_);
    const Share own = share(piece, rank_);
    for (auto* list : {&e.send_counts, &e.send_offsets, &e.receive_counts, &e.receive_offsets}) {
        list->resize(ranks);
    }
    for (int rank = 0; rank < size_; ++rank) {
        const auto i = static_cast<std::size_t>(rank);
        const Share to = share(piece, rank);
        e.send_counts[i] = rank == rank_ ? 0 : to.count;
        e.send_offsets[i] = to.begin;
        e.receive_counts[i] = rank == rank_ ? 0 : own.count;
        e.receive_offsets[i] = rank * own.count;
    }
    e.terms.resize(ranks * static_cast<std::size_t>(own.count) * bytes_of(part.type));
    const MPI_Datatype type = sums_[static_cast<std::size_t>(part.type)].type;
    GYRE_MPI(MPI_Ialltoallv(part.data, e.send_counts.data(), e.send_offsets.data(), type,
                            e.terms.data(), e.receive_counts.data(), e.receive_offsets.data(), type,
                            gradients_, &piece.request));
}

void MpiCommunicator::begin_sums(Piece& piece) {
    const Collective& part = piece.part;
    Exchange& e = *piece.exchange;
    // Who got a share's terms sends its sum, from where the terms were: MPI allows no call in which
    // both buffers are the same.
    const Share own = share(piece, rank_);
    const std::size_t width = bytes_of(part.type);
    if (piece.owner != nullptr) {
        std::copy_n(
            static_cast<const std::byte*>(part.data) + static_cast<std::size_t>(own.begin) * width,
            static_cast<std::size_t>(own.count) * width, e.terms.data());
    }
    std::swap(e.send_counts, e.receive_counts);
    e.receive_offsets = e.send_offsets;
    std::fill(e.send_offsets.begin(), e.send_offsets.end(), 0);
    const MPI_Datatype type = sums_[static_cast<std::size_t>(part.type)].type;
    GYRE_MPI(MPI_Ialltoallv(e.terms.data(), e.send_counts.data(), e.send_offsets.data(), type,
                            part.data, e.receive_counts.data(), e.receive_offsets.data(), type,
                            sums_comm_, &piece.request));
    piece.stage = Piece::Stage::sums;
}

void MpiCommunicator::arrived(Piece& piece) {
    const Collective& part = piece.part;
    const bool terms = piece.exchange != nullptr && piece.stage == Piece::Stage::terms;
    if (terms && piece.owner != nullptr) {
        const Share own = share(piece, rank_);
        const std::size_t width = bytes_of(part.type);
        tree_.add_received(
            part.type, size_, rank_, static_cast<std::size_t>(own.count),
            static_cast<std::byte*>(part.data) + static_cast<std::size_t>(own.begin) * width,
            piece.exchange->terms.data());
    }
    if (terms && piece.in_tree()) {
        piece.stage = Piece::Stage::summed;
        return;
    }
    piece.done = true;
    bytes_left_ -= bytes_of(part);
    if (piece.exchange != nullptr) {
        exchanges_.push_back(std::move(piece.exchange));
    }
    if (piece.owner != nullptr) {
        piece.owner->piece_done();
    }
}

void MpiCommunicator::advance() {
    for (;;) {
        while (!waiting_.empty() && under_way_.size() < kPiecesUnderWay) {
            begin(waiting_.front());
            waiting_.front().owner->piece_begins();
            under_way_.push_back(std::move(waiting_.front()));
            waiting_.pop_front();
        }
        bool finished = false;
        bool earlier_waits = false;  // a piece whose sums go first
        for (Piece& piece : under_way_) {
            int flag = 0;
            if (piece.stage != Piece::Stage::summed) {
                GYRE_MPI(MPI_Test(&piece.request, &flag, MPI_STATUS_IGNORE));
            }
            if (flag != 0) {
                arrived(piece);
                finished = true;
            }
            if (piece.stage == Piece::Stage::summed && !earlier_waits) {
                begin_sums(piece);
            }
            earlier_waits = earlier_waits || (piece.in_tree() && piece.stage != Piece::Stage::sums);
        }
        if (!finished) {
            return;
        }
        std::erase_if(under_way_, [](const Piece& piece) { return piece.done; });
    }
}

MpiCommunicator::MpiCommunicator() {
    configure_open_mpi();
    int provided = MPI_THREAD_SINGLE;
    GYRE_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided));
    if (provided < MPI_THREAD_SERIALIZED) {
        throw Error(ExitCode::communication,
                    "this MPI library allows no calls from two threads; build gyre with one that "
                    "provides MPI_THREAD_SERIALIZED, such as Debian's Open MPI");
    }
    GYRE_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    GYRE_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &control_));
    GYRE_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &gradients_));
    GYRE_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &sums_comm_));
    GYRE_MPI(MPI_Comm_rank(control_, &rank_));
    GYRE_MPI(MPI_Comm_size(control_, &size_));
    MPI_Comm local = MPI_COMM_NULL;
    GYRE_MPI(MPI_Comm_split_type(control_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &local));
    GYRE_MPI(MPI_Comm_rank(local, &local_rank_));
    GYRE_MPI(MPI_Comm_size(local, &local_size_));
    GYRE_MPI(MPI_Comm_free(&local));
    GYRE_MPI(MPI_Op_create(&add_narrow<DataType::bfloat16>, 1, &sums_[1].operation));
    GYRE_MPI(MPI_Op_create(&add_narrow<DataType::float16>, 1, &sums_[2].operation));
    thread_ = std::thread([this] { make_progress(); });
}

MpiCommunicator::~MpiCommunicator() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
    // Errors cannot be reported here, and the process is about to end.
    MPI_Op_free(&sums_[1].operation);
    MPI_Op_free(&sums_[2].operation);
    MPI_Comm_free(&sums_comm_);
    MPI_Comm_free(&gradients_);
    MPI_Comm_free(&control_);
    MPI_Finalize();
}

void MpiCommunicator::make_progress() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        if (bytes_left_ < kBackgroundBytes) {
            wake_.wait(lock);
            continue;
        }
        try {
            advance();
        } catch (const Error&) {
            // The rank that waits for this reduction meets the same error and reports it.
        }
        lock.unlock();
        std::this_thread::sleep_for(kPollInterval);
        lock.lock();
    }
}

std::unique_ptr<Request> MpiCommunicator::start(const Collective& collective) {
    return std::make_unique<Operation>(*this, collective);
}

// MPI's blocking calls would spin, and hold the mutex that the helper thread needs.
template <typename Call>
void MpiCommunicator::complete(Call call) {
    MPI_Request request = MPI_REQUEST_NULL;
    {
        const std::lock_guard lock(mutex_);
        call(&request);
    }
    for (Backoff backoff(spin_);; backoff.pause()) {
        int flag = 0;
        const std::lock_guard lock(mutex_);
        GYRE_MPI(MPI_Test(&request, &flag, MPI_STATUS_IGNORE));
        if (flag != 0) {
            return;
        }
    }
}

void MpiCommunicator::allreduce_sum(std::span<double> data) {
    complete([&](MPI_Request* request) {
        GYRE_MPI(MPI_Iallreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()),
                                MPI_DOUBLE, MPI_SUM, control_, request));
    });
}

void MpiCommunicator::broadcast(void* data, std::size_t bytes, int root) {
    auto* at = static_cast<std::byte*>(data);
    while (bytes > 0) {
        const std::size_t part = std::min(bytes, static_cast<std::size_t>(kMostBytes));
        complete([&](MPI_Request* request) {
            GYRE_MPI(MPI_Ibcast(at, static_cast<int>(part), MPI_BYTE, root, control_, request));
        });
        at += part;
        bytes -= part;
    }
}

void MpiCommunicator::barrier() {
    complete([&](MPI_Request* request) { GYRE_MPI(MPI_Ibarrier(control_, request)); });
}

void MpiCommunicator::abort(int exit_code) noexcept {
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
}

}  // namespace

// mpi_module.cpp looks up these two functions by their names.
extern "C" Communicator* gyre_make_mpi_communicator() {
    return new MpiCommunicator;
}
extern "C" void gyre_mpi_version(std::string& version) {
    Dl_info library = {};
    dladdr(reinterpret_cast<void*>(&MPI_Init), &library);
    version = fmt::format("{} ({})", library_version(), library.dli_fname);
}

}  // namespace gyre::comm
