// A warp and the block it is of, as handlers of instructions see them.
#pragma once

#include <bit>
#include <cstring>
#include <type_traits>

#include "tests/ptx/run.hpp"

namespace gyre::ptx {

constexpr unsigned kLanes = 32;
constexpr std::uint32_t kAllLanes = 0xffffffffu;
// Where the shared memory of a block begins in its window: lower addresses are outside.
constexpr std::uint32_t kSharedBegin = 1024;

struct Copy {
    std::uint8_t* to;
    const std::uint8_t* from;
    std::uint32_t bytes;  // of the source; the rest of 16 is filled with zeros
};

struct Block {
    const Launch* launch = nullptr;
    const Kernel* kernel = nullptr;
    const Module* module = nullptr;
    std::uint8_t* shared = nullptr;  // address 0 of the window
    std::uint32_t shared_end = 0;    // an address in the window
};

// Lanes that are at the same instruction.
struct Group {
    std::uint32_t at, mask;
};

struct Warp {
    std::uint8_t* registers = nullptr;
    const Block* block = nullptr;
    unsigned first_thread = 0;
    std::uint32_t live = kAllLanes;  // lanes that have not left the kernel
    std::vector<Group> ready, waiting;
    bool at_barrier = false, done = false;
    std::uint32_t barrier = 0;  // the instruction
    // Asynchronous copies of each lane: those since its last commit, and groups on their way.
    std::vector<Copy> open[kLanes];
    std::vector<std::vector<Copy>> committed[kLanes];

    // Ends the launch; the message has the instruction, its line and, unless -1, the lane's thread.
    [[noreturn]] void fail(const Instruction& instruction, const std::string& what,
                           int lane = -1) const;
};

// A register holds 32 lanes of 4 bytes, also narrower values and predicates (0 or 1), or of 8.
template <typename T>
using InRegister =
    std::conditional_t<sizeof(T) == 8, T, std::conditional_t<sizeof(T) == 4, T, std::uint32_t>>;
template <typename T>
InRegister<T>* lanes_of(const Warp& warp, std::int32_t place) {
    return reinterpret_cast<InRegister<T>*>(warp.registers + place);
}
template <typename T>
InRegister<T>* result(const Warp& warp, const Instruction& instruction, int i = 0) {
    return lanes_of<T>(warp, instruction.results[i]);
}
template <typename T>
const InRegister<T>* source(const Warp& warp, const Instruction& instruction, int i) {
    return lanes_of<T>(warp, instruction.sources[i]);
}

// Work on a lane touches no other lane's registers, so that several may be done at a time.
template <typename Work>
void for_lanes(std::uint32_t mask, Work work) {
    if (mask == kAllLanes) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
        for (int lane = 0; lane < static_cast<int>(kLanes); ++lane) {
            work(lane);
        }
    } else {
        for (std::uint32_t rest = mask; rest != 0; rest &= rest - 1) {
            work(std::countr_zero(rest));
        }
    }
}

}  // namespace gyre::ptx
