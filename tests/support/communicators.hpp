// Collectives and communicators that tests derive from to override the behaviour under test.
#pragma once

#include <memory>

#include "comm/forwarding_communicator.hpp"

namespace gyre::test {

inline comm::Collective all_reduce(void* data, std::int64_t count,
                                   DataType type = DataType::float32) {
    return {.kind = comm::Collective::Kind::all_reduce, .data = data, .count = count, .type = type};
}
inline comm::Collective all_gather(void* data, std::int64_t count,
                                   DataType type = DataType::float32) {
    return {.kind = comm::Collective::Kind::all_gather, .data = data, .count = count, .type = type};
}

inline comm::Collective reduce_scatter(void* data, std::int64_t count,
                                       DataType type = DataType::float32) {
    return {
        .kind = comm::Collective::Kind::reduce_scatter, .data = data, .count = count, .type = type};
}

// Wraps a communicator that outlives it, as MPI's does.
class BorrowedCommunicator : public comm::ForwardingCommunicator {
 public:
    explicit BorrowedCommunicator(comm::Communicator& from)
        : ForwardingCommunicator(
              std::shared_ptr<comm::Communicator>(std::shared_ptr<void>(), &from)) {}
};

// One of two ranks on a host, where the test plays the other: collectives complete at once and
// leave the data unchanged.
class OneOfTwo : public comm::ForwardingCommunicator {
 public:
    explicit OneOfTwo(int rank = 0)
        : ForwardingCommunicator(comm::make_single_communicator()), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return 2; }
    int local_rank() const override { return rank_; }
    int local_size() const override { return 2; }

 private:
    const int rank_;
};

}  // namespace gyre::test
