// Decoded images in a file that later runs, and other processes of this host, map into memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "data/pixels.hpp"

namespace gyre::data {

struct DecodedImages {
    int channels = 0, height = 0, width = 0;
    Pixels pixels;
};

// Where the files are: $XDG_CACHE_HOME/gyre or $HOME/.cache/gyre; empty where neither is set.
std::filesystem::path cache_folder();

class ImageCache {
 public:
    // name: of the file; each holds the images of one `key`, the latest. tell: may be empty.
    using Tell = std::function<void(const std::string&)>;
    ImageCache(std::string name, std::uint64_t key, Tell tell);

    // What decodes the images where they are not found. `progress` is to be called several times a
    // second, with a line for the user: a process that is silent for 10 s is taken to be stuck.
    using Progress = std::function<void(const std::string&)>;
    struct Decoder {
        // The shape of all `images` of them.
        std::int64_t images = 0;
        std::function<DecodedImages()> shape;
        // False: the shape was wrong, and is asked for again.
        std::function<bool(const DecodedImages& shape, std::uint8_t* pixels, const Progress&)>
            decode;
    };
    // From the file, or decoded and written there. One process of several that come at once
    // decodes; the others wait for it as long as it makes progress. A file that cannot be written
    // is a remark. Throws what the decoder throws.
    DecodedImages load(const Decoder& decoder);

 private:
    DecodedImages open_file() const;
    DecodedImages decode(const Decoder& decoder, const Progress& progress);
    std::optional<DecodedImages> decode_to_file(DecodedImages shape, std::size_t bytes,
                                                const Decoder& decoder, const Progress& progress);
    void say(const std::string& text) const;

    const std::filesystem::path file_;  // empty: none
    const std::uint64_t key_;
    const Tell tell_;
};

}  // namespace gyre::data
