#include "kernels/emulation/lanes.hpp"

#include "base/error.hpp"
#include "kernels/emulation/runtime.hpp"

namespace simt::emulator {

void check_extents(const Launch& launch) {
    constexpr unsigned kMostThreads = 1024;
    const dim3 grid = launch.grid, block = launch.block;
    const auto fail = [&](const std::string& what) {
        throw gyre::Error(gyre::ExitCode::internal,
                          fmt::format("kernel {}: {}", launch.kernel, what));
    };
    if (block.count() == 0 || block.count() > kMostThreads || block.count() % kWarp != 0) {
        fail(
            fmt::format("blocks of {} threads; gyre's kernels need a multiple of 32, at most "
                        "{}",
                        block.count(), kMostThreads));
    }
    if (grid.count() == 0 || grid.x > 0x7fffffffu || grid.y > 0xffffu || grid.z > 0xffffu) {
        fail(fmt::format("a grid of {} x {} x {} blocks is not possible", grid.x, grid.y, grid.z));
    }
    if (launch.cluster == 0 || launch.cluster > kMostCluster || grid.x % launch.cluster != 0) {
        fail(
            fmt::format("clusters of {} blocks in a grid of {} x {} x {}; a cluster has at most "
                        "{} blocks, and must divide the grid along x",
                        launch.cluster, grid.x, grid.y, grid.z, kMostCluster));
    }
    if (launch.cluster * block.count() > kMostClusterThreads) {
        fail(fmt::format("clusters of {} blocks of {} threads; the emulator supports {} threads",
                         launch.cluster, block.count(), kMostClusterThreads));
    }
    if (launch.shared_bytes > kMostSharedBytes) {
        fail(fmt::format("{} bytes of dynamic shared memory; the limit is {}", launch.shared_bytes,
                         kMostSharedBytes));
    }
}

}  // namespace simt::emulator
