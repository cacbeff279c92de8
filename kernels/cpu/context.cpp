#include "kernels/cpu/context.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "base/error.hpp"

namespace gyre::cpu {

namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
}

void* allocate_aligned(std::size_t bytes) {
    const std::size_t alignment = bytes >= kHugePage ? kHugePage : 64;
    const std::size_t rounded = round_up<std::size_t>(std::max<std::size_t>(bytes, 1), 64);
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, rounded) != 0) {
        throw Error(ExitCode::internal,
                    fmt::format("out of memory: {} MiB could not be allocated; use a smaller batch "
                                "or model, or fewer ranks on this host",
                                bytes >> 20));
    }
    if (bytes >= kHugePage) {
        madvise(memory, rounded, MADV_HUGEPAGE);  // only a hint: failure is harmless
    }
    std::memset(memory, 0, rounded);
    return memory;
}

void release_aligned(void* memory) noexcept {
    std::free(memory);
}

void Workspace::Block::reserve(std::int64_t floats) {
    if (floats > elems) {
        release_aligned(data);
        data = nullptr;
        elems = 0;
        data =
            static_cast<float*>(allocate_aligned(static_cast<std::size_t>(floats) * sizeof(float)));
        elems = floats;
    }
}

void Workspace::reserve(std::int64_t shared_floats, std::int64_t worker_floats) {
    shared_.reserve(shared_floats);
    for (Block& worker : workers_) {
        worker.reserve(worker_floats);
    }
}

}  // namespace gyre::cpu
