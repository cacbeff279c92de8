// Sums over partial results of a launch's blocks, added by the blocks that finish last: one block
// adds the parts of each group, and one adds the sums of the groups. The order of summation depends
// only on the number of parts, not on which blocks finish last.
#pragma once

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/simt.hpp"

namespace gyre::SIMT_NAMESPACE {

struct PartGroups {
    int parts, group, groups;  // parts, parts per group (the last may have fewer), groups
    int counts() const { return groups + 1; }
};
// A few parts form one group; otherwise there are about as many groups as parts per group.
inline PartGroups part_groups(int parts) {
    int group = parts;
    if (parts > 8) {
        for (group = 3; group * group < parts; ++group) {
        }
    }
    return {parts, group, (parts + group - 1) / group};
}

// Called by all threads of the block that has written part `part`. counts: [groups + 1], shared by
// the blocks whose parts are added. add(first, count, step, all) adds the parts first,
// first + step, ... and writes the sum over the first or, if `all`, to its final destination. Each
// element must be handled by the same thread in all calls.
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
