#include "comm/bucket_plan.hpp"

#include <algorithm>

#include "base/round_up.hpp"

namespace gyre::comm {

namespace {
constexpr std::int64_t kGrainElems = 16;
}  // namespace

const char* name_of(const Bucket& bucket) {
    switch (bucket.route) {
        case Route::library:
            return bucket.shared() ? "reduce-scatter" : "all-reduce";
        case Route::fixed_order:
            return "fixed order";
        case Route::factors:
            return "factors";
    }
    return "";
}

std::vector<Bucket> plan_buckets(const std::vector<std::int64_t>& tensor_begins,
                                 std::int64_t total_elems, std::int64_t bucket_bytes,
                                 std::optional<std::int64_t> apart,
                                 const std::vector<Bucket>& factored) {
    constexpr std::int64_t kGrainBytes = kGrainElems * sizeof(float);
    const std::int64_t total_bytes = total_elems * std::int64_t{sizeof(float)};
    const std::int64_t least = std::max(total_bytes / kMostParts, bucket_bytes);
    const std::int64_t part_elems = std::max(kGrainElems, least / kGrainBytes * kGrainElems);
    std::vector<Bucket> buckets;
    std::int64_t end = total_elems;
    if (apart && *apart < total_elems) {
        buckets.push_back({*apart, total_elems});
        end = *apart;
    }
    auto whole = factored.rbegin();
    for (auto begin = tensor_begins.rbegin(); begin != tensor_begins.rend(); ++begin) {
        if (whole != factored.rend() && *begin == whole->begin) {
            if (end > whole->end) {
                buckets.push_back({whole->end, end});
            }
            buckets.push_back({*begin, whole->end, 0, Route::factors});
            end = *begin;
            ++whole;
            continue;
        }
        const bool closed = *begin == 0 || (whole != factored.rend() && *begin == whole->end);
        if (Bucket{*begin, end}.bytes() < least && !closed) {
            continue;
        }
        // The last part is what remains, up to twice a part.
        while (end - *begin > 2 * part_elems) {
            const std::int64_t part = std::max(*begin, round_up(end - part_elems, kGrainElems));
            buckets.push_back({part, end});
            end = part;
        }
        if (end > *begin) {
            buckets.push_back({*begin, end});
            end = *begin;
        }
    }
    return buckets;
}

std::vector<Bucket> share_out(const std::vector<Bucket>& buckets, int ranks,
                              std::int64_t least_bytes) {
    std::vector<Bucket> result;
    std::optional<Bucket> rest;  // of the bucket before, just above this one in the buffer
    for (Bucket bucket : buckets) {
        if (rest && rest->begin == bucket.end && rest->route == bucket.route &&
            rest->type == bucket.type) {
            bucket.end = rest->end;
        } else if (rest) {
            result.push_back(*rest);
        }
        rest.reset();
        bucket.share_elems = bucket.elems() / ranks / kGrainElems * kGrainElems;
        if (bucket.bytes() < least_bytes || bucket.share_elems == 0 ||
            bucket.route == Route::factors) {
            bucket.share_elems = 0;
            result.push_back(bucket);
            continue;
        }
        const std::int64_t begin = bucket.end - ranks * bucket.share_elems;
        if (begin > bucket.begin) {
            rest = bucket;
            rest->end = begin;
            rest->share_elems = 0;
        }
        bucket.begin = begin;
        result.push_back(bucket);
    }
    if (rest) {
        result.push_back(*rest);
    }
    return result;
}

std::vector<Bucket> updated_by(int rank, std::vector<Bucket> buckets, std::int64_t elems) {
    std::sort(buckets.begin(), buckets.end(),
              [](const Bucket& a, const Bucket& b) { return a.begin < b.begin; });
    std::vector<Bucket> ranges;
    std::int64_t at = 0;
    const auto add = [&](std::int64_t begin, std::int64_t end, std::int64_t share_elems = 0) {
        if (begin < end) {
            ranges.push_back({begin, end, share_elems});
        }
    };
    for (const Bucket& bucket : buckets) {
        if (bucket.shared()) {
            add(at, bucket.begin);
            add(bucket.share(rank).begin, bucket.share(rank).end, bucket.share_elems);
            at = bucket.end;
        }
    }
    add(at, elems);
    return ranges;
}

std::int64_t auto_bucket_bytes(std::int64_t total_elems, bool on_gpu) {
    const std::int64_t total_bytes = total_elems * std::int64_t{sizeof(float)};
    if (!on_gpu) {
        return std::clamp<std::int64_t>(total_bytes / 16, 16 << 10, 4 << 20);
    }
    return total_bytes <= 1 << 20 ? total_bytes
                                  : std::clamp<std::int64_t>(total_bytes / 4, 16 << 20, 32 << 20);
}

}  // namespace gyre::comm
