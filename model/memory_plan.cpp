#include "model/memory_plan.hpp"

#include <algorithm>
#include <numeric>

namespace gyre::model {

MemoryPlan plan_memory(const std::vector<Lifetime>& blocks) {
    std::vector<std::size_t> order(blocks.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return blocks[a].bytes > blocks[b].bytes;
    });
    const auto size_of = [&](std::size_t block) { return whole_blocks(blocks[block].bytes); };
    MemoryPlan plan{std::vector<std::size_t>(blocks.size(), 0), 0};
    std::vector<std::size_t> placed;  // ascending by offset
    for (const std::size_t block : order) {
        if (blocks[block].never()) {
            continue;
        }
        std::size_t at = 0;
        for (const std::size_t other : placed) {
            const bool together = blocks[other].first <= blocks[block].last &&
                                  blocks[block].first <= blocks[other].last;
            if (!together) {
                continue;
            }
            if (plan.offsets[other] >= at + size_of(block)) {
                break;
            }
            at = std::max(at, plan.offsets[other] + size_of(other));
        }
        plan.offsets[block] = at;
        plan.bytes = std::max(plan.bytes, at + size_of(block));
        placed.insert(std::upper_bound(placed.begin(), placed.end(), block,
                                       [&](std::size_t a, std::size_t b) {
                                           return plan.offsets[a] < plan.offsets[b];
                                       }),
                      block);
    }
    return plan;
}

}  // namespace gyre::model
