// Memory that all ranks of a host map, and how they tell each other what they have put there.
//
// Each rank has a ring of slots. What travels is cut into pieces, which are numbered alike on all
// ranks; piece p of a rank is in slot p modulo the number of slots. Of its pieces each rank
// publishes how many it has posted, summed and taken, always in their order.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/communicator.hpp"

namespace gyre::comm {

class SharedMemory {
 public:
    static constexpr std::size_t kSlotBytes = 256 << 10;
    static constexpr std::uint64_t kSlots = 16;  // of each rank
    enum Count { posted, summed, taken };

    // Collective: null on all ranks if one of them cannot map it, such as in a container of its
    // own.
    static std::unique_ptr<SharedMemory> make(Communicator& comm);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    std::byte* slot(int rank, std::uint64_t piece) const;

    // Says that this rank has done as many pieces. Others who see it also see what the rank wrote
    // before.
    void publish(Count count, std::uint64_t pieces);
    // The least count of all ranks.
    std::uint64_t least(Count count) const;

    // Changes whenever a rank publishes something.
    std::uint32_t news() const;
    // Returns when the news are other than `seen`, or after a tenth of a second: at first it looks
    // again and again, which is answered soonest, and then it sleeps.
    void wait_for_news(std::uint32_t seen, std::chrono::microseconds spin) const;

 private:
    struct Header;
    struct Counts;

    SharedMemory(std::byte* memory, std::size_t bytes, int rank, int ranks);
    Header& header() const;
    Counts& counts(int rank) const;

    std::byte* const memory_;
    const std::size_t bytes_;
    const int rank_, ranks_;
};

}  // namespace gyre::comm
