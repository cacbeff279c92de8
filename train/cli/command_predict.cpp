// gyre predict: what saved weights take pictures for.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "base/printable.hpp"
#include "data/idx.hpp"
#include "data/picture.hpp"
#include "data/resize.hpp"
#include "data/sampler.hpp"
#include "train/checkpoint.hpp"
#include "train/cli/class_report.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/setup.hpp"
#include "train/cli/stored.hpp"
#include "train/evaluator.hpp"

namespace gyre::train {
namespace {

using Trained = Stored::Trained;

struct Images {
    std::vector<std::string> names;    // [count], as they are printed
    std::vector<std::uint8_t> pixels;  // [count][shape]
};

void require_channels(const std::string& path, int channels, const Shape& shape) {
    if (channels != shape.channels) {
        throw input_error(
            fmt::format("{}: the image has {} channel{}, but the net was trained on images of {}",
                        path, channels, channels == 1 ? "" : "s", shape.channels));
    }
}

// pixels [height][width][channels]
void add_image(Images& images, const std::string& name, const std::vector<std::uint8_t>& given,
               const Shape& shape, const Resize& to) {
    const std::vector<std::uint8_t> pixels =
        resize_image(given.data(), shape.channels, shape.height, shape.width, to);
    const auto area = static_cast<std::size_t>(to.height) * static_cast<std::size_t>(to.width);
    const auto channels = static_cast<std::size_t>(shape.channels);
    for (std::size_t c = 0; c < channels; ++c) {
        for (std::size_t i = 0; i < area; ++i) {
            images.pixels.push_back(pixels[i * channels + c]);
        }
    }
    images.names.push_back(name);
}

void load_picture(Images& images, const std::string& path, const Trained& net) {
    const Picture picture = decode_picture({path}, net.shape.channels == 3);
    require_channels(path, picture.channels, net.shape);
    add_image(images, path, picture.pixels, {picture.channels, picture.height, picture.width},
              net.resize);
}

// Images [N][H][W] or [N][C][H][W] of bytes.
void load_idx(Images& images, const std::string& path, const Trained& net) {
    const IdxArray array = read_idx(path);
    const std::size_t rank = array.dims.size();
    if (array.type != IdxType::u8 || (rank != 3 && rank != 4)) {
        throw input_error(fmt::format(
            "{}: not images: expected bytes [N][H][W] or [N][C][H][W], found [{}]{}", path,
            format_dims(array.dims), array.type == IdxType::u8 ? "" : " of another type"));
    }
    if (array.dims[0] == 0) {
        throw input_error(fmt::format("{}: there is no image in it", path));
    }
    const Shape given{rank == 4 ? static_cast<int>(array.dims[1]) : 1,
                      static_cast<int>(array.dims[rank - 2]),
                      static_cast<int>(array.dims[rank - 1])};
    require_channels(path, given.channels, net.shape);
    const auto channels = static_cast<std::size_t>(given.channels);
    const auto area =
        static_cast<std::size_t>(given.height) * static_cast<std::size_t>(given.width);
    std::vector<std::uint8_t> pixels(channels * area);
    for (std::int64_t n = 0; n < array.dims[0]; ++n) {
        const std::byte* from =
            array.payload.data() + static_cast<std::size_t>(n) * channels * area;
        for (std::size_t i = 0; i < pixels.size(); ++i) {
            pixels[i] = static_cast<std::uint8_t>(from[i % channels * area + i / channels]);
        }
        add_image(images, fmt::format("{}[{}]", path, n), pixels, given, net.resize);
    }
}

void load_file(Images& images, const std::string& path, const Trained& net) {
    if (is_picture_name(path)) {
        load_picture(images, path, net);
    } else if (is_other_picture_name(path)) {
        throw input_error(
            fmt::format("{}: only PNG, JPEG and WebP pictures are read; convert it", path));
    } else {
        load_idx(images, path, net);
    }
}

// Files that cannot be read are named on standard error; false if there is one.
bool load_images(Images& images, const std::vector<std::string>& paths, const Trained& net) {
    bool all_read = true;
    for (const std::string& path : paths) {
        try {
            load_file(images, path, net);
        } catch (const Error& error) {
            fmt::print(stderr, "gyre: {}\n", printable(with_flag_names(error.what()), true));
            all_read = false;
        }
    }
    return all_read;
}

// In quotes if a comma or a quote asks for it (RFC 4180).
std::string csv_cell(const std::string& text) {
    if (text.find_first_of(",\"\n") == std::string::npos) {
        return text;
    }
    std::string quoted;
    for (const char c : text) {
        quoted += c == '"' ? "\"\"" : std::string(1, c);
    }
    return "\"" + quoted + "\"";
}

void print_image(const PredictOptions& options, const std::string& image, const float* logits,
                 const std::vector<std::string>& names) {
    const auto classes = static_cast<int>(names.size());
    std::vector<int> order(names.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return logits[a] > logits[b]; });
    const double largest = double{logits[order.front()]};
    double sum = 0.0;
    for (int k = 0; k < classes; ++k) {
        sum += std::exp(double{logits[k]} - largest);
    }
    std::string line = printable(image);
    for (int at = 0; at < std::min(options.top, classes); ++at) {
        const int k = order[static_cast<std::size_t>(at)];
        const std::string& name = names[static_cast<std::size_t>(k)];
        const double p = std::exp(double{logits[k]} - largest) / sum;
        if (options.csv) {
            fmt::print("{},{},{},{},{:.6f}\n", csv_cell(image), at + 1, k, csv_cell(name), p);
        } else {
            line += fmt::format("  {} {:.2f} %", name, 100.0 * p);
        }
    }
    if (!options.csv) {
        fmt::print("{}\n", line);
    }
}

}  // namespace

ExitCode run_predict(Communicator& comm, const PredictOptions& options) {
    const std::unique_ptr<Backend> backend = make_backend(options, comm);
    const TensorFile weights = read_weights(options.weights);
    const Stored stored(weights, options.weights);
    const Trained trained = stored.trained();
    const Shape& shape = trained.shape;
    Images images;
    const bool all_read = load_images(images, options.images, trained);
    if (images.names.empty()) {
        return ExitCode::bad_input;
    }
    ImageSet set{.count = static_cast<std::int64_t>(images.names.size()),
                 .channels = shape.channels,
                 .height = shape.height,
                 .width = shape.width,
                 .pixels = std::move(images.pixels),
                 .labels = std::vector<std::int32_t>(images.names.size()),
                 .images_path = {},
                 .labels_path = {}};
    const int batch =
        static_cast<int>(std::min<std::int64_t>(options.evaluation.batch_size, set.count));
    Net net(*backend, parse_model(trained.model, options.weights), shape, trained.classes,
            {.train_batch = 0,
             .eval_batch = batch,
             .spec = {.dropout = false, .precision = options.net.precision, .fold = true},
             .eval_sizes = Sharding{set.count, batch}.sizes()});
    net.import_parameters(weights.tensors, options.weights);
    const std::vector<std::string> names = class_labels(stored.class_names(), trained.classes);
    const DeviceImages device_images(*backend, std::move(set), trained.normalisation);
    if (options.csv) {
        fmt::print("image,place,class,name,probability\n");
    }
    const auto alone = make_single_communicator();
    evaluate(*alone, *backend, net, device_images,
             {.batch = batch, .views = options.evaluation.views},
             [&](std::int64_t first, int n, const std::vector<float>& logits) {
                 for (int i = 0; i < n; ++i) {
                     print_image(options, images.names[static_cast<std::size_t>(first + i)],
                                 logits.data() + static_cast<std::size_t>(i) * names.size(), names);
                 }
             });
    return all_read ? ExitCode::success : ExitCode::bad_input;
}

}  // namespace gyre::train
