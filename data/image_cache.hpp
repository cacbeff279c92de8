// Keeps decoded images in a file that later runs and other processes on this host map into memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/pixels.hpp"

namespace gyre::data {

struct DecodedImages {
    int channels = 0, height = 0, width = 0;
    Pixels pixels;
    std::vector<std::int64_t> left_out = {};  // numbers of the images that are missing, ascending
};

// Returns the folder of the files: $XDG_CACHE_HOME/gyre or $HOME/.cache/gyre; empty if neither
// variable is set.
std::filesystem::path cache_folder();

class ImageCache {
 public:
    // name: the file's name; a file holds only the images of the latest `key`. tell: may be empty.
    using Tell = std::function<void(const std::string&)>;
    ImageCache(const std::string& name, std::uint64_t key, Tell tell);

    // Decodes the images if they are not found. It must call `progress` several times a second,
    // with a line for the user: a process that is silent for 10 s is considered stuck.
    using Progress = std::function<void(const std::string&)>;
    struct Decoder {
        // The number of images, how many of them may be left out, up to kMostLeftOut, and the shape
        // that they all have.
        std::int64_t images = 0, may_leave_out = 0;
        std::function<DecodedImages()> shape;
        // Writes image i to place i, and says which images it has left out. Returns false if the
        // shape was wrong; shape() is then called again.
        std::function<bool(DecodedImages& shape, std::uint8_t* pixels, const Progress&)> decode;
    };
    static constexpr std::int64_t kMostLeftOut =
        500;  // of which a file's first page has the numbers
    // Returns the images from the file, or decodes them and writes them there. If several processes
    // come at once, one decodes and the others wait for it as long as it makes progress. A file
    // that cannot be written is only reported to `tell`. Throws what the decoder throws.
    DecodedImages load(const Decoder& decoder);

 private:
    DecodedImages open_file(const Decoder& decoder, bool tell_damage) const;
    DecodedImages decode(const Decoder& decoder, const Progress& progress);
    std::optional<DecodedImages> decode_to_file(DecodedImages shape, std::size_t bytes,
                                                const Decoder& decoder, const Progress& progress);
    void say(const std::string& text) const;

    const std::filesystem::path file_;  // empty: none
    const std::uint64_t key_;
    const Tell tell_;
};

}  // namespace gyre::data
