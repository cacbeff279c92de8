// How the gradients of a net are divided into buckets, which are reduced one by one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/data_type.hpp"

namespace gyre::comm {

// How a bucket becomes the sum over the ranks (comm/gradient_route.hpp).
enum class Route {
    library,      // the communicator adds, in its own order or in the tree over the ranks
    fixed_order,  // the ranks gather and add in the tree over the shards
    factors,      // the ranks gather what it is the product of (train/factors.hpp)
};

// Elements [begin, end) of the gradient buffer.
struct Bucket {
    std::int64_t begin, end;
    // Each rank gets the sums of only so many elements, and the bucket has [ranks][share_elems].
    // 0: every rank gets all sums.
    std::int64_t share_elems = 0;
    Route route = Route::library;
    DataType type = DataType::float32;  // in which the gradients travel
    std::int64_t elems() const { return end - begin; }
    std::int64_t bytes() const { return elems() * std::int64_t{sizeof(float)}; }
    bool shared() const { return share_elems > 0; }
    Bucket share(int rank) const {
        return {begin + rank * share_elems, begin + (rank + 1) * share_elems};
    }
    // The part whose sums a rank gets.
    Bucket summed_by(int rank) const { return shared() ? share(rank) : *this; }
};
// The bucket's route in reports.
const char* name_of(const Bucket& bucket);

// Parts of a size are so large that there are hardly more of them, however small they are asked
// for.
constexpr std::int64_t kMostParts = 1024;

// Divides [0, total_elems) into buckets, the one that is final first at the front. `tensor_begins`
// are the offsets at which parameters begin, ascending from 0; the last extends to the end.
// Neighbouring tensors share a bucket until it has bucket_bytes; a tensor of more than twice as
// much is split, at multiples of 16 elements, so that one part is on its way while the next is
// added up or updated. What is at and after `apart` (nullopt: nothing) has a bucket of its own,
// and so has each of `factored`, ascending ranges of whole tensors, with Route::factors.
std::vector<Bucket> plan_buckets(const std::vector<std::int64_t>& tensor_begins,
                                 std::int64_t total_elems, std::int64_t bucket_bytes,
                                 std::optional<std::int64_t> apart = std::nullopt,
                                 const std::vector<Bucket>& factored = {});
// Shares the buckets of at least `least_bytes` out among the ranks, at multiples of 16 elements:
// what does not divide goes to the next bucket of the same route and type, or has one of its own.
// Those with Route::factors stay as they are, as every rank computes all of their sum.
std::vector<Bucket> share_out(const std::vector<Bucket>& buckets, int ranks,
                              std::int64_t least_bytes);
// The ranges of [0, elems) that a rank updates, ascending: all but the others' shares. Its own
// only shares are shared().
std::vector<Bucket> updated_by(int rank, std::vector<Bucket> buckets, std::int64_t elems);
// bucket_bytes for --bucket-kib auto: a sixteenth of the gradients, between 16 KiB (below which a
// message costs its latency, whatever its size) and 4 MiB (beyond which a bucket gains nothing).
// on_gpu: they are reduced in a GPU's memory, where a reduction and what goes with it cost some 10
// us and links are a hundred times faster: one bucket up to 1 MiB in all, then a quarter of the
// gradients, between 16 and 32 MiB.
std::int64_t auto_bucket_bytes(std::int64_t total_elems, bool on_gpu);

}  // namespace gyre::comm
