// A set of images on the device, as bytes; normalisation happens as a batch is gathered.
#pragma once

#include <cstdint>
#include <vector>

#include "data/dataset.hpp"
#include "kernels/ops/backend.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// Images of random pixels and labels, always the same: for measuring.
ImageSet random_images(std::int64_t count, const Shape& shape, int classes);

class DeviceImages {
 public:
    // Moves the images: the host's copy is freed, or used as it is if the device is the host.
    DeviceImages(Backend& backend, ImageSet&& set, const Normalisation& normalisation);

    std::int64_t count() const { return count_; }
    // All of them, for a pass that gathers its images itself.
    GatherArgs source() const {
        return {.pixels = host_pixels_.size() != 0 ? host_pixels_.data() : pixels_.get(),
                .labels = labels_.get(),
                .shape = shape_,
                .scale = scale_.get(),
                .shift = shift_.get()};
    }
    // The bytes of one image, [shape], on the host.
    std::vector<std::uint8_t> pixels_of(std::int64_t image) const;
    // The numbers of channels by which bytes are normalised: byte * scale + shift.
    std::vector<float> scale() const { return download(scale_); }
    std::vector<float> shift() const { return download(shift_); }
    // Gathers the images with these indices, [n] on the device: x [n][shape], y [n] labels.
    void gather(const std::int32_t* samples, int n, const Tensor& x, std::int32_t* y,
                const AugmentArgs& augment = {}) const;
    // The same of the step that is next, whose indices go to samples.
    void gather_next(const NextSamplesArgs& next, std::int32_t* samples, int n, const Tensor& x,
                     std::int32_t* y, const AugmentArgs& augment = {}) const {
        GatherArgs args = source();
        args.augment = augment;
        backend_.gather_next(next, args, n, samples, x, y);
    }

 private:
    std::vector<float> download(const DeviceBuffer<float>& buffer) const;

    Backend& backend_;
    std::int64_t count_;
    Shape shape_;
    Pixels host_pixels_;  // empty: pixels_
    DeviceBuffer<std::uint8_t> pixels_;
    DeviceBuffer<std::int32_t> labels_;
    DeviceBuffer<float> scale_, shift_;  // per channel: value = byte * scale + shift
};

}  // namespace gyre::train
