#include "comm/reducer.hpp"

#include <algorithm>
#include <chrono>

namespace gyre {

std::vector<Bucket> plan_buckets(const std::vector<std::int64_t>& tensor_begins,
                                 std::int64_t total_elems,
                                 std::optional<std::int64_t> bucket_bytes) {
    const std::int64_t total_bytes = total_elems * std::int64_t{sizeof(float)};
    const std::int64_t least =
        bucket_bytes.value_or(std::clamp<std::int64_t>(total_bytes / 8, 16 << 10, 4 << 20));
    std::vector<Bucket> buckets;
    std::int64_t end = total_elems;
    for (auto begin = tensor_begins.rbegin(); begin != tensor_begins.rend(); ++begin) {
        const Bucket bucket{*begin, end};
        if (bucket.bytes() >= least || *begin == 0) {
            buckets.push_back(bucket);
            end = *begin;
        }
    }
    return buckets;
}

Reducer::Reducer(Communicator& comm, std::vector<Bucket> buckets, float* gradients)
    : comm_(comm), buckets_(std::move(buckets)), gradients_(gradients) {}

void Reducer::ready(std::int64_t begin) {
    while (under_way_.size() < buckets_.size() && buckets_[under_way_.size()].begin >= begin) {
        const Bucket& bucket = buckets_[under_way_.size()];
        under_way_.push_back(comm_.allreduce_sum_async(gradients_ + bucket.begin, bucket.elems()));
    }
}

double Reducer::wait() {
    const auto start = std::chrono::steady_clock::now();
    for (const auto& request : under_way_) {
        request->wait();
    }
    under_way_.clear();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace gyre
