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

Reducer::Reducer(Communicator& comm, Backend& backend, std::vector<Bucket> buckets,
                 float* gradients)
    : comm_(comm), backend_(backend), buckets_(std::move(buckets)), gradients_(gradients) {
    if (comm.size() > 1 && !backend.host_memory()) {
        staging_ = {backend, buckets_.front().end};
    }
}

void Reducer::start(const Bucket& bucket, float* gradients) {
    comm_.annotate(step_, static_cast<int>(under_way_.size()));
    under_way_.push_back(comm_.allreduce_sum_async(gradients + bucket.begin, bucket.elems()));
}

void Reducer::ready(std::int64_t begin) {
    if (comm_.size() == 1) {
        return;
    }
    for (; ready_ < buckets_.size() && buckets_[ready_].begin >= begin; ++ready_) {
        const Bucket& bucket = buckets_[ready_];
        if (staged()) {
            transfers_.push_back(
                backend_.download_beside(staging_.get() + bucket.begin, gradients_ + bucket.begin,
                                         static_cast<std::size_t>(bucket.bytes())));
        } else {
            start(bucket, gradients_);
        }
    }
}

double Reducer::wait() {
    // The device is still computing while the first buckets arrive.
    for (std::size_t i = 0; i < transfers_.size(); ++i) {
        backend_.wait_transfer(transfers_[i]);
        start(buckets_[i], staging_.get());
    }
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < under_way_.size(); ++i) {
        under_way_[i]->wait();
        if (staged()) {
            const Bucket& bucket = buckets_[i];
            backend_.upload_beside(gradients_ + bucket.begin, staging_.get() + bucket.begin,
                                   static_cast<std::size_t>(bucket.bytes()));
        }
    }
    const auto end = std::chrono::steady_clock::now();
    under_way_.clear();
    transfers_.clear();
    ready_ = 0;
    ++step_;
    return std::chrono::duration<double>(end - begin).count();
}

}  // namespace gyre
