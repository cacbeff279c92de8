// gyre eval: loss and accuracy of saved weights on a test set.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <optional>
#include <sstream>

#include "base/printable.hpp"
#include "train/checkpoint.hpp"
#include "train/cli/class_report.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/setup.hpp"
#include "train/cli/stored.hpp"
#include "train/evaluator.hpp"
#include "train/hash.hpp"
#include "train/interrupt.hpp"

namespace gyre::train {
namespace {

std::string text_of(const Normalisation& normalisation) {
    return fmt::format("mean {:.4g}, standard deviation {:.4g}", fmt::join(normalisation.mean, " "),
                       fmt::join(normalisation.stddev, " "));
}
std::string text_of(const Shape& shape) {
    return fmt::format("{}x{}x{}", shape.channels, shape.height, shape.width);
}

// By more than rounding, or another part of the same set, makes: the first 10 images of MNIST are
// 0.06 of a standard deviation off. KMNIST is 0.2 off, Fashion-MNIST 0.5.
bool differ(const Normalisation& a, const Normalisation& b) {
    constexpr float kTolerance = 0.1f;
    for (std::size_t i = 0; i < a.mean.size(); ++i) {
        const float most = kTolerance * b.stddev[i];
        if (std::abs(a.mean[i] - b.mean[i]) > most || std::abs(a.stddev[i] - b.stddev[i]) > most) {
            return true;
        }
    }
    return false;
}

// A remark for the user, of rank 0.
using Tell = std::function<void(const std::string&)>;

// How pixels are to be normalised: as in training, unless the user says otherwise. Says where the
// data are not what the weights were trained on.
Normalisation stored_normalisation(DataSpec options, const Stored& stored, const Dataset& data,
                                   const Tell& tell) {
    const Shape shape{data.test.channels, data.test.height, data.test.width};
    if (const auto trained = stored.shape(); trained && *trained != shape) {
        tell(
            fmt::format("trained on images of {} (channels x rows x columns), but those of {} "
                        "are of {}",
                        text_of(*trained), data.name, text_of(shape)));
    }
    const bool by_flags = !options.mean.empty() || !options.stddev.empty();
    auto trained = stored.normalisation("gyre.");
    if (!by_flags && !trained && !stored.text("gyre.mean").empty()) {
        stored.refuse("gyre.mean", "numbers, as many as in gyre.std; give --mean and --std");
    }
    if (trained && trained->mean.size() != static_cast<std::size_t>(shape.channels)) {
        if (!by_flags) {
            stored.refuse("gyre.mean", fmt::format("one number for each of {} channels; give "
                                                   "--mean and --std",
                                                   shape.channels));
        }
        trained.reset();
    }
    if (!by_flags && trained) {
        options.mean = trained->mean;
        options.stddev = trained->stddev;
    }
    Normalisation normalisation = choose_normalisation(options, data.train);
    if (!trained && !by_flags) {
        tell(
            fmt::format("does not say how pixels were normalised in training; taken are {}'s "
                        "own {}; give --mean and --std if that was otherwise",
                        data.name, text_of(normalisation)));
    } else if (trained && differ(normalisation, *trained)) {
        tell(fmt::format("trained with {}, but --mean and --std say {}", text_of(*trained),
                         text_of(normalisation)));
    }
    const auto seen = stored.normalisation("gyre.data.");
    const Normalisation own = measure_normalisation(data.train);
    if (seen && seen->mean.size() == own.mean.size() && differ(own, *seen)) {
        tell(fmt::format("trained on pixels of {}, but those of {} have {}", text_of(*seen),
                         data.name, text_of(own)));
    }
    return normalisation;
}

}  // namespace

ExitCode run_eval(Communicator& comm, const EvalOptions& given) {
    EvalOptions options = given;
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Net> net;
    std::unique_ptr<DeviceImages> images;
    int batch = 0, shards = 0;
    std::string data_hash, weights_hash;
    std::vector<std::int32_t> labels;
    std::vector<std::string> names;
    int classes = 0;
    agree(comm, [&] {
        backend = make_backend(options, comm);
        const TensorFile weights = read_weights(options.weights);
        weights_hash = hash_tensors(weights);
        const Tell tell = [&](const std::string& remark) {
            if (comm.is_root()) {
                fmt::print(stderr, "gyre: {}: {}\n", options.weights, remark);
            }
        };
        // The metadata of the weights count, unless the user says otherwise.
        const Stored stored(weights, options.weights);
        const std::string stored_model = stored.text("gyre.model");
        const ModelSpec model =
            options.net.model.empty() && !stored_model.empty()
                ? parse_model(stored_model, options.weights)
                : load_model(options.net.model.empty() ? NetSpec{}.model : options.net.model);
        if (!options.data.classes) {
            options.data.classes = stored.classes();
        }
        if (!options.data.resize) {
            options.data.resize = stored.resize();
        }
        Dataset data = load_dataset(options.data, tell_of_data(comm, false));
        data_hash = hash_dataset(data);
        const Shape shape{data.test.channels, data.test.height, data.test.width};
        const Normalisation normalisation = stored_normalisation(options.data, stored, data, tell);
        data.train = {};
        labels = data.test.labels;
        names = class_labels(data.class_names.empty() ? stored.class_names() : data.class_names,
                             data.classes);
        classes = data.classes;
        if (options.confusion && classes > kMostConfused) {
            throw usage_error(
                fmt::format("--confusion: {} classes are more than the {} that fit a "
                            "table; --per-class has a line for each",
                            classes, kMostConfused));
        }
        shards = options.shards.value_or(stored.shards() < comm.size() ? 0 : stored.shards());
        if (shards != 0 && shards < comm.size()) {
            throw usage_error(
                fmt::format("--virtual-ranks {}: each of the {} ranks must have at least "
                            "one; begin as many ranks or fewer, or give 0",
                            shards, comm.size()));
        }
        batch = evaluation_batch(comm, data.test.count, options.evaluation.batch_size, shards);
        net = std::make_unique<Net>(
            *backend, model, shape, data.classes,
            NetOptions{.train_batch = 0,
                       .eval_batch = batch,
                       .spec = {.dropout = false, .precision = options.net.precision, .fold = true},
                       .eval_sizes = evaluation_sizes(comm, data.test.count, batch, shards)});
        for (const std::string& remark : net->import_parameters(weights.tensors, options.weights)) {
            tell(remark);
        }
        images = std::make_unique<DeviceImages>(*backend, std::move(data.test), normalisation);
    });
    require_same_manifest(comm, {{"the data set", data_hash}, {"the weights file", weights_hash}});
    install_interrupt_handlers();
    ClassCounts counts(classes, options.confusion);
    const Look look = [&](std::int64_t first, int n, const std::vector<float>& logits) {
        counts.add(logits, labels.data() + first, n);
    };
    const bool by_class = options.per_class || options.confusion;
    const Evaluation result =
        evaluate(comm, *backend, *net, *images, {batch, shards, options.evaluation.views},
                 by_class ? look : Look{});
    if (by_class && !result.stop) {
        counts.add_up(comm);
    }
    if (result.stop) {
        return ExitCode::interrupted;
    }
    if (comm.is_root()) {
        fmt::print("test loss {:.6f}  test accuracy {:.2f} % ({}/{})\n", result.loss,
                   100.0 * result.accuracy, result.correct, result.images);
        if (options.per_class) {
            fmt::print("\n{}", counts.table(names));
        }
        if (options.confusion) {
            fmt::print("\n{}", counts.confusion(names));
        }
    }
    return ExitCode::success;
}

}  // namespace gyre::train
