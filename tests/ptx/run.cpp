// Blocks, warps, divergence and barriers.
#include "tests/ptx/run.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "tests/ptx/warp.hpp"

namespace gyre::ptx {

void Warp::fail(const Instruction& instruction, const std::string& what, int lane) const {
    refuse(fmt::format(
        "{}{}: {} ({}:{})", what,
        lane < 0 ? "" : fmt::format(", thread {}", first_thread + static_cast<unsigned>(lane)),
        block->kernel->texts.at(instruction.text), block->module->source(instruction.file),
        instruction.line));
}

namespace {

std::uint32_t guarded(const Warp& warp, const Instruction& instruction, std::uint32_t mask) {
    if (instruction.guard < 0) {
        return mask;
    }
    const std::uint32_t* const predicate = lanes_of<std::uint32_t>(warp, instruction.guard);
    std::uint32_t holds = 0;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        holds |= (predicate[lane] != 0 ? 1u : 0u) << lane;
    }
    return mask & (instruction.guard_negated ? ~holds : holds);
}

// Adds lanes to the group that is at the same instruction.
void join(std::vector<Group>& groups, std::uint32_t at, std::uint32_t mask) {
    if (mask == 0) {
        return;
    }
    for (Group& group : groups) {
        if (group.at == at) {
            group.mask |= mask;
            return;
        }
    }
    groups.push_back({at, mask});
}

class RunWarp {
 public:
    RunWarp(Warp& warp, std::uint64_t& count)
        : warp_(warp), code_(warp.block->kernel->code), count_(count) {}

    // Until the warp waits at the block's barrier, or has ended. Of the groups of lanes the one
    // that is least far in the code goes on, so that lanes meet again where branches join; at an
    // operation of the whole warp they wait for each other.
    void run() {
        while (!warp_.at_barrier && !warp_.done) {
            if (warp_.ready.empty()) {
                meet();
            } else {
                run_group();
            }
        }
    }

 private:
    void meet() {
        if (warp_.waiting.empty()) {
            warp_.done = true;
            return;
        }
        const Group all = warp_.waiting[0];
        const Instruction& instruction = code_[all.at];
        if (warp_.waiting.size() > 1) {
            warp_.fail(instruction,
                       "lanes of a warp wait at different operations of the whole warp");
        }
        if (all.mask != kAllLanes) {
            warp_.fail(instruction,
                       "lanes have left the kernel before an operation of the whole warp");
        }
        warp_.waiting.clear();
        do_together(instruction);
        if (instruction.kind == Kind::barrier) {
            warp_.at_barrier = true;
            warp_.barrier = all.at;
        }
        warp_.ready.push_back({all.at + 1, all.mask});
    }
    void do_together(const Instruction& instruction) {
        ++count_;
        if (instruction.kind == Kind::whole_warp) {
            instruction.handler(warp_, instruction, kAllLanes);
        }
    }

    void run_group() {
        const auto least =
            std::min_element(warp_.ready.begin(), warp_.ready.end(),
                             [](const Group& a, const Group& b) { return a.at < b.at; });
        Group now = *least;
        warp_.ready.erase(least);
        std::uint32_t limit = ~0u;  // the next group
        for (const Group& group : warp_.ready) {
            limit = std::min(limit, group.at);
        }
        while (now.at < limit) {
            const Instruction& instruction = code_[now.at];
            if (instruction.kind == Kind::plain) {
                ++count_;
                if (const std::uint32_t mask = guarded(warp_, instruction, now.mask); mask != 0) {
                    instruction.handler(warp_, instruction, mask);
                }
                ++now.at;
            } else if (!go_on(now, instruction)) {
                return;
            }
        }
        join(warp_.ready, now.at, now.mask);
    }

    // Runs an instruction that is not plain; false if the group has changed or waits.
    bool go_on(Group& now, const Instruction& instruction) {
        const std::uint32_t mask = guarded(warp_, instruction, now.mask);
        const std::uint32_t rest = now.mask & ~mask;
        switch (instruction.kind) {
            case Kind::branch:
                ++count_;
                if (mask == 0 || rest == 0) {
                    now.at = rest == 0 ? instruction.target : now.at + 1;
                    return true;
                }
                join(warp_.ready, instruction.target, mask);
                join(warp_.ready, now.at + 1, rest);
                return false;
            case Kind::exit:
                ++count_;
                leave(instruction, mask);
                join(warp_.ready, now.at + 1, rest);
                return false;
            default:
                if (instruction.guard >= 0) {
                    warp_.fail(instruction, "an operation of the whole warp has a guard");
                }
                if (now.mask == kAllLanes && instruction.kind == Kind::whole_warp) {
                    do_together(instruction);
                    ++now.at;
                    return true;
                }
                join(warp_.waiting, now.at, now.mask);
                return false;
        }
    }

    void leave(const Instruction& instruction, std::uint32_t mask) {
        warp_.live &= ~mask;
        for_lanes(mask, [&](int lane) {
            const auto& committed = warp_.committed[lane];
            if (!warp_.open[lane].empty()) {
                warp_.fail(instruction, "a thread leaves with copies that it has not committed",
                           lane);
            }
            if (std::any_of(committed.begin(), committed.end(),
                            [](const auto& group) { return !group.empty(); })) {
                warp_.fail(instruction, "a thread leaves with copies that it has not waited for",
                           lane);
            }
        });
    }

    Warp& warp_;
    const std::vector<Instruction>& code_;
    std::uint64_t& count_;
};

template <typename T>
void fill(const Warp& warp, std::int32_t at, T value) {
    std::fill_n(lanes_of<T>(warp, at), kLanes, value);
}

class Run {
 public:
    Run(const Module& module, const Kernel& kernel, const Launch& launch)
        : kernel_(kernel), launch_(launch) {
        for (const auto& [name, place] : module.globals()) {
            launch_.memory.push_back({place.first, place.first + place.second});
        }
        std::sort(launch_.memory.begin(), launch_.memory.end(),
                  [](const MemoryRange& a, const MemoryRange& b) { return a.begin < b.begin; });
        block_ = {&launch_, &kernel_, &module, nullptr, 0};
        place_threads();
        place_arguments();
        place_shared();
        check_special_registers();
    }

    std::uint64_t run() {
        for (unsigned z = 0; z < launch_.grid[2]; ++z) {
            for (unsigned y = 0; y < launch_.grid[1]; ++y) {
                for (unsigned x = 0; x < launch_.grid[0]; ++x) {
                    run_block({x, y, z});
                }
            }
        }
        return count_;
    }

 private:
    static constexpr const char* kAxes[] = {"x", "y", "z"};

    void place_threads() {
        const unsigned threads = launch_.block[0] * launch_.block[1] * launch_.block[2];
        if (threads % kLanes != 0) {
            refuse(fmt::format("a block of {} threads, which are no whole warps", threads));
        }
        if (kernel_.most_threads != 0 && threads > kernel_.most_threads) {
            refuse(fmt::format("a block of {} threads; .maxntid says {}", threads,
                               kernel_.most_threads));
        }
        warps_.resize(threads / kLanes);
        register_store_.resize(kernel_.register_bytes / 8 * warps_.size() + 8);
        registers_ = reinterpret_cast<std::uint8_t*>(
            (reinterpret_cast<std::uintptr_t>(register_store_.data()) + 63) / 64 * 64);
    }
    void place_arguments() {
        arguments_.resize(kernel_.parameter_bytes / 8 + 1);
        if (launch_.arguments.size() != kernel_.parameters.size()) {
            refuse(fmt::format("{} arguments for {} parameters", launch_.arguments.size(),
                               kernel_.parameters.size()));
        }
        for (std::size_t i = 0; i < kernel_.parameters.size(); ++i) {
            const Argument& argument = launch_.arguments[i];
            const Kernel::Parameter& parameter = kernel_.parameters[i];
            if (argument.bytes != parameter.bytes) {
                refuse(fmt::format("argument {} has {} bytes, and the parameter {}", i,
                                   argument.bytes, parameter.bytes));
            }
            std::memcpy(reinterpret_cast<std::uint8_t*>(arguments_.data()) + parameter.offset,
                        argument.at, argument.bytes);
        }
    }
    void place_shared() {
        constexpr std::size_t kMost = 227 << 10, kAlignment = 1024;
        dynamic_begin_ = (kernel_.shared_bytes + 127) / 128 * 128;
        if (kernel_.dynamic_shared && launch_.shared_bytes == 0) {
            refuse("the kernel has dynamic shared memory, and the launch none");
        }
        shared_bytes_ =
            launch_.shared_bytes > 0 ? dynamic_begin_ + launch_.shared_bytes : kernel_.shared_bytes;
        if (shared_bytes_ > kMost) {
            refuse(fmt::format("{} bytes of shared memory, and {} are the most", shared_bytes_,
                               kMost));
        }
        shared_store_.resize(kSharedBegin + shared_bytes_ + kAlignment);
        block_.shared = reinterpret_cast<std::uint8_t*>(
            (reinterpret_cast<std::uintptr_t>(shared_store_.data()) + kAlignment - 1) / kAlignment *
            kAlignment);
        block_.shared_end = kSharedBegin + static_cast<std::uint32_t>(shared_bytes_);
    }
    void check_special_registers() const {
        for (const auto& [name, place] : kernel_.special_registers) {
            bool known = name == "%laneid";
            for (const char* const axis : kAxes) {
                for (const char* const kind : {"%tid.", "%ntid.", "%ctaid.", "%nctaid."}) {
                    known = known || name == std::string(kind) + axis;
                }
            }
            if (!known) {
                refuse(fmt::format("the special register {} is not covered{}", name,
                                   name.rfind("%cluster", 0) == 0 ? " (no clusters are)" : ""));
            }
        }
    }

    struct Index {
        unsigned axis[3];
    };
    void run_block(const Index& index) {
        // Memory that nobody has written is NaN.
        std::memset(block_.shared, 0xff, kSharedBegin + shared_bytes_);
        std::memset(registers_, 0xff, kernel_.register_bytes * warps_.size());
        for (std::size_t i = 0; i < warps_.size(); ++i) {
            begin_warp(i, index);
        }
        for (std::size_t done = 0; done < warps_.size();) {
            done = 0;
            for (Warp& warp : warps_) {
                RunWarp(warp, count_).run();
                done += warp.done;
            }
            for (Warp& warp : warps_) {
                if (done > 0 && warp.at_barrier) {
                    warp.fail(kernel_.code[warp.barrier],
                              "warps have left the kernel, and others wait at a barrier");
                }
                warp.at_barrier = false;
            }
        }
    }
    void begin_warp(std::size_t number, const Index& index) {
        Warp& warp = warps_[number] = Warp{};
        warp.registers = registers_ + kernel_.register_bytes * number;
        warp.block = &block_;
        warp.first_thread = static_cast<unsigned>(number) * kLanes;
        warp.ready.push_back({0, kAllLanes});
        for (const Kernel::Constant& constant : kernel_.constants) {
            if (constant.wide) {
                fill(warp, constant.at, constant.bits);
            } else {
                fill(warp, constant.at, static_cast<std::uint32_t>(constant.bits));
            }
        }
        for (const auto& [place, offset] : kernel_.parameter_addresses) {
            fill(warp, place, reinterpret_cast<std::uint64_t>(arguments_.data()) + offset);
        }
        for (const auto& [place, wide] : kernel_.dynamic_addresses) {
            const std::uint32_t address = kSharedBegin + static_cast<std::uint32_t>(dynamic_begin_);
            if (wide) {
                fill(warp, place, std::uint64_t{address});
            } else {
                fill(warp, place, address);
            }
        }
        fill_special_registers(warp, index);
    }
    void fill_special_registers(const Warp& warp, const Index& index) {
        const auto set = [&](const std::string& name, const auto& value_of_lane) {
            const auto found = kernel_.special_registers.find(name);
            if (found != kernel_.special_registers.end()) {
                for (unsigned lane = 0; lane < kLanes; ++lane) {
                    lanes_of<std::uint32_t>(warp, found->second)[lane] = value_of_lane(lane);
                }
            }
        };
        unsigned before = 1;  // threads of a step along the axis
        for (int i = 0; i < 3; ++i) {
            set(std::string("%ntid.") + kAxes[i], [&](unsigned) { return launch_.block[i]; });
            set(std::string("%ctaid.") + kAxes[i], [&](unsigned) { return index.axis[i]; });
            set(std::string("%nctaid.") + kAxes[i], [&](unsigned) { return launch_.grid[i]; });
            set(std::string("%tid.") + kAxes[i], [&](unsigned lane) {
                return (warp.first_thread + lane) / before % launch_.block[i];
            });
            before *= launch_.block[i];
        }
        set("%laneid", [](unsigned lane) { return lane; });
    }

    const Kernel& kernel_;
    Launch launch_;
    Block block_;
    std::vector<Warp> warps_;
    std::vector<std::uint64_t> register_store_, arguments_;
    std::uint8_t* registers_ = nullptr;
    std::vector<std::uint8_t> shared_store_;
    std::size_t shared_bytes_ = 0, dynamic_begin_ = 0;
    std::uint64_t count_ = 0;
};

}  // namespace

std::uint64_t run(const Module& module, const Kernel& kernel, const Launch& launch) {
    return Run(module, kernel, launch).run();
}

}  // namespace gyre::ptx
