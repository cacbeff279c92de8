#include "data/tar.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/descriptor.hpp"
#include "base/error.hpp"
#include "data/decompress.hpp"
#include "data/pixels.hpp"

// As archive.h and archive_entry.h of libarchive 3 declare them.
struct archive;
struct archive_entry;

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

constexpr int kEnd = 1, kRetry = -10, kWarning = -20;  // results; 0: good
constexpr std::size_t kEndBytes = 1024;                // zeros, with which a tar file ends

std::string library_name() {
    const char* path = std::getenv("GYRE_ARCHIVE_LIBRARY");
    return path == nullptr || *path == '\0' ? "libarchive.so.13" : path;
}

class Library {
 public:
    // Throws input_error.
    Library() : handle_(dlopen(library_name().c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ == nullptr) {
            throw input_error(fmt::format(
                "tar files are read with libarchive, which could not be loaded: {}; install "
                "libarchive13, or unpack the tar files",
                dlerror()));
        }
        find("archive_read_new", read_new);
        find("archive_read_free", read_free);
        find("archive_read_support_format_tar", support_tar);
        find("archive_read_open_memory2", open_memory);
        find("archive_read_next_header", next_header);
        find("archive_read_data_block", read_block);
        find("archive_error_string", error_string);
        find("archive_entry_pathname", pathname);
        find("archive_entry_pathname_utf8", pathname_utf8);
        find("archive_entry_hardlink", hardlink);
        find("archive_entry_filetype", filetype);
        find("archive_entry_size", size);
    }

    archive* (*read_new)() = nullptr;
    int (*read_free)(archive*) = nullptr;
    int (*support_tar)(archive*) = nullptr;
    int (*open_memory)(archive*, const void*, std::size_t, std::size_t) = nullptr;
    int (*next_header)(archive*, archive_entry**) = nullptr;
    int (*read_block)(archive*, const void**, std::size_t*, std::int64_t*) = nullptr;
    const char* (*error_string)(archive*) = nullptr;
    const char* (*pathname)(archive_entry*) = nullptr;
    const char* (*pathname_utf8)(archive_entry*) = nullptr;
    const char* (*hardlink)(archive_entry*) = nullptr;
    mode_t (*filetype)(archive_entry*) = nullptr;
    std::int64_t (*size)(archive_entry*) = nullptr;

 private:
    template <class Function>
    void find(const char* name, Function*& function) {
        function = reinterpret_cast<Function*>(dlsym(handle_, name));
        if (function == nullptr) {
            throw input_error(fmt::format("{} lacks the function {}: install libarchive13",
                                          library_name(), name));
        }
    }

    void* const handle_;  // for good
};

const Library& library() {
    static const Library loaded;
    return loaded;
}

[[noreturn]] void refuse_tar(const fs::path& path, std::string_view what) {
    throw input_error(fmt::format("{}: {}", path.string(), what));
}

struct Mapped {
    std::shared_ptr<std::uint8_t> memory;
    std::size_t bytes = 0;
    std::string_view text() const { return {reinterpret_cast<const char*>(memory.get()), bytes}; }
};

Mapped map_tar(const fs::path& path) {
    const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status = {};
    if (!file.open() || fstat(file.fd(), &status) != 0) {
        refuse_tar(path, fmt::format("cannot read: {}", errno_text(errno)));
    }
    if (!S_ISREG(status.st_mode) || status.st_size == 0) {
        refuse_tar(path, "expected a tar file, found an empty file, or something that is none");
    }
    Mapped mapped{nullptr, static_cast<std::size_t>(status.st_size)};
    mapped.memory = map_file(file.fd(), path, 0, mapped.bytes, false);
    if (!mapped.memory) {
        refuse_tar(path, fmt::format("cannot read: {}", errno_text(errno)));
    }
    const std::string_view start = mapped.text().substr(0, 6);
    if (start.starts_with("\x1f\x8b") || start.starts_with("BZh") ||
        start.starts_with("\xfd"
                          "7zXZ") ||
        start.starts_with("\x28\xb5\x2f\xfd")) {
        refuse_tar(path,
                   "the tar file is compressed, so that its pictures cannot be read in any "
                   "order; decompress it (gunzip, bunzip2, unxz, unzstd)");
    }
    return mapped;
}

const char* error_of(archive* reader) {
    const char* const text = library().error_string(reader);
    return text == nullptr ? "no reason is known" : text;
}

// The bytes of the member that was found last.
std::string_view bytes_of(archive* reader, const Mapped& file, std::size_t bytes,
                          const fs::path& member) {
    const void* block = nullptr;
    std::size_t found = 0;
    std::int64_t at = 0;
    if (bytes == 0) {
        return {};
    }
    if (library().read_block(reader, &block, &found, &at) != 0) {
        refuse_tar(member, fmt::format("damaged: {}; copy the tar file again",
                                       library().error_string(reader)));
    }
    const std::string_view all = file.text();
    const auto* const begin = static_cast<const char*>(block);
    if (begin < all.data() || begin >= all.data() + all.size()) {
        refuse_tar(member, "its bytes are not in the tar file as they are; pack it again with tar");
    }
    const auto left = static_cast<std::size_t>(all.data() + all.size() - begin);
    if (at != 0 || found != bytes || bytes > left) {
        refuse_tar(member, left < bytes
                               ? "the tar file is cut off here; copy it again"
                               : "it is stored with holes; pack it without tar's option sparse");
    }
    return {begin, bytes};
}

}  // namespace

void visit_tar(const fs::path& path, const std::function<void(const TarMember&)>& visit) {
    const Mapped file = map_tar(path);
    const std::unique_ptr<archive, int (*)(archive*)> reader(library().read_new(),
                                                             library().read_free);
    std::string place = "at its begin";
    // Returns false at the end.
    const auto goes_on = [&](int result) {
        if (result == kRetry || result < kWarning) {
            refuse_tar(
                path, fmt::format("expected an intact tar file, found damage {}: {}; copy it again",
                                  place, error_of(reader.get())));
        }
        return result != kEnd;
    };
    goes_on(library().support_tar(reader.get()));
    goes_on(library().open_memory(reader.get(), file.memory.get(), file.bytes, file.bytes));
    for (archive_entry* entry = nullptr; goes_on(library().next_header(reader.get(), &entry));) {
        const char* name = library().pathname(entry);
        if (name == nullptr) {  // it cannot be written in this locale
            name = library().pathname_utf8(entry);
        }
        TarMember member{.name = name == nullptr ? "" : name};
        place = "behind " + member.name;
        const mode_t type = library().filetype(entry);
        member.is_link = library().hardlink(entry) != nullptr || S_ISLNK(type);
        if (!member.is_link && S_ISREG(type)) {
            const auto bytes =
                static_cast<std::size_t>(std::max<std::int64_t>(library().size(entry), 0));
            member.bytes = bytes_of(reader.get(), file, bytes, path / member.name);
            member.offset =
                bytes == 0 ? 0
                           : static_cast<std::uint64_t>(member.bytes.data() - file.text().data());
        }
        if (member.is_link || S_ISREG(type)) {
            visit(member);
        }
    }
    const std::string_view end = file.text().substr(file.bytes - std::min(file.bytes, kEndBytes));
    if (file.bytes < kEndBytes || end.find_first_not_of('\0') != std::string_view::npos) {
        refuse_tar(path,
                   fmt::format("the tar file is cut off {}: it lacks the zeros that end it; copy "
                               "it again",
                               place));
    }
}

bool tar_available() {
    try {
        library();
        return true;
    } catch (const Error&) {
        return false;
    }
}

}  // namespace gyre::data
