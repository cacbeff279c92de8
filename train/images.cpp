#include "train/images.hpp"

#include <random>
#include <utility>
#include <vector>

namespace gyre::train {

ImageSet random_images(std::int64_t count, const Shape& shape, int classes) {
    ImageSet set;
    set.count = count;
    set.channels = shape.channels;
    set.height = shape.height;
    set.width = shape.width;
    std::mt19937 random(1);
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(count * shape.elems()));
    for (std::uint8_t& pixel : pixels) {
        pixel = static_cast<std::uint8_t>(random());
    }
    set.pixels = std::move(pixels);
    for (std::int64_t i = 0; i < count; ++i) {
        set.labels.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(classes)));
    }
    return set;
}

DeviceImages::DeviceImages(Backend& backend, ImageSet&& set, const Normalisation& normalisation)
    : backend_(backend),
      count_(set.count),
      shape_{set.channels, set.height, set.width},
      labels_(backend, set.count),
      scale_(backend, set.channels),
      shift_(backend, set.channels) {
    std::vector<float> scale, shift;
    for (std::size_t c = 0; c < static_cast<std::size_t>(set.channels); ++c) {
        scale.push_back(1.0f / (255.0f * normalisation.stddev[c]));
        shift.push_back(-normalisation.mean[c] / normalisation.stddev[c]);
    }
    backend.upload(scale_.get(), scale.data(), scale_.bytes());
    backend.upload(shift_.get(), shift.data(), shift_.bytes());
    if (backend.host_memory() && !backend.device_identity().emulated) {
        host_pixels_ = std::move(set.pixels);  // of a file, perhaps, that is larger than memory
    } else {
        pixels_ = {backend, static_cast<std::int64_t>(set.pixels.size())};
        backend.upload(pixels_.get(), std::as_const(set.pixels).data(), pixels_.bytes());
    }
    backend.upload(labels_.get(), set.labels.data(), labels_.bytes());
    set = {};
}

std::vector<std::uint8_t> DeviceImages::pixels_of(std::int64_t image) const {
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(shape_.elems()));
    backend_.download(pixels.data(), source().pixels + image * shape_.elems(), pixels.size());
    return pixels;
}

std::vector<float> DeviceImages::download(const DeviceBuffer<float>& buffer) const {
    std::vector<float> values(static_cast<std::size_t>(buffer.elems()));
    backend_.download(values.data(), buffer.get(), buffer.bytes());
    return values;
}

void DeviceImages::gather(const std::int32_t* samples, int n, const Tensor& x, std::int32_t* y,
                          const AugmentArgs& augment) const {
    GatherArgs args = source();
    args.samples = samples;
    args.augment = augment;
    backend_.gather(args, n, x, y);
}

}  // namespace gyre::train
