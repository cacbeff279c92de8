#include <algorithm>

#include "kernels/emulation/emulator.hpp"

namespace simt::emulator {

void atomic_max(std::int32_t* at, std::int32_t value) {
    *at = std::max(*at, value);
}
void atomic_add(std::uint32_t* at, std::uint32_t value) {
    *at += value;
}
void atomic_add(std::int64_t* at, std::int64_t value) {
    *at += value;
}

bool arrives_last(std::uint32_t* count, std::uint32_t blocks, std::uint32_t index) {
    if (cluster_blocks > 1) {
        report("arrives_last: the emulator does not support it in clusters");
    }
    if (!runs_all_blocks()) {
        return index + 1 == blocks;
    }
    *count = *count + 1 < blocks ? *count + 1 : 0;
    const bool last = *count == 0;
    listener->block_arrives(count, last);
    return last;
}

}  // namespace simt::emulator
