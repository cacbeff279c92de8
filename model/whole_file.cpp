#include "model/whole_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/descriptor.hpp"
#include "base/error.hpp"

namespace gyre::model {
namespace {

// Opens a file, emptied, that no other process writes to until this one closes it; none: errno
// says why not.
Descriptor open_alone(const std::filesystem::path& path) {
    constexpr int kTries = 600;
    for (int i = 0; i < kTries; ++i) {
        Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
        if (!file.open()) {
            return {};
        }
        // If the file system has no locks, there is no waiting for others.
        const bool locked = flock(file.fd(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
        // Whoever had the lock may have renamed the file.
        struct stat own = {}, there = {};
        if (locked && fstat(file.fd(), &own) == 0 && stat(path.c_str(), &there) == 0 &&
            own.st_ino == there.st_ino && own.st_dev == there.st_dev) {
            if (own.st_nlink >
                1) {  // a killed job had given it its name: it is not a draft any more
                unlink(path.c_str());
                continue;
            }
            return ftruncate(file.fd(), 0) == 0 ? std::move(file) : Descriptor();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    errno = EBUSY;
    return {};
}

// Returns true if all was written; otherwise errno says why not.
bool append(int descriptor, const void* data, std::size_t bytes) {
    constexpr std::size_t kMost = std::size_t{1} << 20;
    // For tests that stop a job while it writes.
    static const char* const pause = std::getenv("GYRE_TEST_WRITE_PAUSE_MS");
    for (const char* at = static_cast<const char*>(data); bytes > 0;) {
        const ssize_t part = write(descriptor, at, std::min(bytes, kMost));
        if (part < 0 && errno == EINTR) {
            continue;
        }
        if (part <= 0) {
            return false;
        }
        at += part;
        bytes -= static_cast<std::size_t>(part);
        if (pause != nullptr) {
            std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(pause)));
        }
    }
    return true;
}

// A further name for a file, in the place of what has it.
bool name_too(const std::filesystem::path& file, const std::filesystem::path& name) {
    const std::filesystem::path link = name.string() + ".gyre.link";
    std::error_code error;
    std::filesystem::remove(link, error);
    std::filesystem::create_hard_link(file, link, error);
    if (error) {  // the file system has none
        std::filesystem::copy_file(file, link, error);
    }
    errno = error.value();
    return !error && std::rename(link.c_str(), name.c_str()) == 0;
}

// So that names are on the disk, too. Not every file system lets a folder be synchronised.
void synchronize_folder(const std::filesystem::path& folder) {
    const Descriptor opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (opened.open()) {
        fsync(opened.fd());
    }
}

}  // namespace

void write_whole_file(const std::vector<std::filesystem::path>& names,
                      const std::vector<std::string_view>& pieces, const char* what) {
    const std::filesystem::path& path = names.back();
    for (const std::filesystem::path& name : names) {
        struct stat there = {};
        if (stat(name.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
            throw input_error(fmt::format(
                "{}: {} cannot go there: that is not a regular file, and stays as it is; give the "
                "path of a file",
                name.string(), what));
        }
    }
    // Always the same name: what a killed job left there is written over.
    const std::filesystem::path aside = path.string() + ".gyre.tmp";
    Descriptor file = open_alone(aside);
    bool written = file.open();
    for (const std::string_view piece : pieces) {
        written = written && append(file.fd(), piece.data(), piece.size());
    }
    written = written && fsync(file.fd()) == 0;
    for (std::size_t i = 0; i + 1 < names.size(); ++i) {
        written = written && name_too(aside, names[i]);
    }
    // Closed only when it has its name, as others may write to it from then on.
    written = written && std::rename(aside.c_str(), path.c_str()) == 0;
    const int why = errno;
    if (!written) {
        if (file.open()) {
            unlink(aside.c_str());
        }
        throw input_error(
            fmt::format("{}: {} could not be written: {}; an earlier file of this name is "
                        "untouched",
                        path.string(), what, std::strerror(why)));
    }
    file.close();
    synchronize_folder(std::filesystem::absolute(path).parent_path());
}

std::optional<std::string> read_text(const std::filesystem::path& path, std::string& why,
                                     std::size_t most_mib) {
    const std::size_t most = most_mib << 20;
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::string text;
    std::vector<char> part(1 << 16);
    ssize_t bytes = file.open() ? 1 : -1;
    while (bytes > 0 && text.size() <= most) {
        do {
            bytes = read(file.fd(), part.data(), part.size());
        } while (bytes < 0 && errno == EINTR);
        text.append(part.data(), bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
    }
    why = bytes < 0 ? std::strerror(errno) : fmt::format("it has more than {} MiB", most_mib);
    if (bytes < 0 || text.size() > most) {
        return std::nullopt;
    }
    return text;
}

}  // namespace gyre::model
