// Reads sets of pictures, in folders or tar files: train, test and perhaps val.
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "data/decompress.hpp"
#include "data/formats.hpp"
#include "data/image_cache.hpp"
#include "data/listing.hpp"
#include "data/picture.hpp"
#include "data/resize.hpp"

namespace gyre::data {
namespace {

namespace fs = std::filesystem;

// FNV-1a.
class Key {
 public:
    void add(std::string_view text) {
        for (const char c : text) {
            value_ = (value_ ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
        }
    }
    std::uint64_t value() const { return value_; }

 private:
    std::uint64_t value_ = 0xcbf29ce484222325u;
};

std::string size_text(const DataSpec& spec) {
    return spec.resize ? resize_text(*spec.resize) : "as they are";
}

// Hashes everything that determines the decoded images.
std::uint64_t key_of(const std::vector<PictureFile>& files, const fs::path& directory,
                     const DataSpec& spec) {
    Key key;
    key.add(size_text(spec));
    const std::string* last = nullptr;  // of many pictures, perhaps
    for (const PictureFile& picture : files) {
        const std::string& file = picture.file;
        if (last == nullptr || *last != file) {
            struct stat status = {};
            if (stat(file.c_str(), &status) != 0) {
                throw input_error(fmt::format("{}: cannot read: {}", file, errno_text(errno)));
            }
            key.add(fmt::format("\n{} {} {}.{}",
                                fs::path(file).lexically_relative(directory).string(),
                                status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec));
            last = &file;
        }
        if (!picture.member.empty()) {
            key.add(fmt::format("\n{} {} {}", picture.member, picture.offset, picture.bytes));
        }
    }
    return key.value();
}

// Calls body(i) for 0 ... count - 1 on several threads until one call throws or returns false. If
// calls throw, rethrows the exception of the lowest index. Calls `tick` on this thread with the
// number of calls done.
bool for_each(std::int64_t count, const std::function<bool(std::int64_t)>& body,
              const std::function<void(std::int64_t)>& tick) {
    std::atomic<std::int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable ended;
    std::int64_t failed = std::numeric_limits<std::int64_t>::max();
    std::exception_ptr failure;
    unsigned running = std::clamp(std::thread::hardware_concurrency(), 1u,
                                  static_cast<unsigned>(std::min<std::int64_t>(count, 256)));
    std::vector<std::thread> threads;
    const auto work = [&] {
        for (std::int64_t i = next++; i < count; i = next++) {
            bool good = false;
            std::exception_ptr thrown;
            try {
                good = body(i);
            } catch (...) {
                thrown = std::current_exception();
            }
            ++done;
            if (!good) {
                next = count;
                const std::lock_guard lock(mutex);
                if (i < failed) {
                    failed = i;
                    failure = thrown;
                }
            }
        }
        const std::lock_guard lock(mutex);
        --running;
        ended.notify_one();
    };
    const unsigned wanted = running;
    for (unsigned i = 0; i < wanted; ++i) {
        threads.emplace_back(work);
    }
    std::unique_lock lock(mutex);
    while (running > 0) {
        ended.wait_for(lock, std::chrono::milliseconds(200));
        lock.unlock();
        tick(done);
        lock.lock();
    }
    lock.unlock();
    for (std::thread& thread : threads) {
        thread.join();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
    return failed > count;
}

class PictureDecoder {
 public:
    PictureDecoder(std::string name, const std::vector<PictureFile>& files, const DataSpec& spec)
        : name_(std::move(name)),
          files_(files),
          resize_(spec.resize),
          may_leave_out_(static_cast<std::size_t>(spec.skip_bad)) {}

    // Returns the shape of the first picture that can be read, with 3 channels if a later one
    // turned out coloured.
    DecodedImages shape() {
        bad_.clear();
        std::optional<Picture> first;
        for (first_ = 0; !first; ++first_) {
            first = read(first_);
        }
        --first_;
        colour_ = first->channels == 3;
        height_ = first->height;
        width_ = first->width;
        const Resize size = resize_.value_or(Resize{height_, width_});
        return {first->channels, size.height, size.width, {}};
    }

    bool decode(DecodedImages& shape, std::uint8_t* pixels, const ImageCache::Progress& progress) {
        const auto count = static_cast<std::int64_t>(files_.size());
        const auto tick = [&](std::int64_t done) {
            progress(fmt::format("{}: {} of {} pictures decoded", name_, done, count));
        };
        const Clock::time_point begin = Clock::now();
        const bool good = for_each(
            count,
            [&](std::int64_t i) { return decode_one(shape, static_cast<std::size_t>(i), pixels); },
            tick);
        colour_ = colour_ || !good;
        seconds_ += seconds_since(begin);
        for (const auto& [i, what] : bad_) {
            shape.left_out.push_back(static_cast<std::int64_t>(i));
        }
        return good;
    }

    double seconds() const { return seconds_; }  // that decode() has taken

 private:
    // Returns none if the picture cannot be read and may be left out.
    std::optional<Picture> read(std::size_t i) {
        try {
            return decode_picture(files_[i], colour_);
        } catch (const Error& error) {
            const std::lock_guard lock(mutex_);
            bad_.emplace(i, error.what());
            if (may_leave_out_ == 0) {
                throw;
            }
            if (bad_.size() > may_leave_out_ || bad_.size() == files_.size()) {
                throw input_error(
                    fmt::format("{}: {} pictures of {} cannot be read, and `skip-bad` {} allows no "
                                "more; one of "
                                "them: {}",
                                name_, bad_.size(), files_.size(), may_leave_out_, error.what()));
            }
        }
        return std::nullopt;
    }

    bool decode_one(const DecodedImages& shape, std::size_t i, std::uint8_t* pixels) {
        std::optional<Picture> read_picture = read(i);
        if (!read_picture) {
            return true;
        }
        Picture& picture = *read_picture;
        if (picture.channels != shape.channels) {
            return false;
        }
        if (resize_) {
            picture.pixels = resize_image(picture.pixels.data(), picture.channels, picture.height,
                                          picture.width, *resize_);
        } else if (picture.height != height_ || picture.width != width_) {
            throw input_error(fmt::format(
                "pictures differ in size: {} has {}x{} (height x width), {} has {}x{}; give all of "
                "them one size with `resize`, such as {}x{}",
                files_[i].name(), picture.height, picture.width, files_[first_].name(), height_,
                width_, height_, width_));
        }
        const auto channels = static_cast<std::size_t>(shape.channels);
        const std::size_t plane = picture.pixels.size() / channels;
        std::uint8_t* to = pixels + i * picture.pixels.size();
        for (std::size_t c = 0; c < channels; ++c) {
            for (std::size_t at = 0; at < plane; ++at) {
                *to++ = picture.pixels[at * channels + c];
            }
        }
        return true;
    }

    const std::string name_;
    const std::vector<PictureFile>& files_;
    const std::optional<Resize> resize_;
    const std::size_t may_leave_out_;
    bool colour_ = false;
    double seconds_ = 0.0;
    int height_ = 0, width_ = 0;
    std::size_t first_ = 0;  // the picture that these are of
    std::mutex mutex_;
    std::map<std::size_t, std::string> bad_;  // guarded by mutex_: what is wrong with a picture
};

// Removes the labels of images that were left out of images [first, first + labels.size()).
void leave_out(const std::vector<std::int64_t>& left_out, std::size_t first,
               std::vector<std::int32_t>& labels) {
    for (auto number = left_out.rbegin(); number != left_out.rend(); ++number) {
        const auto at = static_cast<std::size_t>(*number);
        if (at >= first && at - first < labels.size()) {
            labels.erase(labels.begin() + static_cast<std::ptrdiff_t>(at - first));
        }
    }
}

std::string names_of(const std::vector<std::int64_t>& numbers,
                     const std::vector<PictureFile>& files) {
    std::string names;
    for (const std::int64_t number : numbers) {
        names += fmt::format("{}{}", names.empty() ? "" : ", ",
                             files[static_cast<std::size_t>(number)].name());
    }
    return names;
}

// Returns images [first, first + labels.size()) of `all`.
ImageSet part_of(const DecodedImages& all, std::size_t first, std::vector<std::int32_t> labels,
                 const fs::path& directory) {
    ImageSet set;
    set.count = static_cast<std::int64_t>(labels.size());
    set.channels = all.channels;
    set.height = all.height;
    set.width = all.width;
    set.labels = std::move(labels);
    const std::size_t image_bytes = static_cast<std::size_t>(set.channels) *
                                    static_cast<std::size_t>(set.height) *
                                    static_cast<std::size_t>(set.width);
    set.pixels = all.pixels.part(first * image_bytes, set.labels.size() * image_bytes);
    set.images_path = set.labels_path = directory.string();
    return set;
}

}  // namespace

Dataset load_pictures(const DatasetFiles& files, const DataSpec& spec, const TellOfData& tell) {
    const PicturePlace train = find_pictures(files.directory, "train")
                                   .value_or(PicturePlace{"train", files.directory / "train", {}});
    auto test = find_pictures(files.directory, "test");
    auto validation = find_pictures(files.directory, "val");
    if (!test) {
        test.swap(validation);
    }
    if (!test) {
        throw input_error(fmt::format(
            "{}: has pictures to train with, but none in test or val next to them; expected "
            "test/CLASS/ for the same classes, or a tar file: move some of each class's pictures "
            "there",
            files.directory.string()));
    }
    PictureListing of_train = list_pictures(train, nullptr, spec.classes);
    PictureListing of_test = list_pictures(*test, &of_train, spec.classes), of_validation;
    if (validation) {
        of_validation = list_pictures(*validation, &of_train, spec.classes);
    }
    const std::size_t train_files = of_train.files.size(), test_files = of_test.files.size();
    std::vector<PictureFile> all = std::move(of_train.files);
    all.insert(all.end(), of_test.files.begin(), of_test.files.end());
    all.insert(all.end(), of_validation.files.begin(), of_validation.files.end());
    if (all.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
        throw input_error(fmt::format("{}: more than 2^31 - 1 pictures", files.directory.string()));
    }

    std::error_code error;
    Key place;  // a folder has one cache file for each size
    place.add(fs::weakly_canonical(files.directory, error).string());
    place.add(size_text(spec));
    ImageCache cache(fmt::format("{}-{:016x}.images", files.name, place.value()),
                     key_of(all, files.directory, spec), tell);
    PictureDecoder decoder(files.name, all, spec);
    const DecodedImages images = cache.load(
        {.images = static_cast<std::int64_t>(all.size()),
         .may_leave_out = spec.skip_bad,
         .shape = [&] { return decoder.shape(); },
         .decode = [&](auto& shape, std::uint8_t* pixels,
                       const auto& progress) { return decoder.decode(shape, pixels, progress); }});
    if (decoder.seconds() > 2.0 && tell) {  // some progress was told, but not its end
        tell(fmt::format("{}: all {} pictures decoded in {:.0f} s", files.name, all.size(),
                         decoder.seconds()));
    }
    if (!images.left_out.empty() && tell) {
        tell(fmt::format("{}: {} of {} pictures cannot be read and are left out: {}", files.name,
                         images.left_out.size(), all.size(), names_of(images.left_out, all)));
    }
    leave_out(images.left_out, 0, of_train.labels);
    leave_out(images.left_out, train_files, of_test.labels);
    leave_out(images.left_out, train_files + test_files, of_validation.labels);
    const std::size_t train_count = of_train.labels.size(), test_count = of_test.labels.size();
    Dataset set;
    set.class_names = of_train.classes;
    set.train = part_of(images, 0, std::move(of_train.labels), train.path());
    set.test = part_of(images, train_count, std::move(of_test.labels), test->path());
    if (!of_validation.files.empty()) {
        set.validation = part_of(images, train_count + test_count, std::move(of_validation.labels),
                                 validation->path());
    }
    return set;
}

}  // namespace gyre::data
