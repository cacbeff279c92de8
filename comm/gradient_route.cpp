#include "comm/gradient_route.hpp"

#include <algorithm>

namespace gyre::comm {
namespace {

class LibraryRoute final : public GradientRoute {
 public:
    LibraryRoute(Communicator& comm, Device& device, float* gradients,
                 const std::vector<Bucket>& buckets)
        : device_(device), rank_(comm.rank()), gradients_(gradients) {
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
    static bool narrow(const Bucket& bucket) { return bucket.type != DataType::float32; }

    Device& device_;
    const int rank_;
    float* const gradients_;
    DeviceBuffer<std::uint16_t> narrow_;  // [elems], if any travel in 16 bits
};

class FixedOrderRoute final : public GradientRoute {
 public:
    FixedOrderRoute(Communicator& comm, Device& device, float* gradients,
                    const std::vector<Bucket>& buckets)
        : device_(device),
          rank_(comm.rank()),
          ranks_(comm.size()),
          gradients_(gradients),
          gathered_(device, ranks_ * buckets.front().end) {}

    void pack(const Bucket& bucket) override {
        device_.copy(row(bucket, rank_), gradients_ + bucket.begin,
                     static_cast<std::size_t>(bucket.bytes()));
    }
    Collective collective(const Bucket& bucket, int /*index*/) const override {
        return {
            .kind = Collective::Kind::all_gather, .data = row(bucket, 0), .count = bucket.elems()};
    }
    // The own gradients are already where the sum is to be, so each level adds the sum of the
    // neighbouring subtree to them. Both neighbours then have the same bits, as a + b is b + a.
    void unpack(const Bucket& bucket) override {
        const Bucket summed = bucket.summed_by(rank_);
        const std::int64_t elems = summed.elems();
        const auto term = [&](int rank) { return row(bucket, rank) + summed.begin - bucket.begin; };
        for (int width = 1; width < ranks_; width *= 2) {
            const int first = (rank_ / width ^ 1) * width;
            for (int step = 1; step < width; step *= 2) {
                for (int left = first; left < first + width; left += 2 * step) {
                    device_.add(elems, term(left + step), term(left));
                }
            }
            device_.add(elems, term(first), gradients_ + summed.begin);
        }
    }

 private:
    float* row(const Bucket& bucket, int rank) const {
        return gathered_.get() + ranks_ * bucket.begin + rank * bucket.elems();
    }

    Device& device_;
    const int rank_, ranks_;
    float* const gradients_;
    DeviceBuffer<float> gathered_;  // of each bucket [ranks][elems]
};

}  // namespace

std::unique_ptr<GradientRoute> make_route(Route route, Communicator& comm, Device& device,
                                          float* gradients, const std::vector<Bucket>& buckets) {
    switch (route) {
        case Route::library:
            return std::make_unique<LibraryRoute>(comm, device, gradients, buckets);
        case Route::fixed_order:
            return std::make_unique<FixedOrderRoute>(comm, device, gradients, buckets);
        case Route::factors:
            break;
    }
    return nullptr;
}

}  // namespace gyre::comm
