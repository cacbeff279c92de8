// gyre eval: loss and accuracy of saved weights on a test set.
#include <fmt/format.h>

#include <charconv>
#include <sstream>

#include "data/sampler.hpp"
#include "train/commands.hpp"
#include "train/evaluator.hpp"
#include "train/interrupt.hpp"
#include "train/setup.hpp"

namespace gyre::train {
namespace {

std::vector<float> parse_list(const std::string& text, const std::string& where) {
    std::vector<float> values;
    std::istringstream in(text);
    for (std::string item; std::getline(in, item, ',');) {
        float value = 0.0f;
        const char* end = item.data() + item.size();
        const auto result = std::from_chars(item.data(), end, value);
        if (result.ec != std::errc{} || result.ptr != end) {
            throw input_error(fmt::format(
                "{}: '{}' is not a list of numbers; give --mean and --std", where, text));
        }
        values.push_back(value);
    }
    return values;
}

}  // namespace

ExitCode run_eval(Communicator& comm, const EvalOptions& given,
                  const std::vector<ManifestEntry>& flags) {
    EvalOptions options = given;
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Net> net;
    std::unique_ptr<DeviceImages> images;
    int batch = 0;
    std::string data_hash;
    agree(comm, [&] {
        backend = make_backend(options, comm);
        const TensorFile weights = read_safetensors(options.weights);
        // What gyre train stored beside the weights counts, unless the user says otherwise.
        const auto stored = [&](const char* key) {
            const auto entry = weights.metadata.find(key);
            return entry == weights.metadata.end() ? std::string{} : entry->second;
        };
        const std::string stored_model = stored("gyre.model");
        const ModelSpec model = !options.model_given && !stored_model.empty()
                                    ? parse_model(stored_model, options.weights)
                                    : load_model(options.model);
        if (options.mean.empty() && options.stddev.empty() && !stored("gyre.mean").empty()) {
            options.mean = parse_list(stored("gyre.mean"), options.weights);
            options.stddev = parse_list(stored("gyre.std"), options.weights);
        }
        if (!options.classes && !stored("gyre.classes").empty()) {
            options.classes = std::stoi(stored("gyre.classes"));
        }
        Dataset data = load_dataset({options.data, {}, options.classes});
        data_hash = hash_dataset(data);
        const Normalisation normalisation = choose_normalisation(options, data.train);
        data.train = {};
        batch = static_cast<int>(std::min<std::int64_t>(
            options.test_batch_size, rank_share(data.test.count, 0, comm.size()).count));
        const Shape shape{data.test.channels, data.test.height, data.test.width};
        net = std::make_unique<Net>(*backend, model, shape, data.classes,
                                    NetOptions{0, batch, false});
        net->import_parameters(weights.tensors, options.weights);
        images = std::make_unique<DeviceImages>(*backend, std::move(data.test), normalisation);
    });
    std::vector<ManifestEntry> manifest = {{"the version of gyre", version_text()},
                                           {"the data set", data_hash}};
    manifest.insert(manifest.end(), flags.begin(), flags.end());
    require_same_manifest(comm, manifest);
    install_interrupt_handlers();
    const Evaluation result = evaluate(comm, *backend, *net, *images, batch);
    if (result.stop) {
        return ExitCode::interrupted;
    }
    if (comm.is_root()) {
        fmt::print("test loss {:.6f}  test accuracy {:.2f} % ({}/{})\n", result.loss,
                   100.0 * result.accuracy, result.correct, result.images);
    }
    return ExitCode::success;
}

}  // namespace gyre::train
