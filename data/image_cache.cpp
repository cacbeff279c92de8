#include "data/image_cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <optional>
#include <system_error>
#include <thread>

#include "base/clock.hpp"
#include "base/descriptor.hpp"
#include "data/decompress.hpp"
#include "data/hash.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[16] = "gyre images 3\n";
constexpr std::size_t kHeaderBytes = 4096;  // one page, so that pixels begin on a page boundary

struct Header {
    char magic[16] = {};
    std::uint64_t key = 0;
    std::int64_t images = 0;  // that are there
    std::int32_t channels = 0, height = 0, width = 0;
    std::int32_t left_out = 0;  // so many numbers follow the header
    std::uint64_t hash = 0;     // of all fields above, these numbers, and the pixels
};
static_assert(sizeof(Header) + ImageCache::kMostLeftOut * sizeof(std::int64_t) <= kHeaderBytes);

std::uint64_t hash_of(const Header& header, const DecodedImages& images, const std::uint8_t* pixels,
                      std::size_t bytes) {
    Hash hash;
    hash.add(&header, offsetof(Header, hash));
    if (!images.left_out.empty()) {
        hash.add(images.left_out.data(), images.left_out.size() * sizeof(std::int64_t));
    }
    hash.add(pixels, bytes);
    return hash.value();
}

std::size_t bytes_of(const DecodedImages& shape, std::int64_t images) {
    return static_cast<std::size_t>(images) * static_cast<std::size_t>(shape.channels) *
           static_cast<std::size_t>(shape.height) * static_cast<std::size_t>(shape.width);
}

// Moves the images of [images] pixels together where some are left out; returns their bytes.
std::size_t close_gaps(const DecodedImages& shape, std::int64_t images, std::uint8_t* pixels) {
    const std::size_t image_bytes = bytes_of(shape, 1);
    const auto gap_count = static_cast<std::int64_t>(shape.left_out.size());
    for (std::int64_t gap = 0; gap < gap_count; ++gap) {
        const auto at = static_cast<std::size_t>(gap);
        const std::int64_t first = shape.left_out[at] + 1;
        const std::int64_t end = gap + 1 < gap_count ? shape.left_out[at + 1] : images;
        std::memmove(pixels + bytes_of(shape, first - 1 - gap), pixels + bytes_of(shape, first),
                     static_cast<std::size_t>(end - first) * image_bytes);
    }
    return bytes_of(shape, images - gap_count);
}

bool ascending(const std::vector<std::int64_t>& numbers, std::int64_t end) {
    return std::adjacent_find(numbers.begin(), numbers.end(), std::greater_equal<>()) ==
               numbers.end() &&
           (numbers.empty() || (numbers.front() >= 0 && numbers.back() < end));
}

// A new file next to the final one; it is removed again unless it is moved to the final place.
class NewFile {
 public:
    explicit NewFile(const fs::path& place)
        : place_(place), name_(place.string() + ".new-XXXXXX"), file_(mkstemp(name_.data())) {}
    ~NewFile() {
        if (file_.open() && !moved_) {
            unlink(name_.c_str());
        }
    }
    const Descriptor& file() const { return file_; }
    bool move_to_place() {
        moved_ = fsync(file_.fd()) == 0 && rename(name_.c_str(), place_.c_str()) == 0;
        return moved_;
    }

 private:
    const fs::path place_;
    std::string name_;
    const Descriptor file_;
    bool moved_ = false;
};

// Removes files left by processes that were killed.
void remove_leftovers(const fs::path& place) {
    const std::string start = place.filename().string() + ".new-";
    std::error_code error;
    for (fs::directory_iterator it(place.parent_path(), error), end; !error && it != end;
         it.increment(error)) {
        std::error_code ignored;
        if (it->path().filename().string().starts_with(start)) {
            fs::remove(it->path(), ignored);
        }
    }
}

const char* variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

// The process that decodes holds this lock. If the file system has no locks, nobody waits.
class Lock {
 public:
    Lock(const fs::path& path, const ImageCache::Tell& tell)
        : file_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
        constexpr double most_silent_seconds = 10.0;
        Clock::time_point changed = Clock::now(), told = changed;
        std::string text;
        while (file_.open() && flock(file_.fd(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            const std::string now = read_text();
            if (now != text) {
                text = now;
                changed = Clock::now();
            } else if (seconds_since(changed) > most_silent_seconds) {
                return;
            }
            if (tell && seconds_since(told) > 5.0) {
                told = Clock::now();
                tell(text.substr(text.find(' ') + 1));
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
    }

    // Shows progress to the processes that wait: any new text counts as progress.
    void write_text(const std::string& text) {
        char line[256] = {};
        fmt::format_to_n(line, sizeof line - 1, "{} {}", ++count_, text);
        if (file_.open() && pwrite(file_.fd(), line, sizeof line, 0) < 0) {
            return;  // then the others do not wait
        }
    }

 private:
    std::string read_text() const {
        char line[257] = {};
        return pread(file_.fd(), line, sizeof line - 1, 0) < 0 ? "" : line;
    }

    const Descriptor file_;
    std::int64_t count_ = getpid() * std::int64_t{1000000};
};

}  // namespace

fs::path cache_folder() {
    const fs::path cache = variable("XDG_CACHE_HOME"), home = variable("HOME");
    return cache.is_absolute() ? cache / "gyre" : home.empty() ? "" : home / ".cache" / "gyre";
}

ImageCache::ImageCache(const std::string& name, std::uint64_t key, Tell tell)
    : file_(cache_folder().empty() ? fs::path() : cache_folder() / name),
      key_(key),
      tell_(std::move(tell)) {}

void ImageCache::say(const std::string& text) const {
    if (tell_) {
        tell_(text);
    }
}

// Returns no pixels if the file is missing, has another key or is damaged; damage is reported if
// `tell_damage` is set.
DecodedImages ImageCache::open_file(const Decoder& decoder, bool tell_damage) const {
    const Descriptor file(open(file_.c_str(), O_RDONLY | O_CLOEXEC));
    Header header;
    struct stat status = {};
    if (!file.open() || pread(file.fd(), &header, sizeof header, 0) != sizeof header ||
        std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.key != key_) {
        return {};
    }
    // The pixels must have the size that the extents imply and the hash that was written with them.
    DecodedImages found{header.channels, header.height, header.width, {}};
    found.left_out.resize(header.left_out >= 0 && header.left_out <= kMostLeftOut
                              ? static_cast<std::size_t>(header.left_out)
                              : 0);
    const std::size_t list_bytes = found.left_out.size() * sizeof(std::int64_t);
    const std::int64_t images = decoder.images - header.left_out;
    if (header.images == images && fstat(file.fd(), &status) == 0 &&
        status.st_size > static_cast<off_t>(kHeaderBytes) &&
        (list_bytes == 0 || pread(file.fd(), found.left_out.data(), list_bytes, sizeof header) ==
                                static_cast<ssize_t>(list_bytes))) {
        const auto bytes = static_cast<std::size_t>(status.st_size) - kHeaderBytes;
        auto memory = map_file(file.fd(), file_, kHeaderBytes, bytes, false);
        if (memory && hash_of(header, found, memory.get(), bytes) == header.hash &&
            bytes == bytes_of(found, images) && ascending(found.left_out, decoder.images)) {
            if (header.left_out > decoder.may_leave_out) {
                return {};  // the decoder says what is wrong with these images
            }
            found.pixels = Pixels(std::move(memory), bytes);
            return found;
        }
    }
    if (tell_damage) {
        say(fmt::format("{}: this file is damaged; the pictures are decoded again",
                        file_.string()));
    }
    return {};
}

// Returns nothing if the file cannot be written, and no pixels if the shape was wrong.
std::optional<DecodedImages> ImageCache::decode_to_file(DecodedImages shape, std::size_t bytes,
                                                        const Decoder& decoder,
                                                        const Progress& progress) {
    NewFile to(file_);
    // Space is reserved first: otherwise a full disk would cause a signal later.
    const int error = !to.file().open() ? errno
                                        : posix_fallocate(to.file().fd(), 0,
                                                          static_cast<off_t>(kHeaderBytes + bytes));
    std::shared_ptr<std::uint8_t> memory;
    if (error == 0) {
        memory = map_file(to.file().fd(), file_, kHeaderBytes, bytes, true);
    }
    if (!memory) {
        say(fmt::format(
            "{}: cannot keep the decoded pictures there: {}; every run, and every "
            "rank, decodes them again; set XDG_CACHE_HOME to a folder with {} MB",
            file_.string(), errno_text(error != 0 ? error : errno), bytes / 1000000 + 1));
        return std::nullopt;
    }
    if (!decoder.decode(shape, memory.get(), progress)) {
        return DecodedImages{};
    }
    bytes = close_gaps(shape, decoder.images, memory.get());
    Header header{.key = key_,
                  .images = decoder.images - static_cast<std::int64_t>(shape.left_out.size()),
                  .channels = shape.channels,
                  .height = shape.height,
                  .width = shape.width,
                  .left_out = static_cast<std::int32_t>(shape.left_out.size())};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    auto moved = std::async(std::launch::async, [&] {
        header.hash = hash_of(header, shape, memory.get(), bytes);
        std::uint8_t* const page = memory.get() - kHeaderBytes;
        std::memcpy(page, &header, sizeof header);
        std::copy(shape.left_out.begin(), shape.left_out.end(),
                  reinterpret_cast<std::int64_t*>(page + sizeof header));
        return ftruncate(to.file().fd(), static_cast<off_t>(kHeaderBytes + bytes)) == 0 &&
               to.move_to_place();
    });
    while (moved.wait_for(std::chrono::milliseconds(200)) != std::future_status::ready) {
        progress(fmt::format("writing {}", file_.string()));
    }
    if (!moved.get()) {
        say(fmt::format("{}: cannot write: {}; the next run decodes the pictures again",
                        file_.string(), errno_text(errno)));
    }
    shape.pixels = Pixels(std::move(memory), bytes);
    return shape;
}

DecodedImages ImageCache::decode(const Decoder& decoder, const Progress& progress) {
    for (bool to_file = !file_.empty();;) {
        DecodedImages images = decoder.shape();
        const std::size_t bytes = bytes_of(images, decoder.images);
        if (to_file) {
            auto done = decode_to_file(images, bytes, decoder, progress);
            if (done && done->pixels.size() != 0) {
                return std::move(*done);
            }
            to_file = done.has_value();
            continue;
        }
        std::vector<std::uint8_t> pixels(bytes);
        if (decoder.decode(images, pixels.data(), progress)) {
            pixels.resize(close_gaps(images, decoder.images, pixels.data()));
            images.pixels = std::move(pixels);
            return images;
        }
    }
}

DecodedImages ImageCache::load(const Decoder& decoder) {
    Clock::time_point told = Clock::now();
    const auto report = [&](const std::string& text) {
        if (seconds_since(told) > 2.0) {
            told = Clock::now();
            say(text);
        }
    };
    if (file_.empty()) {
        say("neither XDG_CACHE_HOME nor HOME is set: pictures are decoded again in every run");
        return decode(decoder, report);
    }
    std::error_code error;
    fs::create_directories(file_.parent_path(), error);
    DecodedImages found = open_file(decoder, false);
    if (found.pixels.size() != 0) {
        return found;
    }
    Lock lock(file_.string() + ".lock", tell_);
    found = open_file(decoder, true);  // another process may have written it
    if (found.pixels.size() != 0) {
        return found;
    }
    remove_leftovers(file_);
    return decode(decoder, [&](const std::string& text) {
        lock.write_text(text);
        report(text);
    });
}

}  // namespace gyre::data
