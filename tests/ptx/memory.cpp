// Loads, stores, atomic operations and asynchronous copies.
#include <algorithm>

#include "tests/ptx/instructions.hpp"
#include "tests/ptx/memory.hpp"

namespace gyre::ptx {

std::uint8_t* shared_memory(const Warp& warp, const Instruction& instruction, std::uint32_t address,
                            std::uint32_t bytes, int lane) {
    if (address % bytes != 0) {
        warp.fail(instruction, "a misaligned address in shared memory", lane);
    }
    if (address < kSharedBegin || address + bytes > warp.block->shared_end) {
        warp.fail(instruction, "an address outside of shared memory", lane);
    }
    return warp.block->shared + address;
}

namespace {

std::uint8_t* at_address(std::uint64_t address) {
    return reinterpret_cast<std::uint8_t*>(address);
}

// Device memory; by a generic address also shared memory.
std::uint8_t* global_memory(const Warp& warp, const Instruction& instruction, std::uint64_t address,
                            std::uint64_t bytes, int lane) {
    if (address >= instruction.begin && address + bytes <= instruction.end) {
        return at_address(address);
    }
    const std::vector<MemoryRange>& memory = warp.block->launch->memory;
    const auto found = std::partition_point(memory.begin(), memory.end(),
                                            [=](const MemoryRange& x) { return x.end <= address; });
    if (found != memory.end() && found->begin <= address && address + bytes <= found->end) {
        instruction.begin = found->begin;
        instruction.end = found->end;
        return at_address(address);
    }
    const auto window = reinterpret_cast<std::uintptr_t>(warp.block->shared);
    if (address >= window + kSharedBegin && address + bytes <= window + warp.block->shared_end) {
        return at_address(address);
    }
    warp.fail(instruction, "an address outside of memory", lane);
}

enum class Space { global, shared, param };

template <Space kSpace>
std::uint8_t* place(const Warp& warp, const Instruction& instruction, std::uint32_t bytes,
                    int lane) {
    if constexpr (kSpace == Space::shared) {
        const auto base = source<std::uint32_t>(warp, instruction, 0)[lane];
        return shared_memory(warp, instruction,
                             base + static_cast<std::uint32_t>(instruction.offset), bytes, lane);
    } else {
        const std::uint64_t address = source<std::uint64_t>(warp, instruction, 0)[lane] +
                                      static_cast<std::uint64_t>(instruction.offset);
        if constexpr (kSpace == Space::param) {
            return at_address(address);
        }
        if (address % bytes != 0) {
            warp.fail(instruction, "a misaligned address", lane);
        }
        return global_memory(warp, instruction, address, bytes, lane);
    }
}

template <Space kSpace, typename T>
void load(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    const auto bytes = static_cast<std::uint32_t>(sizeof(T) * instruction.elements);
    for_lanes(mask, [&](int lane) {
        const std::uint8_t* const from = place<kSpace>(warp, instruction, bytes, lane);
        for (int i = 0; i < instruction.elements; ++i) {
            T value;
            std::memcpy(&value, from + sizeof value * static_cast<std::size_t>(i), sizeof value);
            if (sizeof(T) == 8 || instruction.wide) {
                result<std::int64_t>(warp, instruction, i)[lane] = static_cast<std::int64_t>(value);
            } else {
                result<std::int32_t>(warp, instruction, i)[lane] = static_cast<std::int32_t>(value);
            }
        }
    });
}
template <Space kSpace, typename T>
void store(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    const auto bytes = static_cast<std::uint32_t>(sizeof(T) * instruction.elements);
    for_lanes(mask, [&](int lane) {
        std::uint8_t* const to = place<kSpace>(warp, instruction, bytes, lane);
        for (int i = 0; i < instruction.elements; ++i) {
            const T value =
                sizeof(T) == 8 || instruction.wide
                    ? static_cast<T>(source<std::uint64_t>(warp, instruction, 1 + i)[lane])
                    : static_cast<T>(source<std::uint32_t>(warp, instruction, 1 + i)[lane]);
            std::memcpy(to + sizeof value * static_cast<std::size_t>(i), &value, sizeof value);
        }
    });
}

template <Space kSpace, typename T, typename Operation>
void atomic(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    for_lanes(mask, [&](int lane) {
        std::uint8_t* const at = place<kSpace>(warp, instruction, sizeof(T), lane);
        T old = 0;
        std::memcpy(&old, at, sizeof old);
        const T now = Operation::of(old, source<T>(warp, instruction, 1)[lane]);
        std::memcpy(at, &now, sizeof now);
        result<T>(warp, instruction)[lane] = old;
    });
}
struct Increment {
    static std::uint32_t of(std::uint32_t old, std::uint32_t most) {
        return old >= most ? 0 : old + 1;
    }
};
struct SignedMax {
    static std::uint32_t of(std::uint32_t old, std::uint32_t other) {
        return static_cast<std::int32_t>(old) > static_cast<std::int32_t>(other) ? old : other;
    }
};

struct Add {
    template <typename T>
    static T of(T old, T other) {
        return old + other;
    }
};

// Between addresses in the window and generic ones.
template <bool kToShared>
void convert_address(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    auto* const d = result<std::uint64_t>(warp, instruction);
    const auto* const a = source<std::uint64_t>(warp, instruction, 0);
    const auto window = reinterpret_cast<std::uint64_t>(warp.block->shared);
    for_lanes(mask, [=](int lane) { d[lane] = kToShared ? a[lane] - window : a[lane] + window; });
}

// A copy lands when it is waited for; until then NaN is in its place.
void begin_copy(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    constexpr std::uint32_t kBytes = 16;
    for_lanes(mask, [&](int lane) {
        const std::uint32_t address = source<std::uint32_t>(warp, instruction, 0)[lane];
        std::uint8_t* const to = shared_memory(warp, instruction, address, kBytes, lane);
        const std::uint64_t from = source<std::uint64_t>(warp, instruction, 1)[lane];
        const std::uint32_t bytes = source<std::uint32_t>(warp, instruction, 2)[lane];
        if (bytes > kBytes) {
            warp.fail(instruction, "a copy of more bytes than 16", lane);
        }
        if (bytes > 0) {
            if (from % kBytes != 0) {
                warp.fail(instruction, "a misaligned source of a copy", lane);
            }
            global_memory(warp, instruction, from, bytes, lane);
        }
        std::memset(to, 0xff, kBytes);
        warp.open[lane].push_back({to, at_address(from), bytes});
    });
}
void commit_copies(Warp& warp, const Instruction&, std::uint32_t mask) {
    for_lanes(mask, [&](int lane) {
        warp.committed[lane].push_back(std::move(warp.open[lane]));
        warp.open[lane].clear();
    });
}
void wait_for_copies(Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    for_lanes(mask, [&](int lane) {
        auto& groups = warp.committed[lane];
        while (static_cast<std::int64_t>(groups.size()) > instruction.offset) {
            for (const Copy& copy : groups.front()) {
                std::memset(copy.to, 0, 16);
                if (copy.bytes > 0) {
                    std::memcpy(copy.to, copy.from, copy.bytes);
                }
            }
            groups.erase(groups.begin());
        }
    });
}

template <Space kSpace>
void add_space(Handlers& handlers, const std::string& space) {
    const auto name = [&](const char* access, const char* type) {
        return access + space + "." + type;
    };
    handlers.add(name("ld.", "u8"), load<kSpace, std::uint8_t>);
    handlers.add(name("ld.", "s8"), load<kSpace, std::int8_t>);
    handlers.add(name("ld.", "u16"), load<kSpace, std::uint16_t>);
    handlers.add(name("ld.", "s16"), load<kSpace, std::int16_t>);
    handlers.add(name("ld.", "u32"), load<kSpace, std::uint32_t>);
    handlers.add(name("ld.", "s32"), load<kSpace, std::int32_t>);
    handlers.add(name("ld.", "u64"), load<kSpace, std::uint64_t>);
    if constexpr (kSpace != Space::param) {
        handlers.add(name("st.", "u8"), store<kSpace, std::uint8_t>);
        handlers.add(name("st.", "u16"), store<kSpace, std::uint16_t>);
        handlers.add(name("st.", "u32"), store<kSpace, std::uint32_t>);
        handlers.add(name("st.", "u64"), store<kSpace, std::uint64_t>);
    }
}

}  // namespace

void add_memory(Handlers& handlers) {
    add_space<Space::global>(handlers, "global");
    add_space<Space::shared>(handlers, "shared");
    add_space<Space::param>(handlers, "param");
    handlers.add("atom.global.inc.u32", atomic<Space::global, std::uint32_t, Increment>);
    handlers.add("atom.global.max.s32", atomic<Space::global, std::uint32_t, SignedMax>);
    handlers.add("atom.global.add.u64", atomic<Space::global, std::uint64_t, Add>);
    handlers.add("atom.shared.add.u32", atomic<Space::shared, std::uint32_t, Add>);
    handlers.add("cvta.shared.u64", convert_address<false>);
    handlers.add("cvta.to.shared.u64", convert_address<true>);
    handlers.add("cp.async.cg.shared.global", begin_copy);
    handlers.add("cp.async.commit_group", commit_copies);
    handlers.add("cp.async.wait_group", wait_for_copies);
}

}  // namespace gyre::ptx
