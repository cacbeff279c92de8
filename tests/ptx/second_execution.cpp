#include "tests/ptx/second_execution.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>

#include "tests/ptx/symbols.hpp"

namespace gyre::ptx {
namespace {

// "void gyre::cuda::(anonymous namespace)::sum<4>(float*)": "sum".
std::string short_name(std::string name) {
    for (const char* const part : {"(anonymous namespace)::", "gyre::cuda::", "void "}) {
        for (std::size_t at = 0; (at = name.find(part)) != std::string::npos;) {
            name.erase(at, std::strlen(part));
        }
    }
    return name.substr(0, name.find_first_of("<("));
}

std::uint32_t word_at(const std::byte* at) {
    std::uint32_t word = 0;
    std::memcpy(&word, at, sizeof word);
    return word;
}

}  // namespace

SecondExecution::SecondExecution(std::vector<const Library*> libraries)
    : libraries_(std::move(libraries)), before_us_(simt::emulator::listener) {
    simt::emulator::listener = this;
}
SecondExecution::~SecondExecution() {
    simt::emulator::listener = before_us_;
}

void SecondExecution::device_allocated(void* at, std::size_t bytes) {
    memory_[static_cast<std::byte*>(at)] = bytes;
}
void SecondExecution::device_released(void* at, std::size_t) {
    memory_.erase(static_cast<std::byte*>(at));
}

// The kernels find memory through their arguments alone, so the words of these say which
// allocations a launch can read or write. One that it reaches another way is outside of memory for
// the PTX, and a failure.
void SecondExecution::choose_allocations() {
    chosen_.clear();
    std::set<std::byte*> pointed_at;
    for (const simt::emulator::Argument& argument : launch_->arguments) {
        const auto* const words = static_cast<const std::byte*>(argument.at);
        for (std::size_t i = 0; i + sizeof(void*) <= argument.bytes; i += sizeof(void*)) {
            std::byte* pointer = nullptr;
            std::memcpy(&pointer, words + i, sizeof pointer);
            auto found = memory_.upper_bound(pointer);
            // An end of an allocation is of use to nobody; a place before its begin might be.
            if (found != memory_.begin() &&
                pointer < (--found)->first + std::max<std::size_t>(found->second, 1)) {
                pointed_at.insert(found->first);
            }
        }
    }
    for (std::byte* const at : pointed_at) {
        chosen_.push_back({at, memory_.at(at)});
    }
}

void SecondExecution::save(std::vector<Bytes>& to) const {
    to.resize(std::max(to.size(), chosen_.size()));
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
        to[i].assign(chosen_[i].at, chosen_[i].at + chosen_[i].bytes);
    }
}
void SecondExecution::restore(const std::vector<Bytes>& from) const {
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
        std::memcpy(chosen_[i].at, from[i].data(), chosen_[i].bytes);
    }
}

// Returns whether two launches of this kernel have had the same extents and arguments but for
// pointers.
bool SecondExecution::is_known() {
    constexpr int kMost = 2;
    const auto& [grid, block] = std::pair{launch_->grid, launch_->block};
    std::string shape = fmt::format("{} {},{},{} {},{},{} {}", launch_->entry, grid.x, grid.y,
                                    grid.z, block.x, block.y, block.z, launch_->shared_bytes);
    const auto range = simt::emulator::device_range();
    for (const simt::emulator::Argument& argument : launch_->arguments) {
        std::string bytes(static_cast<const char*>(argument.at), argument.bytes);
        for (std::size_t i = 0; i + sizeof(void*) <= bytes.size(); i += sizeof(void*)) {
            const void* pointer = nullptr;
            std::memcpy(&pointer, bytes.data() + i, sizeof pointer);
            if (range.contains(pointer)) {
                bytes.replace(i, sizeof pointer, sizeof pointer, '*');
            }
        }
        shape += bytes;
    }
    return shapes_[shape]++ >= kMost;
}

void SecondExecution::launch_begins(const simt::emulator::Launch& launch) {
    launch_ = nullptr;
    if (simt::emulator::runs_all_blocks()) {
        launch_ = &launch;
        if (is_known()) {
            launch_ = nullptr;
            return;
        }
        choose_allocations();
        save(before_);
    }
}

void SecondExecution::launch_ends(std::int64_t) {
    if (launch_ == nullptr) {
        return;
    }
    save(after_);
    for (std::size_t i = 0; i < libraries_.size(); ++i) {
        run_on(i);
    }
    restore(after_);
    launch_ = nullptr;
}

void SecondExecution::run_on(std::size_t library) {
    const Library& of = *libraries_[library];
    std::string name = launch_->kernel, wrong;
    bool failed = false;
    std::uint64_t instructions = 0;
    const auto start = std::chrono::steady_clock::now();
    try {
        name = short_name(kernel_name(launch_->entry));
        const Entry& entry = of.find(launch_->entry);
        if (library == 0) {
            reached_.insert(entry.mangled);
        }
        if (library > 0 && !other_code(library, libraries_[0]->find(launch_->entry))) {
            return;
        }
        if (launch_->cluster > 1) {
            refuse("a launch in clusters, which are not covered");
        }
        Launch launch;
        const auto& [grid, block] = std::pair{launch_->grid, launch_->block};
        launch.grid[0] = grid.x, launch.grid[1] = grid.y, launch.grid[2] = grid.z;
        launch.block[0] = block.x, launch.block[1] = block.y, launch.block[2] = block.z;
        launch.shared_bytes = launch_->shared_bytes;
        for (const simt::emulator::Argument& argument : launch_->arguments) {
            launch.arguments.push_back({argument.at, argument.bytes});
        }
        for (const Allocation& allocation : chosen_) {
            const auto begin = reinterpret_cast<std::uintptr_t>(allocation.at);
            launch.memory.push_back({begin, begin + allocation.bytes});
        }
        restore(before_);
        instructions = run(*entry.module, entry.module->kernel(entry.mangled), launch);
        wrong = difference();
    } catch (const Error& error) {
        failed = true;
        wrong = error.what();
    }
    Tally& tally = tallies_[{of.architecture(), name}];
    ++tally.launches;
    tally.different += !failed && !wrong.empty();
    tally.failed += failed;
    tally.instructions += instructions;
    tally.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!wrong.empty() && tally.first.empty()) {
        tally.first = fmt::format("{} ({} grid {},{},{} block {},{},{}): {}", name, launch_->kernel,
                                  launch_->grid.x, launch_->grid.y, launch_->grid.z,
                                  launch_->block.x, launch_->block.y, launch_->block.z, wrong);
    }
}

// Empty if memory holds what the emulator left there. NaN is NaN, whatever its other bits: the
// host's processor and a GPU make different ones.
std::string SecondExecution::difference() const {
    std::size_t words = 0;
    std::string first;
    for (std::size_t i = 0; i < chosen_.size(); ++i) {
        const auto [at, bytes] = chosen_[i];
        const std::byte* const expected = after_[i].data();
        if (std::memcmp(at, expected, bytes) == 0) {
            continue;
        }
        for (std::size_t k = 0; k < bytes; k += 4) {
            if (k + 4 > bytes) {  // a rest of less than a word
                words += std::memcmp(at + k, expected + k, bytes - k) != 0;
                break;
            }
            const std::uint32_t found = word_at(at + k), wanted = word_at(expected + k);
            const auto x = std::bit_cast<float>(found), y = std::bit_cast<float>(wanted);
            if (found == wanted || (std::isnan(x) && std::isnan(y))) {
                continue;
            }
            if (words++ == 0) {
                first = fmt::format(
                    "byte {} of {} in allocation {} of {}: {:#010x} ({:.9g}), by the emulator "
                    "{:#010x} ({:.9g})",
                    k, bytes, i + 1, chosen_.size(), found, x, wanted, y);
            }
        }
    }
    return words == 0 ? "" : fmt::format("{} words differ, first {}", words, first);
}

bool SecondExecution::other_code(std::size_t library, const Entry& first) const {
    const auto [found, is_new] = other_code_.try_emplace({library, first.mangled}, true);
    if (is_new) {
        const Entry* const other =
            libraries_[library]->find(demangled(first.mangled), first.module->name());
        found->second = other == nullptr ||
                        other->module->body(other->mangled) != first.module->body(first.mangled);
    }
    return found->second;
}

std::pair<std::size_t, std::size_t> SecondExecution::with_other_code(std::size_t library) const {
    std::size_t other = 0;
    const auto& entries = libraries_[0]->entries();
    for (const auto& [name, entry] : entries) {
        other += other_code(library, entry);
    }
    return {other, entries.size()};
}

Tally SecondExecution::total() const {
    Tally total;
    for (const auto& [of, tally] : tallies_) {
        total.launches += tally.launches;
        total.different += tally.different;
        total.failed += tally.failed;
        total.instructions += tally.instructions;
        total.seconds += tally.seconds;
        if (total.first.empty()) {
            total.first = tally.first;
        }
    }
    return total;
}

std::map<std::string, SecondExecution::Coverage> SecondExecution::coverage() const {
    std::map<std::string, Coverage> all;
    for (const auto& [name, entry] : libraries_[0]->entries()) {
        Coverage& kernel = all[entry.module->name() + ": " + short_name(name)];
        ++kernel.instances;
        if (!reached_.contains(entry.mangled)) {
            kernel.not_reached.push_back(name);
        }
    }
    return all;
}

}  // namespace gyre::ptx
