// Files that nobody but their owner may read.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <string_view>

#include "base/descriptor.hpp"

namespace gyre {

// Writes a file of mode 0600, which it has before the first byte; of an existing file both are
// replaced. Returns 0, or the errno of what failed.
inline int write_private(const std::filesystem::path& path, std::string_view bytes) {
    const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!file.open() || fchmod(file.fd(), 0600) != 0) {
        return errno;
    }
    while (!bytes.empty()) {
        const ssize_t written = ::write(file.fd(), bytes.data(), bytes.size());
        if (written < 0 && errno != EINTR) {
            return errno;
        }
        bytes.remove_prefix(written > 0 ? static_cast<std::size_t>(written) : 0);
    }
    return 0;
}

}  // namespace gyre
