#include "train/initial_weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "base/error.hpp"
#include "model/whiten.hpp"
#include "train/checkpoint.hpp"
#include "train/parameter_groups.hpp"

namespace gyre::train {
namespace {

// The weight of a convolution over all channels of the images; null if this layer is none.
const Parameter* weight_over_images(const Net& net, const std::string& layer) {
    for (const Node& node : net.nodes()) {
        for (const Parameter& parameter : node.parameters) {
            if (parameter.name == layer + ".weight" && parameter.shape.size() == 4 &&
                parameter.shape[1] == net.input_shape().channels &&
                node.inputs.front() == Node::kInput) {
                return &parameter;
            }
        }
    }
    return nullptr;
}

void scale(Net& net, const std::string& rules) {
    ParameterRules factors("init-scale", rules, 0.0f);
    const std::vector<HostTensor> drawn = net.export_parameters();  // the parameters, then state
    for (std::size_t i = 0; i < net.parameters().size(); ++i) {
        const float factor = factors.factor_of(drawn[i].name);
        std::vector<float> values = drawn[i].values;
        std::ranges::transform(values, values.begin(), [&](float v) { return factor * v; });
        net.set_parameter(net.parameters()[i], values);
    }
    factors.require_used();
}

void whiten(Net& net, const DeviceImages& images, const std::string& layer) {
    const Parameter* const weight = weight_over_images(net, layer);
    const Shape shape = net.input_shape();
    if (weight == nullptr) {
        throw usage_error(fmt::format(
            "`whiten` {}: there is no such convolution that reads the images, with {} channel{}; "
            "its name is that of its weights without .weight, such as conv1",
            layer, shape.channels, shape.channels == 1 ? "" : "s"));
    }
    const auto filters = static_cast<int>(weight->shape[0]);
    const WindowShape window{shape.channels, static_cast<int>(weight->shape[2]),
                             static_cast<int>(weight->shape[3])};
    if (window.height > shape.height || window.width > shape.width) {
        throw usage_error(
            fmt::format("`whiten` {}: its windows are larger than the images", layer));
    }
    if (filters > 2 * window.elems()) {
        throw usage_error(
            fmt::format("`whiten` {}: a window has {} values, so there are {} whitening filters, "
                        "but the convolution has {}",
                        layer, window.elems(), 2 * window.elems(), filters));
    }
    // The windows of 5,000 images of 32 x 32, or of one image, are enough.
    constexpr std::int64_t kWindows = std::int64_t{5000} * 32 * 32;
    WindowMoments moments(window);
    for (std::int64_t i = 0; i < images.count() && moments.windows() < kWindows; ++i) {
        moments.add(images.pixels_of(i).data(), shape);
    }
    net.set_parameter(*weight, moments.whitening_filters(filters, images.scale(), images.shift()));
}

}  // namespace

std::vector<std::string> initialise(Net& net, const DeviceImages& images, const RunSpec& run) {
    const std::string& file = run.net.init;
    if (file.empty() || run.net.finetune) {
        net.initialise(run.seed);
    }
    if (!run.net.init_scale.empty()) {
        scale(net, run.net.init_scale);
    }
    if (!run.net.whiten.empty()) {
        whiten(net, images, run.net.whiten);
    }
    if (file.empty()) {
        return {};
    }
    std::vector<std::string> remarks =
        net.import_parameters(read_weights(file).tensors, file, run.net.finetune);
    for (std::string& remark : remarks) {
        remark = fmt::format("{}: {}", file, remark);
    }
    return remarks;
}

}  // namespace gyre::train
