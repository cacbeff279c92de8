#include "train/cli/weight_files.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>

#include "kernels/base/error.hpp"
#include "model/safetensors.hpp"

namespace gyre::train {
namespace {

void check_save_path(const char* flag, const std::string& path) {
    std::string extension = std::filesystem::path(path).extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    if (extension == ".pt" || extension == ".pth" || extension == ".pkl") {
        throw usage_error(fmt::format(
            "{} {}: gyre writes safetensors, which torch.load does not read; save to {}, and load "
            "that with safetensors.torch.load_file",
            flag, path, std::filesystem::path(path).replace_extension(".safetensors").string()));
    }
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
        throw input_error(fmt::format(
            "{} {}: that is no file, and stays as it is; give the path of a file", flag, path));
    }
    const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
    if (access(folder.c_str(), W_OK) != 0) {
        throw input_error(
            fmt::format("{} {}: no file can be written there (folder {}); check the path and its "
                        "permissions",
                        flag, path, folder.string()));
    }
}

// What gyre eval reads stands beside the weights.
TensorFile weights_file(const Net& net, const WeightFacts& facts) {
    const auto list = [](const std::vector<float>& values) {
        std::string text;
        for (const float value : values) {
            text += fmt::format("{}{}", text.empty() ? "" : ",", value);
        }
        return text;
    };
    const Shape& shape = net.input_shape();
    return {net.export_parameters(),
            {{"gyre.model", facts.model.source},
             {"gyre.mean", list(facts.normalisation.mean)},
             {"gyre.std", list(facts.normalisation.stddev)},
             {"gyre.data.mean", list(facts.measured.mean)},
             {"gyre.data.std", list(facts.measured.stddev)},
             {"gyre.shape", fmt::format("{}x{}x{}", shape.channels, shape.height, shape.width)},
             {"gyre.classes", fmt::format("{}", facts.classes)}}};
}

}  // namespace

WeightFiles::WeightFiles(const TrainOptions& options, bool is_root)
    : options_(options), is_root_(is_root) {
    const std::string* files[] = {&options.save, &options.save_last, &options.json, &options.csv};
    for (const std::string** a = std::begin(files); a != std::end(files); ++a) {
        for (const std::string** b = a + 1; b != std::end(files); ++b) {
            if (!(*a)->empty() && std::filesystem::path(**a) == std::filesystem::path(**b)) {
                throw usage_error(
                    "--save, --save-last, --json and --metrics write files: give each its own");
            }
        }
    }
    if (is_root && !options.save.empty()) {
        check_save_path("--save", options.save);
    }
    if (is_root && !options.save_last.empty()) {
        check_save_path("--save-last", options.save_last);
    }
}

void WeightFiles::meet(Communicator& comm) {
    const std::pair<const char*, const std::string*> files[] = {
        {"--save", &options_.save},   {"--save-last", &options_.save_last},
        {"--init", &options_.init},   {"--json", &options_.json},
        {"--metrics", &options_.csv}, {"--tensorboard", &options_.tensorboard}};
    std::array<double, 2 * std::size(files)> given{};  // on rank 0, on any
    for (std::size_t i = 0; i < std::size(files); ++i) {
        const double own = files[i].second->empty() ? 0.0 : 1.0;
        given[i] = is_root_ ? own : 0.0;
        given[std::size(files) + i] = own;
    }
    comm.allreduce_sum(given);
    for (std::size_t i = 0; i < std::size(files) && is_root_; ++i) {
        if (given[i] == 0.0 && given[std::size(files) + i] > 0.0) {
            fmt::print(stderr, "gyre: {} counts on rank 0 only, which does not have it: ignored\n",
                       files[i].first);
        }
    }
    any_ = given[0] + given[1] > 0.0;
}

bool WeightFiles::save(Communicator& comm, const Net& net, const WeightFacts& facts,
                       bool better) const {
    if (!any_) {
        return false;
    }
    agree(comm, [&] {
        std::vector<std::string> paths;
        if (better && !options_.save.empty()) {
            paths.push_back(options_.save);
        }
        if (!options_.save_last.empty()) {
            paths.push_back(options_.save_last);
        }
        if (is_root_ && !paths.empty()) {
            const TensorFile file = weights_file(net, facts);
            for (const std::string& path : paths) {
                write_safetensors(path, file);
            }
        }
    });
    return better && !options_.save.empty();
}

}  // namespace gyre::train
