#include "data/pixels.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "data/decompress.hpp"

namespace gyre::data {
namespace {

// A mapped file, for the handler of SIGBUS.
struct Mapping {
    std::atomic<std::uintptr_t> begin{0};  // 0: none
    std::size_t bytes = 0;
    std::array<char, PATH_MAX> path = {};
};
std::array<Mapping, 16> mappings;  // any further ones are not named
struct sigaction without_handler = {};

// Called for a page of memory that its file does not have any more, or cannot deliver.
extern "C" void handle_lost_page(int, siginfo_t* info, void*) {
    const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
    for (const Mapping& mapping : mappings) {
        const std::uintptr_t begin = mapping.begin;
        if (begin == 0 || at < begin || at - begin >= mapping.bytes) {
            continue;
        }
        std::array<char*, 3> texts = {
            const_cast<char*>("gyre: "), const_cast<char*>(mapping.path.data()),
            const_cast<char*>(
                ": the file was truncated, or its disk failed, while it was mapped into memory; "
                "start again with the whole file (a cache of decoded pictures is made again)\n")};
        std::array<iovec, 3> parts{};
        for (std::size_t i = 0; i < parts.size(); ++i) {
            parts[i] = {texts[i], std::strlen(texts[i])};
        }
        // At once, so that it is not mixed with other ranks' messages.
        [[maybe_unused]] const ssize_t written = writev(STDERR_FILENO, parts.data(), parts.size());
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
Mapping* enter(int file, std::uintptr_t begin, std::size_t bytes) {
    install_handler();
    for (Mapping& mapping : mappings) {
        if (mapping.bytes == 0) {
            mapping.bytes = bytes;
            const std::string link = fmt::format("/proc/self/fd/{}", file);
            mapping.path.fill('\0');
            if (readlink(link.c_str(), mapping.path.data(), mapping.path.size() - 1) < 0) {
                std::strcpy(mapping.path.data(), "a data file");
            }
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

std::shared_ptr<std::uint8_t> map_file(int file, std::size_t offset, std::size_t bytes,
                                       bool writable) {
    const std::size_t all = offset + bytes;
    void* memory =
        mmap(nullptr, all, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        return nullptr;
    }
    Mapping* const entry = enter(file, reinterpret_cast<std::uintptr_t>(memory), all);
    const std::shared_ptr<void> mapping(memory, [all, entry](void* at) {
        if (entry != nullptr) {
            entry->begin = 0;
            entry->bytes = 0;
        }
        munmap(at, all);
    });
    return {mapping, static_cast<std::uint8_t*>(memory) + offset};
}

Pixels map_pixels(const std::filesystem::path& path, std::size_t offset, std::size_t bytes) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    std::shared_ptr<std::uint8_t> memory;
    if (file >= 0) {
        memory = map_file(file, offset, bytes, false);
    }
    const int error = errno;
    if (file >= 0) {
        close(file);
    }
    if (!memory) {
        throw input_error(
            fmt::format("{}: cannot map it into memory: {}", path.string(), errno_text(error)));
    }
    return {std::move(memory), bytes};
}

}  // namespace gyre::data
