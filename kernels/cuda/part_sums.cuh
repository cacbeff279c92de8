// Sums over partial results that the blocks of a launch compute, added by those that are the last
// to finish: of each group of parts one adds up the group, and of the groups one adds up their
// sums. What is added in which order follows from the number of parts alone, whoever does it.
#pragma once

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

struct PartGroups {
    int parts, group, groups;  // parts of a group but for the last, groups
    int counts() const { return groups + 1; }
};
// Few parts are one group; else about as many groups as each has parts.
inline PartGroups part_groups(int parts) {
    int group = parts;
    if (parts > 8) {
        for (group = 3; group * group < parts; ++group) {
        }
    }
    return {parts, group, (parts + group - 1) / group};
}

// By all threads of the block that has written part `part`. counts: [groups + 1], of those blocks
// whose parts belong together. add(first, count, step, all) adds the parts first, first + step, ...
// and writes the sum in the place of the first, or where it is of all, where that belongs; each
// element by the same thread in all calls.
template <typename Add>
__device__ __forceinline__ void add_as_last(std::uint32_t* counts, const PartGroups& of, int part,
                                            Add add) {
    SIMT_SHARED(int, last, [1]);
    const int group = part / of.group, first = group * of.group;
    const int members = min(of.group, of.parts - first);
    __syncthreads();
    if (threadIdx.x == 0) {
        last[0] = arrives_last(counts + 1 + group, static_cast<unsigned>(members),
                               static_cast<unsigned>(part - first));
    }
    __syncthreads();
    if (last[0] == 0) {
        return;
    }
    add(first, members, 1, of.groups == 1);
    if (of.groups == 1) {
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last[0] =
            arrives_last(counts, static_cast<unsigned>(of.groups), static_cast<unsigned>(group));
    }
    __syncthreads();
    if (last[0] != 0) {
        add(0, of.groups, of.group, true);
    }
}

}  // namespace gyre::SIMT_NAMESPACE
