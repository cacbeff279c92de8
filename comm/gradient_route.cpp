#include "comm/gradient_route.hpp"

#include <algorithm>
#include <utility>

namespace gyre::comm {
namespace {

bool narrow(const Bucket& bucket) {
    return bucket.type != DataType::float32;
}

class LibraryRoute final : public GradientRoute {
 public:
    LibraryRoute(Communicator& comm, Device& device, float* gradients,
                 const std::vector<Bucket>& buckets, bool in_tree)
        : device_(device), rank_(comm.rank()), gradients_(gradients), in_tree_(in_tree) {
        if (std::any_of(buckets.begin(), buckets.end(), narrow)) {
            narrow_ = {device, buckets.front().end};
        }
    }

    void pack(const Bucket& bucket) override {
        if (narrow(bucket)) {
            device_.narrow(bucket.type, bucket.elems(), gradients_ + bucket.begin,
                           narrow_.get() + bucket.begin);
        }
    }
    Collective collective(const Bucket& bucket, int /*index*/) const override {
        const bool shared = bucket.shared();
        return {
            .kind = shared ? Collective::Kind::reduce_scatter : Collective::Kind::all_reduce,
            .data = narrow(bucket) ? static_cast<void*>(narrow_.get() + bucket.begin)
                                   : static_cast<void*>(gradients_ + bucket.begin),
            .count = shared ? bucket.share_elems : bucket.elems(),
            .type = bucket.type,
            .in_tree = in_tree_,
        };
    }
    void unpack(const Bucket& bucket) override {
        if (narrow(bucket)) {
            const Bucket summed = bucket.summed_by(rank_);
            device_.widen(bucket.type, summed.elems(), narrow_.get() + summed.begin,
                          gradients_ + summed.begin);
        }
    }

 private:
    Device& device_;
    const int rank_;
    float* const gradients_;
    const bool in_tree_;
    DeviceBuffer<std::uint16_t> narrow_;  // [elems], if any travel in 16 bits
};

class FixedOrderRoute final : public GradientRoute {
 public:
    FixedOrderRoute(Communicator& comm, Device& device, float* gradients,
                    const std::vector<Bucket>& buckets, const ShardSums& shards)
        : device_(device),
          rank_(comm.rank()),
          ranks_(comm.size()),
          gradients_(gradients),
          shards_(shards),
          rows_(most_nodes()),
          gathered_(device, ranks_ * rows_ * buckets.front().end) {
        if (std::any_of(buckets.begin(), buckets.end(), narrow)) {
            narrow_ = {device, gathered_.elems()};
        }
        if (std::any_of(shards.nodes.begin(), shards.nodes.end(),
                        [&](const auto& nodes) { return std::ssize(nodes) < rows_; })) {
            device.fill_zero(gathered_.get(), gathered_.bytes());  // rows that travel unused
            device.fill_zero(narrow_.get(), narrow_.bytes());
        }
    }

    void pack(const Bucket& bucket) override {
        for (std::size_t node = 0; node <= shards_.earlier.size(); ++node) {
            const float* const sum =
                (node < shards_.earlier.size() ? shards_.earlier[node] : gradients_) + bucket.begin;
            const std::int64_t to = row(bucket, rank_, node);
            if (narrow(bucket)) {
                device_.narrow(bucket.type, bucket.elems(), sum, narrow_.get() + to);
            } else {
                device_.copy(gathered_.get() + to, sum, static_cast<std::size_t>(bucket.bytes()));
            }
        }
    }
    Collective collective(const Bucket& bucket, int /*index*/) const override {
        const std::int64_t begin = row(bucket, 0, 0);
        return {.kind = Collective::Kind::all_gather,
                .data = narrow(bucket) ? static_cast<void*>(narrow_.get() + begin)
                                       : static_cast<void*>(gathered_.get() + begin),
                .count = rows_ * bucket.elems(),
                .type = bucket.type};
    }
    void unpack(const Bucket& bucket) override {
        const Bucket summed = bucket.summed_by(rank_);
        const std::int64_t elems = summed.elems();
        float* const own = gradients_ + summed.begin;
        // The last of the own sums is already where the result is to be, so others are added to it.
        const auto add = [&](float*& left, float* right) {
            if (right == own) {
                std::swap(left, right);
            }
            device_.add(elems, right, left);
            if (narrow(bucket)) {
                device_.round_to(bucket.type, elems, left, left);
            }
        };
        waiting_.clear();
        for (int rank = 0; rank < ranks_; ++rank) {
            const std::vector<TreeNode>& nodes = shards_.nodes[static_cast<std::size_t>(rank)];
            for (std::size_t i = 0; i < nodes.size(); ++i) {
                float* at = own;
                if (rank != rank_ || i + 1 < nodes.size()) {
                    const std::int64_t from = row(bucket, rank, i) + summed.begin - bucket.begin;
                    at = gathered_.get() + from;
                    if (narrow(bucket)) {
                        device_.widen(bucket.type, elems, narrow_.get() + from, at);
                    }
                }
                push_node(waiting_, nodes[i], at, shards_.shards, add);
            }
        }
    }

 private:
    std::int64_t most_nodes() const {
        std::size_t most = 0;
        for (const auto& nodes : shards_.nodes) {
            most = std::max(most, nodes.size());
        }
        return static_cast<std::int64_t>(most);
    }
    // Where a node's sum is in gathered_ and narrow_.
    std::int64_t row(const Bucket& bucket, int rank, std::size_t node) const {
        return ranks_ * rows_ * bucket.begin +
               (rank * rows_ + static_cast<std::int64_t>(node)) * bucket.elems();
    }

    Device& device_;
    const int rank_, ranks_;
    float* const gradients_;
    const ShardSums shards_;
    const std::int64_t rows_;             // of a rank
    DeviceBuffer<float> gathered_;        // of each bucket [ranks][rows][elems]
    DeviceBuffer<std::uint16_t> narrow_;  // the same, if any travel in 16 bits
    std::vector<std::pair<TreeNode, float*>> waiting_;
};

}  // namespace

std::unique_ptr<GradientRoute> make_route(Route route, Communicator& comm, Device& device,
                                          float* gradients, const std::vector<Bucket>& buckets,
                                          const ShardSums& shards) {
    switch (route) {
        case Route::library:
            return std::make_unique<LibraryRoute>(comm, device, gradients, buckets,
                                                  shards.by_library && shards.shards > 0);
        case Route::fixed_order:
            return std::make_unique<FixedOrderRoute>(comm, device, gradients, buckets, shards);
        case Route::factors:
            break;
    }
    return nullptr;
}

}  // namespace gyre::comm
