// Routes by which a bucket of gradients becomes the sum over the ranks. A route works in the
// device's memory; if the communicator cannot, Reducer takes what travels through the host's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/sum_tree.hpp"
#include "comm/bucket_plan.hpp"
#include "comm/communicator.hpp"
#include "kernels/device/device.hpp"

namespace gyre::comm {

// The functions of a route are called in this order for each of its buckets, in each step.
class GradientRoute {
 public:
    virtual ~GradientRoute() = default;
    // Puts what travels where the collectives work. The bucket's gradients are final.
    virtual void pack(const Bucket& bucket) = 0;
    // The collectives that the ranks run, one after another.
    virtual int collectives() const { return 1; }
    virtual Collective collective(const Bucket& bucket, int index) const = 0;
    // Leaves the sums in the gradients: all of the bucket's or, if it is shared out, those of the
    // own share. The device sees the results of the collectives.
    virtual void unpack(const Bucket& bucket) = 0;
};

// The sums that ranks have of the shards that a step is cut into.
struct ShardSums {
    int shards = 0;
    // [rank]: the nodes of the tree over the shards that the rank's own add up to.
    std::vector<std::vector<TreeNode>> nodes = {};
    // This rank's sums but the last, which is in the gradients: [nodes - 1][elems], on the device.
    std::vector<const float*> earlier = {};
    // True if each rank has one node, and the communicator can add these up in the tree itself.
    bool by_library = false;
    // The most values in a sum within a pass.
    std::int64_t pass_elems = 0;

    TreeNode own(int rank) const {  // the shards of a rank, as Sharding::shards_of() has them
        const std::vector<TreeNode>& of_rank = nodes[static_cast<std::size_t>(rank)];
        return {of_rank.front().first, of_rank.back().last};
    }
};

// Makes a route. gradients: [elems], on the device; elems is the end of the first bucket.
// Route::library: an all-reduce or, of buckets that are shared out, a reduce-scatter, in the type
// of the bucket.
// Route::fixed_order, for shards: each rank gathers the sums of all and adds them in the tree over
// the shards. Its cost: the gradients of the other n - 1 ranks arrive at each, instead of
// 2 (n-1)/n of one, and there is memory for n; all of them times the most nodes that a rank has,
// which is 1 if the ranks have equal shares of a power of two. If they travel in 16 bits, each sum
// of two is rounded to these, as those of the rank's own shards have been. Route::factors: null, as
// it needs the net.
std::unique_ptr<GradientRoute> make_route(Route route, Communicator& comm, Device& device,
                                          float* gradients, const std::vector<Bucket>& buckets,
                                          const ShardSums& shards);

}  // namespace gyre::comm
