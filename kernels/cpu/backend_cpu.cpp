// Copies, layout conversion and the batch gather of the CPU backend.
#include "kernels/cpu/backend_cpu.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/ops.hpp"

namespace gyre::cpu {

std::string CpuBackend::description() const {
    return fmt::format("CPU with {}, {} thread{} per rank", GYRE_CPU_TITLE, pool_.threads(),
                       pool_.threads() == 1 ? "" : "s");
}

std::unique_ptr<Op> CpuBackend::make(const std::string&, const OpSpec& spec, const OpSizes& sizes,
                                     DataType type) {
    return std::visit(
        [&](const auto& which) -> std::unique_ptr<Op> {
            return type == DataType::float32    ? make_op(context_, which, sizes)
                   : type == DataType::bfloat16 ? make_bf16_op(context_, which, sizes)
                                                : nullptr;
        },
        spec);
}

void CpuBackend::upload(void* device, const void* host, std::size_t bytes) {
    if (bytes > 0) {  // memcpy must not be given a null pointer, even for 0 bytes
        std::memcpy(device, host, bytes);
    }
}
void CpuBackend::download(void* host, const void* device, std::size_t bytes) {
    if (bytes > 0) {
        std::memcpy(host, device, bytes);
    }
}
void CpuBackend::fill_zero(void* device, std::size_t bytes) {
    if (bytes > 0) {
        std::memset(device, 0, bytes);
    }
}

void CpuBackend::import_activation(const Shape& shape, int n, const float* host, float* x) {
    const std::int64_t elems = shape.elems();
    std::fill_n(x, activation_elems(shape, n), 0.0f);
    for (int image = 0; image < n; ++image) {
        float* to = x + image / kLanes * elems * kLanes + image % kLanes;
        for (std::int64_t e = 0; e < elems; ++e) {
            to[e * kLanes] = host[image * elems + e];
        }
    }
}

void CpuBackend::export_activation(const Shape& shape, int n, const float* x, float* host) {
    const std::int64_t elems = shape.elems();
    for (int image = 0; image < n; ++image) {
        const float* from = x + image / kLanes * elems * kLanes + image % kLanes;
        for (std::int64_t e = 0; e < elems; ++e) {
            host[image * elems + e] = from[e * kLanes];
        }
    }
}

void CpuBackend::next_samples(const NextSamplesArgs& args, int n, std::int32_t* samples) {
    const auto [epoch, step, arrived] = *args.place;
    std::uint32_t keys[EpochOrder::kRounds];
    for (int group = 0; group < EpochOrder::kKeyGroups; ++group) {
        args.order.write_keys(epoch, group, keys);
    }
    const std::int64_t first = step * args.step_images + args.first;
    for (int i = 0; i < n; ++i) {
        samples[i] = static_cast<std::int32_t>(
            args.order.image(epoch, keys, static_cast<std::uint32_t>(first + i)));
    }
    ++args.place->step;
}

namespace {

// The images in the lanes of one block, and the scale and shift of their channels.
struct LaneImages {
    LaneImages(const GatherArgs& args, std::int64_t block, int n, std::int32_t* y)
        : lanes(std::min(kLanes, n - static_cast<int>(block) * kLanes)) {
        for (int lane = 0; lane < kLanes; ++lane) {
            // Lanes without an image read a valid one, which is then multiplied by zero.
            sample[lane] = args.samples[block * kLanes + (lane < lanes ? lane : 0)];
            image[lane] = args.pixels + sample[lane] * args.shape.elems();
            if (lane < lanes) {
                y[block * kLanes + lane] = args.labels[sample[lane]];
            }
        }
    }
    void set_channel(const GatherArgs& args, int channel) {
        for (int lane = 0; lane < kLanes; ++lane) {
            scale[lane] = lane < lanes ? args.scale[channel] : 0.0f;
            shift[lane] = lane < lanes ? args.shift[channel] : 0.0f;
        }
    }
    int lanes;
    std::int32_t sample[kLanes];
    const std::uint8_t* image[kLanes];
    float scale[kLanes], shift[kLanes];
};

// stored(value) converts to the element type of x.
template <typename Elem, typename Stored>
void gather_augmented(ThreadPool& pool, const GatherArgs& args, int n, Elem* x, std::int32_t* y,
                      Stored stored) {
    const Shape& shape = args.shape;
    pool.parallel_for(block_count(n), [&](std::int64_t block, int) {
        LaneImages lanes(args, block, n, y);
        DrawnAugment drawn[kLanes], of_partner[kLanes];
        DrawnMix mix[kLanes];
        const bool mixes = args.augment.spec.mixes();
        for (int lane = 0; lane < kLanes; ++lane) {
            const auto sample = static_cast<std::uint32_t>(lanes.sample[lane]);
            drawn[lane] = draw_augment(args.augment, shape, sample);
            if (mixes) {
                mix[lane] = draw_mix(args.augment, shape, sample);
                of_partner[lane] = draw_augment(args.augment, shape,
                                                static_cast<std::uint32_t>(mix[lane].partner));
                if (lane < lanes.lanes) {
                    const std::int64_t at = block * kLanes + lane;
                    y[n + at] = args.labels[mix[lane].partner];
                    y[2 * std::int64_t{n} + at] = mix[lane].share;
                }
            }
        }
        Elem* to = x + block * shape.elems() * kLanes;
        for (int channel = 0; channel < shape.channels; ++channel) {
            lanes.set_channel(args, channel);
            for (int row = 0; row < shape.height; ++row) {
                for (int column = 0; column < shape.width; ++column) {
                    for (int lane = 0; lane < kLanes; ++lane) {
                        const std::int64_t plane = channel * shape.plane_elems();
                        const float scale = lanes.scale[lane], shift = lanes.shift[lane];
                        float value = augmented_value(drawn[lane], lanes.image[lane] + plane, row,
                                                      column, scale, shift);
                        if (mixes) {
                            const auto* const partner =
                                args.pixels + mix[lane].partner * shape.elems() + plane;
                            value = mixed_value(mix[lane], row, column, value,
                                                augmented_value(of_partner[lane], partner, row,
                                                                column, scale, shift));
                        }
                        *to++ = stored(value);
                    }
                }
            }
        }
    });
}

template <typename Elem, typename Stored>
void gather_values(ThreadPool& pool, const GatherArgs& args, int n, Elem* x, std::int32_t* y,
                   Stored stored) {
    if (args.augment.epoch != nullptr) {
        return gather_augmented(pool, args, n, x, y, stored);
    }
    const std::int64_t elems = args.shape.elems();
    const std::int64_t plane = args.shape.plane_elems();
    pool.parallel_for(block_count(n), [&](std::int64_t block, int) {
        LaneImages lanes(args, block, n, y);
        Elem* to = x + block * elems * kLanes;
        for (int channel = 0; channel < args.shape.channels; ++channel) {
            lanes.set_channel(args, channel);
            for (std::int64_t e = channel * plane; e < (channel + 1) * plane; ++e) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    to[e * kLanes + lane] =
                        stored(static_cast<float>(lanes.image[lane][e]) * lanes.scale[lane] +
                               lanes.shift[lane]);
                }
            }
        }
    });
}

}  // namespace

void CpuBackend::gather(const GatherArgs& args, int n, const Tensor& x, std::int32_t* y) {
    switch (x.type) {
        case DataType::float32:
            return gather_values(pool_, args, n, x.f32(), y, [](float value) { return value; });
        case DataType::bfloat16:
            return gather_values(pool_, args, n, x.narrow(), y, narrow::to<DataType::bfloat16>);
        case DataType::float16:
            return gather_values(pool_, args, n, x.narrow(), y, narrow::to<DataType::float16>);
    }
}

}  // namespace gyre::cpu
