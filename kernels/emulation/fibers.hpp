// The stacks of emulated threads, and switches between them.
#pragma once

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "kernels/emulation/sanitizer.hpp"

namespace simt::emulator {

namespace context = boost::context::detail;

struct Lane;

// A stack and the thread that runs on it. The host's own stack is a fiber, too.
struct Fiber {
    context::fcontext_t at = nullptr;
    std::byte* stack = nullptr;
    Lane* lane = nullptr;  // the thread that started on it, until it ends
    SanitizerFiber sanitizer;
};

inline void* map_memory(std::size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        throw gyre::Error(gyre::ExitCode::internal,
                          fmt::format("the emulator could not map {} bytes", bytes));
    }
    return memory;
}

class Fibers {
 public:
    // main: the endless function of a new fiber, which calls arrived() first.
    using Main = void (*)(context::transfer_t);
    explicit Fibers(Main main) : main_(main) {}

    Fiber* running = nullptr;
    Fiber host;

    Fiber& take() {
        if (free_.empty()) {
            auto fiber = std::make_unique<Fiber>();
            const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
            auto* memory = static_cast<std::byte*>(map_memory(kStackBytes + page));
            mprotect(memory, page, PROT_NONE);  // guard page against overflow
            fiber->stack = memory + page;
            all_.push_back(std::move(fiber));
            prepare(*all_.back(), all_.size() - 1);
            free_.push_back(all_.back().get());
        }
        Fiber& fiber = *free_.back();
        free_.pop_back();
        return fiber;
    }
    void give_back(Fiber& fiber) { free_.push_back(&fiber); }
    // Abandons all fibers without resuming them.
    void abandon_all() {
        free_.clear();
        for (std::size_t i = 0; i < all_.size(); ++i) {
            prepare(*all_[i], i);
            free_.push_back(all_[i].get());
        }
    }

    // Returns when another fiber jumps back; never if `for_good`.
    void jump(Fiber& from, Fiber& to, bool for_good) {
        running = &to;
        from.sanitizer.leave(to.sanitizer, for_good);
        arrived(context::jump_fcontext(to.at, &from));
    }
    void arrived(context::transfer_t from) {
        auto* source = static_cast<Fiber*>(from.data);
        source->at = from.fctx;
        running->sanitizer.enter(source->sanitizer);
    }

 private:
    static constexpr std::size_t kStackBytes = GYRE_ASAN ? 256 << 10 : 64 << 10;

    void prepare(Fiber& fiber, std::size_t i) const {
        unpoison(fiber.stack, kStackBytes);
        // Different offsets within a page keep stacks from competing for the same cache lines.
        const std::size_t offset = i % 61 * 192;
        fiber.at =
            context::make_fcontext(fiber.stack + kStackBytes - offset, kStackBytes - offset, main_);
        fiber.sanitizer.set_stack(fiber.stack, kStackBytes);
    }

    const Main main_;
    std::vector<std::unique_ptr<Fiber>> all_;
    std::vector<Fiber*> free_;
};

}  // namespace simt::emulator
