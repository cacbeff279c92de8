#include "comm/shared/shared_communicator.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "comm/forwarding_communicator.hpp"
#include "comm/shared/shared_memory.hpp"
#include "comm/term_sums.hpp"

namespace gyre::comm {
namespace {

// For how long a wait looks again and again. Ranks of one host meet within that time; to sleep and
// be woken takes 50 us and more. Where processors are shared it only keeps the others from theirs.
constexpr std::chrono::microseconds kSpin{400}, kSpinOnSharedProcessors{10};

// A sum whose terms are fewer bytes in all is added up by each rank for itself: twice the
// additions, but ranks wait for each other once instead of twice.
constexpr std::int64_t kWholeBytes = 64 << 10;

// Returns whether each rank can have a processor of its own. It is collective, as a launcher may
// have bound each rank to some of them.
bool own_processors(Communicator& comm) {
    cpu_set_t set;
    std::vector<double> allowed(CPU_SETSIZE);
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            allowed[static_cast<std::size_t>(cpu)] = CPU_ISSET(cpu, &set) ? 1.0 : 0.0;
        }
    }
    comm.allreduce_sum(allowed);
    const auto count =
        std::count_if(allowed.begin(), allowed.end(), [](double n) { return n > 0.0; });
    return count >= comm.size();
}

class SharedCommunicator final : public ForwardingCommunicator {
 public:
    SharedCommunicator(std::unique_ptr<Communicator> inner, std::unique_ptr<SharedMemory> memory,
                       std::chrono::microseconds spin, double seconds)
        : ForwardingCommunicator(std::move(inner)),
          rank_(rank()),
          size_(size()),
          memory_(std::move(memory)),
          spin_(spin),
          seconds_(seconds) {}

    std::string description() const override {
        return "shared memory, started over " + inner().description();
    }
    std::unique_ptr<Request> start(const Collective& collective) override;
    bool sums_in_tree() const override { return true; }

 private:
    class Operation;
    // The elements [first, first + count) of each row of a collective, or of its only one.
    struct Piece {
        Collective collective;
        std::int64_t first, count;
        Operation* owner;  // null: nobody waits for it any more, and its data may be gone
        std::int64_t width() const { return static_cast<std::int64_t>(bytes_of(collective.type)); }
        std::int64_t bytes() const { return count * width(); }
        std::byte* row(int rank) const {
            return static_cast<std::byte*>(collective.data) +
                   (rank * collective.count + first) * width();
        }
    };

    // Does what can be done without waiting; returns whether that was anything.
    bool advance();
    // A piece's three steps. Each rank adds up a part of an all-reduce's piece, or all of it.
    void post(const Piece& piece, std::uint64_t number);
    void add_up(const Piece& piece, std::uint64_t number);
    void take(const Piece& piece, std::uint64_t number);
    bool sliced(const Piece& piece) const {
        return piece.collective.kind == Collective::Kind::all_reduce &&
               piece.bytes() * size_ > kWholeBytes;
    }
    ByteRange slice(const Piece& piece, int rank) const;

    const int rank_, size_;
    const std::unique_ptr<SharedMemory> memory_;
    const std::chrono::microseconds spin_;
    const double seconds_;
    std::deque<Piece> pieces_;  // that are not taken yet; the first has the number taken_
    std::uint64_t posted_ = 0, summed_ = 0, taken_ = 0;
    TreeSum tree_;
};

class SharedCommunicator::Operation final : public Request {
 public:
    Operation(SharedCommunicator& comm, const Collective& collective)
        : comm_(comm), label_(label_of(collective)) {
        const bool rows = collective.kind == Collective::Kind::reduce_scatter;
        const auto most = static_cast<std::int64_t>(SharedMemory::kSlotBytes) /
                          static_cast<std::int64_t>(bytes_of(collective.type)) /
                          (rows ? comm.size_ : 1);
        for (std::int64_t at = 0; at < collective.count; at += most) {
            comm.pieces_.push_back({collective, at, std::min(most, collective.count - at), this});
            ++left_;
        }
        comm.advance();
    }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;
    ~Operation() override {
        for (Piece& piece : comm_.pieces_) {
            piece.owner = piece.owner == this ? nullptr : piece.owner;
        }
    }

    void wait() override {
        const auto begin = Clock::now();
        while (left_ > 0) {
            const std::uint32_t seen = comm_.memory_->news();
            if (comm_.advance()) {
                continue;
            }
            if (seconds_since(begin) > comm_.seconds_) {
                throw Error(ExitCode::communication,
                            fmt::format("{} of {} bytes in shared memory: not all ranks have "
                                        "arrived within {:g} s",
                                        label_.name, label_.bytes, comm_.seconds_));
            }
            comm_.memory_->wait_for_news(seen, comm_.spin_);
        }
    }
    std::optional<Ran> ran() const override {
        return ran_.end > ran_.begin ? std::optional(ran_) : std::nullopt;
    }

    void piece_begins() { ran_.begin = std::min(ran_.begin, Clock::now()); }
    void piece_done() {
        --left_;
        ran_.end = Clock::now();
    }

 private:
    SharedCommunicator& comm_;
    const Label label_;
    std::int64_t left_ = 0;
    Ran ran_ = {.begin = Clock::time_point::max()};
};

std::unique_ptr<Request> SharedCommunicator::start(const Collective& collective) {
    return std::make_unique<Operation>(*this, collective);
}

bool SharedCommunicator::advance() {
    bool any = false;
    const auto piece = [&](std::uint64_t number) -> const Piece& {
        return pieces_[static_cast<std::size_t>(number - taken_)];
    };
    while (posted_ < taken_ + pieces_.size() &&
           posted_ < memory_->least(SharedMemory::taken) + SharedMemory::kSlots) {
        post(piece(posted_), posted_);
        memory_->publish(SharedMemory::posted, ++posted_);
        any = true;
    }
    while (summed_ < posted_ && summed_ < memory_->least(SharedMemory::posted)) {
        add_up(piece(summed_), summed_);
        memory_->publish(SharedMemory::summed, ++summed_);
        any = true;
    }
    while (taken_ < summed_ &&
           (!sliced(pieces_.front()) || taken_ < memory_->least(SharedMemory::summed))) {
        take(pieces_.front(), taken_);
        if (pieces_.front().owner != nullptr) {
            pieces_.front().owner->piece_done();
        }
        pieces_.pop_front();
        memory_->publish(SharedMemory::taken, ++taken_);
        any = true;
    }
    return any;
}

// The bytes of a piece in a slot that a rank adds up.
ByteRange SharedCommunicator::slice(const Piece& piece, int rank) const {
    constexpr std::int64_t kLineElems = 32;  // no two ranks write to one cache line
    const auto begin = [&](int of) {
        return of == size_ ? piece.count : piece.count * of / size_ / kLineElems * kLineElems;
    };
    return {begin(rank) * piece.width(), (begin(rank + 1) - begin(rank)) * piece.width()};
}

void SharedCommunicator::post(const Piece& piece, std::uint64_t number) {
    if (piece.owner == nullptr) {
        return;
    }
    piece.owner->piece_begins();
    std::byte* to = memory_->slot(rank_, number);
    const auto bytes = static_cast<std::size_t>(piece.bytes());
    switch (piece.collective.kind) {
        case Collective::Kind::all_reduce:
            std::memcpy(to, piece.row(0), bytes);
            return;
        case Collective::Kind::all_gather:
            std::memcpy(to, piece.row(rank_), bytes);
            return;
        case Collective::Kind::reduce_scatter:
            for (int rank = 0; rank < size_; ++rank, to += bytes) {
                std::memcpy(to, piece.row(rank), bytes);
            }
            return;
    }
}

void SharedCommunicator::add_up(const Piece& piece, std::uint64_t number) {
    if (piece.owner == nullptr || piece.collective.kind == Collective::Kind::all_gather) {
        return;
    }
    const bool row_wise = piece.collective.kind == Collective::Kind::reduce_scatter;
    const ByteRange part = row_wise        ? ByteRange{rank_ * piece.bytes(), piece.bytes()}
                           : sliced(piece) ? slice(piece, rank_)
                                           : ByteRange{0, piece.bytes()};
    const std::int64_t elems = part.bytes / piece.width();
    const auto term = [&](int rank) { return memory_->slot(rank, number) + part.begin_bytes; };
    std::byte* const sum = row_wise ? piece.row(rank_) : piece.row(0) + part.begin_bytes;
    tree_.add_up(piece.collective.type, size_, static_cast<std::size_t>(elems), term, sum);
    if (sliced(piece)) {  // only this rank has read its own slice of its own slot
        std::memcpy(term(rank_), sum, static_cast<std::size_t>(part.bytes));
    }
}

void SharedCommunicator::take(const Piece& piece, std::uint64_t number) {
    const bool gathers = piece.collective.kind == Collective::Kind::all_gather;
    if (piece.owner == nullptr || !(gathers || sliced(piece))) {
        return;
    }
    for (int rank = 0; rank < size_; ++rank) {
        const ByteRange part = gathers ? ByteRange{0, piece.bytes()} : slice(piece, rank);
        if (rank != rank_) {
            std::memcpy((gathers ? piece.row(rank) : piece.row(0)) + part.begin_bytes,
                        memory_->slot(rank, number) + part.begin_bytes,
                        static_cast<std::size_t>(part.bytes));
        }
    }
}

}  // namespace

std::unique_ptr<Communicator> share_memory(std::unique_ptr<Communicator> inner, bool wanted,
                                           double seconds) {
    if (inner->size() == 1) {
        return inner;
    }
    double against = wanted && inner->local_size() == inner->size() ? 0.0 : 1.0;
    inner->allreduce_sum({&against, 1});
    if (against > 0.0) {
        return inner;
    }
    auto memory = SharedMemory::make(*inner);
    if (memory == nullptr) {
        return inner;
    }
    const auto spin = own_processors(*inner) ? kSpin : kSpinOnSharedProcessors;
    return std::make_unique<SharedCommunicator>(std::move(inner), std::move(memory), spin, seconds);
}

}  // namespace gyre::comm
