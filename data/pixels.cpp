#include "data/pixels.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <string_view>

#include "base/descriptor.hpp"
#include "base/error.hpp"
#include "data/decompress.hpp"

namespace gyre::data {
namespace {

// A mapped file, for the handler of SIGBUS.
struct Mapping {
    std::atomic<std::uintptr_t> begin{0};  // 0: none
    std::size_t bytes = 0;
    std::string_view message = {};  // in `text`
    std::array<char, PATH_MAX + 256> text = {};
};
constexpr std::uintptr_t kTaken = 1;  // an entry that is not complete yet
std::array<Mapping, 16> mappings;     // any further ones are not named
struct sigaction without_handler = {};

// Called for a page of memory that its file does not have any more, or cannot deliver.
extern "C" void handle_lost_page(int, siginfo_t* info, void*) {
    const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
    for (const Mapping& mapping : mappings) {
        const std::uintptr_t begin = mapping.begin;
        if (begin <= kTaken || at < begin || at - begin >= mapping.bytes) {
            continue;
        }
        // At once, so that it is not mixed with other ranks' messages.
        [[maybe_unused]] const ssize_t written =
            write(STDERR_FILENO, mapping.message.data(), mapping.message.size());
        _exit(static_cast<int>(ExitCode::bad_input));
    }
    sigaction(SIGBUS, &without_handler, nullptr);  // and the access is tried again
}

void install_handler() {
    [[maybe_unused]] static const bool installed = [] {
        struct sigaction action = {};
        action.sa_sigaction = handle_lost_page;
        action.sa_flags = SA_SIGINFO;
        return sigaction(SIGBUS, &action, &without_handler) == 0;
    }();
}

// The entry for a new mapping; null: there are too many.
Mapping* enter(const std::filesystem::path& path, std::uintptr_t begin, std::size_t bytes) {
    install_handler();
    for (Mapping& mapping : mappings) {
        std::uintptr_t free = 0;
        if (mapping.begin.compare_exchange_strong(free, kTaken)) {
            mapping.bytes = bytes;
            const auto end = fmt::format_to_n(
                mapping.text.data(), mapping.text.size(),
                "gyre: {}: the file was truncated, or its disk failed, while it was mapped into "
                "memory; start again with the whole file (a cache of decoded pictures is made "
                "again)\n",
                path.string());
            mapping.message = {mapping.text.data(), end.out};
            mapping.begin = begin;
            return &mapping;
        }
    }
    return nullptr;
}

}  // namespace

std::uint8_t* Pixels::writable() {
    if (shared_) {
        own_.assign(begin(), end());
        shared_.reset();
    }
    return own_.data();
}

void Pixels::resize(std::size_t bytes) {
    if (!shared_ || bytes > bytes_) {
        writable();
        own_.resize(bytes);
        own_.shrink_to_fit();
    }
    bytes_ = bytes;
}

Pixels Pixels::part(std::size_t first, std::size_t bytes) const {
    if (shared_) {
        return {std::shared_ptr<const std::uint8_t>(shared_, shared_.get() + first), bytes};
    }
    return std::vector<std::uint8_t>(data() + first, data() + first + bytes);
}

std::shared_ptr<std::uint8_t> map_file(int file, const std::filesystem::path& path,
                                       std::size_t offset, std::size_t bytes, bool writable) {
    const std::size_t all = offset + bytes;
    void* memory =
        mmap(nullptr, all, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    Mapping* const entry = enter(path, reinterpret_cast<std::uintptr_t>(memory), all);
    const std::shared_ptr<void> mapping(memory, [all, entry](void* at) {
        if (entry != nullptr) {
            entry->begin = 0;
        }
        munmap(at, all);
    });
    return {mapping, static_cast<std::uint8_t*>(memory) + offset};
}

Pixels map_pixels(const std::filesystem::path& path, std::size_t offset, std::size_t bytes) {
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::shared_ptr<std::uint8_t> memory;
    if (file.open()) {
        memory = map_file(file.fd(), path, offset, bytes, false);
    }
    if (!memory) {
        throw input_error(
            fmt::format("{}: cannot map it into memory: {}", path.string(), errno_text(errno)));
    }
    return {std::move(memory), bytes};
}

}  // namespace gyre::data
