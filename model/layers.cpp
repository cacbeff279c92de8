#include "model/layers.hpp"

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <cmath>
#include <set>

#include "base/error.hpp"
#include "model/graph.hpp"

namespace gyre::model {
namespace {

constexpr int kMostExtent = 1 << 24;  // keeps every product of extents inside 64 bits
constexpr int kMostWindow = 15;       // of max-pooling: positions are kept in a byte

template <typename Number>
std::optional<Number> number(std::string_view text) {
    Number value{};
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    return result.ec == std::errc{} && result.ptr == text.data() + text.size()
               ? std::optional(value)
               : std::nullopt;
}

void no_options(Words& words, LayerSpec&) {
    words.end();
}

// 0 stands for the number of classes.
int outputs(Words& words, const char* what) {
    const std::string word = words.next(what);
    return word == "classes" ? 0 : words.checked_integer(word, word, what, 1);
}

void parse_conv(Words& words, LayerSpec& layer) {
    layer.out = outputs(words, "the number of output channels");
    words.options("kspgn", layer);
}
void build_conv(GraphBuilder& net, const LayerSpec& layer) {
    net.require_planes();
    const int out = layer.out == 0 ? net.classes() : layer.out;
    const Conv2dShape shape{net.shape(),  out,           layer.kernel,
                            layer.stride, layer.padding, layer.groups};
    if (shape.in.channels % shape.groups != 0 || shape.out_channels % shape.groups != 0) {
        net.fail(fmt::format(
            "its {} input channels and its {} outputs must be multiples of its {} groups",
            shape.in.channels, shape.out_channels, shape.groups));
    }
    if (shape.out().height < 1 || shape.out().width < 1) {
        net.fail(fmt::format("its {0} x {0} window with padding {1} is larger than its input",
                             layer.kernel, layer.padding));
    }
    const OpSpec spec =
        shape.groups > 1 ? OpSpec{GroupedConv2dSpec{shape}} : OpSpec{Conv2dSpec{.shape = shape}};
    net.append(
        "conv", spec,
        weight_and_bias({shape.out_channels, shape.group_inputs(), shape.kernel, shape.kernel},
                        layer.bias));
}

void parse_maxpool(Words& words, LayerSpec& layer) {
    layer.kernel = words.integer("the window", 1);
    layer.stride = layer.kernel;
    words.options("spc", layer);
}
void build_maxpool(GraphBuilder& net, const LayerSpec& layer) {
    net.require_planes();
    if (layer.padding > layer.kernel / 2) {
        net.fail(fmt::format("its padding {} is more than half of its window", layer.padding));
    }
    const MaxPool2dShape shape{net.shape(), layer.kernel, layer.stride, layer.padding, layer.ceil};
    if (shape.out().height < 1 || shape.out().width < 1) {
        net.fail(fmt::format("its {0} x {0} window is larger than its input", layer.kernel));
    }
    if (layer.kernel > kMostWindow) {
        net.fail(fmt::format("windows of more than {0} x {0} are not supported", kMostWindow));
    }
    net.append("pool", MaxPool2dSpec{shape});
}

void parse_avgpool(Words& words, LayerSpec& layer) {
    const std::string word = words.next("the window");
    if (word == "global") {
        layer.kernel = 0;
        words.end();
        return;
    }
    layer.kernel = words.checked_integer(word, word, "the window", 1);
    layer.stride = layer.kernel;
    words.options("s", layer);
}
void build_avgpool(GraphBuilder& net, const LayerSpec& layer) {
    net.require_planes();
    const Shape& in = net.shape();
    const bool global = layer.kernel == 0;
    const AvgPool2dSpec pool{.in = in,
                             .kernel_height = global ? in.height : layer.kernel,
                             .kernel_width = global ? in.width : layer.kernel,
                             .stride = layer.stride};
    if (pool.out().height < 1 || pool.out().width < 1) {
        net.fail(fmt::format("its {0} x {0} window is larger than its input", layer.kernel));
    }
    net.append("avgpool", pool);
}

// momentum: of running statistics, which a batch normalisation has.
void parse_norm(Words& words, LayerSpec& layer, bool momentum) {
    std::set<std::string> seen;
    while (const auto word = words.optional()) {
        if (!seen.insert(*word).second) {
            words.fail(fmt::format("'{}' was not expected", *word));
        } else if (*word == "local" && momentum) {
            layer.local = true;
        } else if (*word == "momentum" && momentum) {
            layer.momentum = words.positive("the momentum", "0.1");
        } else if (*word == "eps") {
            layer.epsilon = words.positive("the epsilon", "1e-5");
        } else if (*word == "noaffine") {
            layer.affine = false;
        } else {
            words.fail(fmt::format("'{}' was not expected", *word));
        }
    }
}
void parse_batchnorm(Words& words, LayerSpec& layer) {
    parse_norm(words, layer, true);
}
// A value for each channel, or for each feature of a flat value.
Parameter of_channels(const GraphBuilder& net, const char* name, Init init, bool fixed = false) {
    const std::int64_t channels = net.shape().channels;
    return {.name = name, .shape = {channels}, .elems = channels, .init = init, .fixed = fixed};
}
std::vector<Parameter> affine_parameters(const GraphBuilder& net, const LayerSpec& layer) {
    return {of_channels(net, "weight", Init::ones, !layer.affine),
            of_channels(net, "bias", Init::zeros, !layer.affine)};
}
void build_batchnorm(GraphBuilder& net, const LayerSpec& layer) {
    BatchNorm2dSpec spec{.in = net.shape(), .local = layer.local};
    spec.epsilon = layer.epsilon > 0.0f ? layer.epsilon : spec.epsilon;
    spec.momentum = layer.momentum > 0.0f ? layer.momentum : spec.momentum;
    net.append("bn", spec,
               {affine_parameters(net, layer),
                {of_channels(net, "running_mean", Init::zeros),
                 of_channels(net, "running_var", Init::ones)}});
}

void parse_groupnorm(Words& words, LayerSpec& layer) {
    layer.groups = words.integer("the number of groups", 1);
    parse_norm(words, layer, false);
}
void build_groupnorm(GraphBuilder& net, const LayerSpec& layer) {
    GroupNormSpec spec{.in = net.shape(), .groups = layer.groups};
    if (spec.in.channels % spec.groups != 0) {
        net.fail(fmt::format("its {} input channels must be a multiple of its {} groups",
                             spec.in.channels, spec.groups));
    }
    spec.epsilon = layer.epsilon > 0.0f ? layer.epsilon : spec.epsilon;
    net.append("gn", spec, {affine_parameters(net, layer)});
}

void parse_linear(Words& words, LayerSpec& layer) {
    layer.out = outputs(words, "the number of features");
    words.end();
}
void build_linear(GraphBuilder& net, const LayerSpec& layer) {
    const Shape in = net.shape();
    net.flatten();
    const LinearShape shape{net.shape().channels, layer.out == 0 ? net.classes() : layer.out};
    net.append("fc", LinearSpec{.in = in, .shape = shape},
               weight_and_bias({shape.out_features, shape.in_features}));
}

void build_relu(GraphBuilder& net, const LayerSpec&) {
    net.append("relu", ReluSpec{net.shape()});
}

void parse_leaky_relu(Words& words, LayerSpec& layer) {
    layer.slope = words.positive("the slope below zero", "0.01");
    words.end();
}
template <Activation kFunction>
void build_activation(GraphBuilder& net, const LayerSpec& layer) {
    net.append(kFunction == Activation::relu6 ? "clip" : layer.type->word,  // relu61 is a ReLU's
               ActivationSpec{net.shape(), kFunction, layer.slope});
}

void parse_dropout(Words& words, LayerSpec& layer) {
    layer.probability = words.probability();
    words.end();
}
// Layers that are left out have their random streams all the same.
void append_dropout(GraphBuilder& net, const LayerSpec& layer, bool by_channel) {
    const int index = net.count("dropout");
    if (net.dropout() && layer.probability > 0.0f) {
        net.append_numbered("dropout", index,
                            DropoutSpec{.in = net.shape(),
                                        .probability = layer.probability,
                                        .by_channel = by_channel,
                                        .stream = static_cast<std::uint32_t>(index)});
    }
}
void build_dropout(GraphBuilder& net, const LayerSpec& layer) {
    append_dropout(net, layer, false);
}
void build_dropout2d(GraphBuilder& net, const LayerSpec& layer) {
    net.require_planes();
    append_dropout(net, layer, true);
}

void build_flatten(GraphBuilder& net, const LayerSpec&) {
    net.flatten();
}

void parse_name(Words& words, LayerSpec& layer) {
    layer.name = words.name();
    words.end();
}
void build_as(GraphBuilder& net, const LayerSpec& layer) {
    net.name_value(layer.name);
}
void build_from(GraphBuilder& net, const LayerSpec& layer) {
    net.go_on_from(layer.name);
}
void build_add(GraphBuilder& net, const LayerSpec& layer) {
    const Value& other = net.value(layer.name);
    if (other.shape != net.shape()) {
        net.fail(
            fmt::format("'{}' is {}, and only equal shapes can be added; bring it to this one "
                        "with 'from {}' and a projection such as 'conv {} k1'",
                        layer.name, text_of(other.shape), layer.name, net.shape().channels));
    }
    net.append("add", AddSpec{net.shape()}, {}, {other.number});
}

void build_mul(GraphBuilder& net, const LayerSpec& layer) {
    net.require_planes();
    const Value& other = net.value(layer.name);
    if (net.shape() != Shape{other.shape.channels, 1, 1} || other.flat) {
        net.fail(
            fmt::format("'{}' is {}, and is multiplied by one number for each of its channels; "
                        "bring it to that with 'avgpool global' and 'conv {} k1'",
                        layer.name, text_of(other.shape), other.shape.channels));
    }
    net.append("mul", MulSpec{net.shape(), other.shape}, {}, {other.number});
}
void build_concat(GraphBuilder& net, const LayerSpec& layer) {
    const Value& other = net.value(layer.name);
    const Shape &here = net.shape(), &there = other.shape;
    if (there.height != here.height || there.width != here.width || other.flat != net.flat()) {
        net.fail(fmt::format("'{}' is {}, and only numbers of channels may differ", layer.name,
                             text_of(there)));
    }
    net.append("concat", ConcatSpec{here, there}, {}, {other.number});
}

void parse_chunk(Words& words, LayerSpec& layer) {
    const std::string word = words.next("the part K/N");
    const std::size_t slash = word.find('/');
    if (slash == word.npos) {
        words.fail(fmt::format("'{}' must be a part such as 1/2", word));
    }
    layer.part = words.checked_integer(word.substr(0, slash), word, "the part", 1);
    layer.parts = words.checked_integer(word.substr(slash + 1), word, "the number of parts", 1);
    words.end();
}
void build_chunk(GraphBuilder& net, const LayerSpec& layer) {
    net.require_planes();
    const int channels = net.shape().channels, count = (channels - 1) / layer.parts + 1;
    const int before = layer.part - 1;
    if (layer.part > layer.parts || before > (channels - 1) / count) {
        net.fail(
            fmt::format("{} channels in parts of {} have no part {}", channels, count, layer.part));
    }
    const int first = before * count;
    net.append("chunk", ChannelsSpec{net.shape(), first, std::min(count, channels - first)});
}

void parse_shuffle(Words& words, LayerSpec& layer) {
    layer.groups = words.integer("the number of groups", 1);
    words.end();
}
void build_shuffle(GraphBuilder& net, const LayerSpec& layer) {
    net.require_planes();
    const int channels = net.shape().channels;
    if (channels % layer.groups != 0) {
        net.fail(fmt::format("its {} input channels must be a multiple of its {} groups", channels,
                             layer.groups));
    }
    net.append("shuffle", ChannelsSpec{net.shape(), 0, channels, layer.groups});
}

void build_nothing(GraphBuilder&, const LayerSpec&) {}

constexpr LayerType kLayerTypes[] = {
    {"conv", "conv OUT|classes kK [sS] [pP] [gG] [nobias]", parse_conv, build_conv},
    {"maxpool", "maxpool K [sS] [pP] [ceil]", parse_maxpool, build_maxpool},
    {"avgpool", "avgpool K|global [sS]", parse_avgpool, build_avgpool},
    {"batchnorm", "batchnorm [local] [eps E] [momentum M] [noaffine]", parse_batchnorm,
     build_batchnorm},
    {"groupnorm", "groupnorm G [eps E] [noaffine]", parse_groupnorm, build_groupnorm},
    {"relu", "relu", no_options, build_relu},
    {"relu6", "relu6", no_options, build_activation<Activation::relu6>},
    {"leaky_relu", "leaky_relu SLOPE", parse_leaky_relu, build_activation<Activation::leaky_relu>},
    {"gelu", "gelu", no_options, build_activation<Activation::gelu>},
    {"silu", "silu", no_options, build_activation<Activation::silu>},
    {"sigmoid", "sigmoid", no_options, build_activation<Activation::sigmoid>},
    {"hardsigmoid", "hardsigmoid", no_options, build_activation<Activation::hardsigmoid>},
    {"hardswish", "hardswish", no_options, build_activation<Activation::hardswish>},
    {"dropout", "dropout P", parse_dropout, build_dropout},
    {"dropout2d", "dropout2d P", parse_dropout, build_dropout2d},
    {"flatten", "flatten", no_options, build_flatten},
    {"linear", "linear OUT|classes", parse_linear, build_linear},
    {"as", "as NAME", parse_name, build_as},
    {"add", "add NAME", parse_name, build_add},
    {"mul", "mul NAME", parse_name, build_mul},
    {"concat", "concat NAME", parse_name, build_concat},
    {"chunk", "chunk K/N", parse_chunk, build_chunk},
    {"shuffle", "shuffle G", parse_shuffle, build_shuffle},
    {"from", "from NAME", parse_name, build_from},
    {"log-softmax", "log-softmax", no_options, build_nothing, true},
};

}  // namespace

std::span<const LayerType> layer_types() {
    return kLayerTypes;
}

Words::Words(const std::string& line, std::string where, const char* usage)
    : in_(line), where_(std::move(where)), usage_(usage) {
    std::string first;
    in_ >> first;
}

std::optional<std::string> Words::optional() {
    std::string word;
    return in_ >> word ? std::optional(word) : std::nullopt;
}

std::string Words::next(const char* what) {
    const auto word = optional();
    if (!word) {
        fail(fmt::format("{} is missing", what));
    }
    return *word;
}

int Words::integer(const char* what, int least) {
    const std::string word = next(what);
    return checked_integer(word, word, what, least);
}

int Words::checked_integer(const std::string& digits, const std::string& word, const char* what,
                           int least) const {
    const auto value = number<int>(digits);
    if (!value || *value < least || *value > kMostExtent) {
        fail(fmt::format("'{}' as {} must be a number from {} to {}", word, what, least,
                         kMostExtent));
    }
    return *value;
}

float Words::probability() {
    const std::string word = next("a probability");
    const auto value = number<float>(word);
    if (!value || !(*value >= 0.0f && *value <= 1.0f)) {
        fail(fmt::format("'{}' is not a probability between 0 and 1", word));
    }
    return *value;
}

float Words::positive(const char* what, const char* usual) {
    const std::string word = next(what);
    const auto value = number<float>(word);
    if (!value || !(*value > 0.0f) || !std::isfinite(*value)) {
        fail(fmt::format("'{}' as {} must be a number above 0, such as PyTorch's default of {}",
                         word, what, usual));
    }
    return *value;
}

std::string Words::name() {
    const std::string word = next("a name");
    for (const char c : word) {
        if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '-') {
            fail(fmt::format("'{}' is not a name of letters, digits, - and _", word));
        }
    }
    return word;
}

void Words::options(std::string_view letters, LayerSpec& layer) {
    std::string seen;
    while (const auto word = optional()) {
        const char letter = (*word)[0];
        if (letters.find(letter) == std::string_view::npos ||
            seen.find(letter) != std::string::npos) {
            fail(fmt::format("'{}' was not expected", *word));
        }
        seen += letter;
        if (*word == "nobias" || *word == "ceil") {
            (letter == 'n' ? layer.bias : layer.ceil) = letter == 'c';
            continue;
        }
        if (letter == 'n' || letter == 'c') {
            fail(fmt::format("'{}' was not expected", *word));
        }
        const int value =
            checked_integer(word->substr(1), *word, "an option", letter == 'p' ? 0 : 1);
        (letter == 'k'   ? layer.kernel
         : letter == 's' ? layer.stride
         : letter == 'g' ? layer.groups
                         : layer.padding) = value;
    }
    if (letters.find('k') != std::string_view::npos && seen.find('k') == std::string::npos) {
        fail("the window kK is missing");
    }
}

void Words::end() {
    if (const auto word = optional()) {
        fail(fmt::format("'{}' was not expected", *word));
    }
}

void Words::fail(const std::string& what) const {
    throw input_error(fmt::format("{}: {}; expected: {}", where_, what, usage_));
}

}  // namespace gyre::model
