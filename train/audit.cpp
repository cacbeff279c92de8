#include "train/audit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "base/host_name.hpp"

namespace gyre::train {
namespace {

constexpr std::size_t kByRanks = 2;  // of a leaf: by the rank that has it, and by the one after it

// Hashes of all ranks, each in two numbers that survive a sum with zeros in doubles.
class HashTable {
 public:
    explicit HashTable(int ranks) : halves_(static_cast<std::size_t>(ranks) * kByRanks * 2) {}
    void put(int rank, std::size_t column, std::uint64_t hash) {
        double* const at = this->at(rank, column);
        at[0] = static_cast<double>(hash >> 32);
        at[1] = static_cast<double>(hash & 0xffffffffU);
    }
    bool same(int rank) { return std::equal(at(rank, 0), at(rank, 1), at(rank, 1)); }
    std::span<double> halves() { return halves_; }

 private:
    double* at(int rank, std::size_t column) {
        return halves_.data() + (static_cast<std::size_t>(rank) * kByRanks + column) * 2;
    }
    std::vector<double> halves_;
};

}  // namespace

void Audit::on_launch(const Training& training, std::int64_t number) {
    Session& session = training.session;
    if (number % every_ != 0) {
        session.trainer().audit(nullptr);
        return;
    }
    // From audit to audit another one of a rank's leaves.
    const Sharding& sharding = session.sharding();
    const auto leaf = [&](int rank) {
        return sharding.shards_of(rank).first +
               static_cast<int>(number / every_ % sharding.shard_count(rank));
    };
    const int before = (sharding.rank + sharding.ranks - 1) % sharding.ranks;
    step_ = {.own_leaf = leaf(sharding.rank), .other_leaf = leaf(before)};
    audited_ = number;
    session.trainer().audit(&step_);
}

bool Audit::pauses_after(std::int64_t steps) {
    due_ = due_ || steps % every_ == 0;
    return due_;
}

void Audit::on_pause(const Training& training) {
    if (!due_) {
        return;
    }
    due_ = false;
    Communicator& comm = training.session.communicator();
    const int ranks = comm.size();
    HashTable table(ranks);
    table.put(comm.rank(), 0, step_.own_hash);
    table.put((comm.rank() + ranks - 1) % ranks, 1, step_.other_hash);
    comm.allreduce_sum(table.halves());
    for (int rank = 0; rank < ranks; ++rank) {
        if (table.same(rank)) {
            continue;
        }
        const int second = (rank + 1) % ranks;
        const std::string host = broadcast_string(comm, host_name(), rank);
        const std::string other = broadcast_string(comm, host_name(), second);
        const Sharding& sharding = training.session.sharding();
        const std::string message = fmt::format(
            "step {}: rank {} on host {} and rank {} on host {} have computed the same gradients, "
            "of part {} of {}, and have got different bits: one of them has miscalculated; look "
            "for faulty memory or a faulty processor there, and resume from a checkpoint before "
            "step {}",
            audited_, rank, host, second, other,
            sharding.shards_of(rank).first + audited_ / every_ % sharding.shard_count(rank) + 1,
            sharding.shards, audited_ - every_ + 1);
        if (!warns_) {
            throw AgreedError(ExitCode::differs, message);
        }
        if (comm.is_root()) {
            fmt::print(stderr, "gyre: {}\n", message);
        }
    }
}

}  // namespace gyre::train
