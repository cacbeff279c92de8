// A training pass of a net in double precision, with what float32 may be off (bounded.hpp). The
// bounds of gradients hold where no rounding can change which way a ReLU or a window goes.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "base/philox.hpp"
#include "model/graph.hpp"
#include "model/safetensors.hpp"
#include "tests/support/bounded.hpp"

namespace gyre::test {

class BoundedNet {
 public:
    using Values = std::vector<Bounded>;
    struct Images {
        int n;
        std::vector<float> x;  // [n][input]
        std::vector<std::int32_t> labels, samples;
        std::uint64_t seed;
    };

    // The graph's nodes are parts, none fused. The loss is the images' mean.
    BoundedNet(const model::Graph& graph, const std::vector<model::HostTensor>& tensors,
               const Images& images)
        : graph_(graph), images_(images), n_(images.n), input_(images.x.begin(), images.x.end()) {
        for (const model::HostTensor& tensor : tensors) {
            tensors_[tensor.name] = Values(tensor.values.begin(), tensor.values.end());
        }
        for (const model::Node& node : graph.nodes) {
            for (const model::Parameter& parameter : node.parameters) {
                if (parameter.fixed) {
                    tensors_[parameter.name] = Values(
                        size(parameter.elems), parameter.init == model::Init::ones ? 1.0 : 0.0);
                }
            }
            gradients_.emplace_back(size(n_ * node.out.elems()));
        }
        for (const model::Node& node : graph.nodes) {
            values_.emplace_back(size(n_ * node.out.elems()));
            std::visit([&](const auto& spec) { forward(spec, node, values_.back()); }, node.spec);
        }
        compute_loss();
        for (std::size_t i = graph.nodes.size(); i-- > 0;) {
            const model::Node& node = graph.nodes[i];
            std::visit([&](const auto& spec) { backward(spec, node, gradients_[i]); }, node.spec);
        }
    }

    Bounded loss;
    int undecided = 0;                        // choices that rounding can change
    std::map<std::string, Values> gradients;  // of the parameters, by name

 private:
    static std::size_t size(std::int64_t elems) { return static_cast<std::size_t>(elems); }
    const Values& value(int number) const {
        return number == model::Node::kInput ? input_ : values_[static_cast<std::size_t>(number)];
    }
    const Values& x(const model::Node& node) const { return value(node.inputs[0]); }
    const Values& tensor(const model::Node& node, std::size_t parameter) const {
        return tensors_.at(node.parameters[parameter].name);
    }
    void pass(int to, std::size_t at, const Bounded& gradient) {
        if (to != model::Node::kInput) {
            Bounded& sum = gradients_[static_cast<std::size_t>(to)][at];
            sum = sum + gradient;
        }
    }
    static Values results(const std::vector<BoundedSum>& sums, int more_roundings) {
        Values all;
        for (const BoundedSum& sum : sums) {
            all.push_back(sum.result().rounded(more_roundings));
        }
        return all;
    }

    static Conv2dShape as_conv(const Conv2dSpec& spec) { return spec.shape; }
    static Conv2dShape as_conv(const GroupedConv2dSpec& spec) { return spec.shape; }
    static Conv2dShape as_conv(const LinearSpec& spec) { return reference::as_conv(spec.shape); }

    template <typename Product>
    void forward_products(const Product& spec, const model::Node& node, Values& y) {
        const Conv2dShape shape = as_conv(spec);
        std::vector<BoundedSum> sums(y.size());
        for (std::size_t i = 0; i < y.size(); ++i) {
            sums[i].add(
                tensor(node, 1)[i / size(shape.out().plane_elems()) % size(shape.out_channels)]);
        }
        reference::for_each_product(shape, n_, [&](auto yi, auto xi, auto wi) {
            sums[size(yi)].add(tensor(node, 0)[size(wi)] * x(node)[size(xi)]);
        });
        y = results(sums, 0);
    }
    template <typename Product>
    void backward_products(const Product& spec, const model::Node& node, const Values& dy) {
        const Conv2dShape shape = as_conv(spec);
        std::vector<BoundedSum> dx(x(node).size()), dw(tensor(node, 0).size()),
            db(tensor(node, 1).size());
        for (std::size_t i = 0; i < dy.size(); ++i) {
            db[i / size(shape.out().plane_elems()) % db.size()].add(dy[i]);
        }
        reference::for_each_product(shape, n_, [&](auto yi, auto xi, auto wi) {
            dx[size(xi)].add(tensor(node, 0)[size(wi)] * dy[size(yi)]);
            dw[size(wi)].add(x(node)[size(xi)] * dy[size(yi)]);
        });
        gradients[node.parameters[0].name] = results(dw, 0);
        gradients[node.parameters[1].name] = results(db, 0);
        const Values to_x = results(dx, 0);
        for (std::size_t i = 0; i < to_x.size(); ++i) {
            pass(node.inputs[0], i, to_x[i]);
        }
    }
    void forward(const Conv2dSpec& s, const model::Node& node, Values& y) {
        forward_products(s, node, y);
    }
    void forward(const GroupedConv2dSpec& s, const model::Node& node, Values& y) {
        forward_products(s, node, y);
    }
    void forward(const LinearSpec& s, const model::Node& node, Values& y) {
        forward_products(s, node, y);
    }
    void backward(const Conv2dSpec& s, const model::Node& node, const Values& dy) {
        backward_products(s, node, dy);
    }
    void backward(const GroupedConv2dSpec& s, const model::Node& node, const Values& dy) {
        backward_products(s, node, dy);
    }
    void backward(const LinearSpec& s, const model::Node& node, const Values& dy) {
        backward_products(s, node, dy);
    }

    void forward(const ReluSpec&, const model::Node& node, Values& y) {
        std::transform(x(node).begin(), x(node).end(), y.begin(), [](const Bounded& v) {
            return v.value < -v.error ? Bounded() : Bounded(std::max(v.value, 0.0), v.error);
        });
    }
    void backward(const ReluSpec&, const model::Node& node, const Values& dy) {
        for (std::size_t i = 0; i < dy.size(); ++i) {
            const Bounded& v = x(node)[i];
            undecided += v.error > 0.0 && std::abs(v.value) <= v.error;
            pass(node.inputs[0], i, v.value > 0.0 ? dy[i] : Bounded());
        }
    }

    // The slopes are at most 1.5, hardswish's, and change by at most 0.8 per unit, GELU's, apart
    // from jumps.
    void forward(const ActivationSpec& s, const model::Node& node, Values& y) {
        std::transform(x(node).begin(), x(node).end(), y.begin(), [&](const Bounded& v) {
            const auto at = reference::activated(s, v.value);
            return Bounded(at.value, 1.5 * v.error).rounded(at.roundings);
        });
    }
    void backward(const ActivationSpec& s, const model::Node& node, const Values& dy) {
        const auto jumps = reference::jumps_of(s.function);
        for (std::size_t i = 0; i < dy.size(); ++i) {
            const Bounded& v = x(node)[i];
            undecided += static_cast<int>(std::ranges::count_if(jumps, [&](double jump) {
                return v.error > 0.0 && std::abs(v.value - jump) <= v.error;
            }));
            const auto at = reference::activated(s, v.value);
            const double off = 0.8 * v.error;
            const double rounding = reference::Sums::rounding(at.roundings);
            pass(node.inputs[0], i,
                 dy[i] * Bounded(at.derivative, off + rounding * at.derivative_magnitude));
        }
    }

    void forward(const AddSpec&, const model::Node& node, Values& y) {
        for (std::size_t i = 0; i < y.size(); ++i) {
            y[i] = x(node)[i] + value(node.inputs[1])[i];
        }
    }
    void backward(const AddSpec&, const model::Node& node, const Values& dy) {
        for (std::size_t i = 0; i < dy.size(); ++i) {
            pass(node.inputs[0], i, dy[i]);
            pass(node.inputs[1], i, dy[i]);
        }
    }

    // The gate is the first input.
    std::size_t channel_of(const MulSpec& s, std::size_t i) const {
        return i / size(s.in2.plane_elems());
    }
    void forward(const MulSpec& s, const model::Node& node, Values& y) {
        for (std::size_t i = 0; i < y.size(); ++i) {
            y[i] = (x(node)[channel_of(s, i)] * value(node.inputs[1])[i]).rounded(1);
        }
    }
    void backward(const MulSpec& s, const model::Node& node, const Values& dy) {
        std::vector<BoundedSum> dx(x(node).size());
        for (std::size_t i = 0; i < dy.size(); ++i) {
            dx[channel_of(s, i)].add(dy[i] * value(node.inputs[1])[i]);
            pass(node.inputs[1], i, (dy[i] * x(node)[channel_of(s, i)]).rounded(1));
        }
        const Values to_x = results(dx, 0);
        for (std::size_t i = 0; i < to_x.size(); ++i) {
            pass(node.inputs[0], i, to_x[i]);
        }
    }

    // Calls body(element of the whole, input, element of that) for each.
    template <typename Body>
    void for_parts(const ConcatSpec& s, std::size_t elems, Body&& body) const {
        const std::size_t first = size(s.in2.elems()), second = size(s.in.elems());
        for (std::size_t i = 0; i < elems; ++i) {
            const std::size_t image = i / (first + second), at = i % (first + second);
            at < first ? body(i, std::size_t{1}, image * first + at)
                       : body(i, std::size_t{0}, image * second + at - first);
        }
    }
    void forward(const ConcatSpec& s, const model::Node& node, Values& y) {
        for_parts(s, y.size(), [&](std::size_t i, std::size_t input, std::size_t at) {
            y[i] = value(node.inputs[input])[at];
        });
    }
    void backward(const ConcatSpec& s, const model::Node& node, const Values& dy) {
        for_parts(s, dy.size(), [&](std::size_t i, std::size_t input, std::size_t at) {
            pass(node.inputs[input], at, dy[i]);
        });
    }

    // Calls body(element of y, element of x that it is) for each.
    template <typename Body>
    void for_sources(const ChannelsSpec& s, std::size_t elems, Body&& body) const {
        const std::size_t plane = size(s.in.plane_elems()), channels = size(s.in.channels);
        for (std::size_t i = 0; i < elems; ++i) {
            const std::size_t of_all = i / plane, image = of_all / size(s.count);
            // Groups take turns: written as a transposition, for itself.
            const std::size_t c = of_all % size(s.count), groups = size(s.groups);
            const std::size_t from =
                size(s.first) + c % groups * (size(s.count) / groups) + c / groups;
            body(i, (image * channels + from) * plane + i % plane);
        }
    }
    void forward(const ChannelsSpec& s, const model::Node& node, Values& y) {
        for_sources(s, y.size(), [&](std::size_t i, std::size_t at) { y[i] = x(node)[at]; });
    }
    void backward(const ChannelsSpec& s, const model::Node& node, const Values& dy) {
        for_sources(s, dy.size(),
                    [&](std::size_t i, std::size_t at) { pass(node.inputs[0], at, dy[i]); });
    }

    Bounded factor(const DropoutSpec& s, std::size_t i) const {
        const RandomStream stream{images_.seed, RandomPurpose::dropout, s.stream, 0};
        const std::size_t elem = i % size(s.in.elems());
        const auto word = stream.word(
            static_cast<std::uint32_t>(images_.samples[i / size(s.in.elems())]),
            static_cast<std::uint32_t>(s.by_channel ? elem / size(s.in.plane_elems()) : elem));
        const double kept = 1.0 / (1.0 - double{s.probability});
        return word >= double{s.probability} * 0x1p32 ? Bounded(kept).rounded(2) : Bounded();
    }
    void forward(const DropoutSpec& s, const model::Node& node, Values& y) {
        for (std::size_t i = 0; i < y.size(); ++i) {
            y[i] = x(node)[i] * factor(s, i);
        }
    }
    void backward(const DropoutSpec& s, const model::Node& node, const Values& dy) {
        for (std::size_t i = 0; i < dy.size(); ++i) {
            pass(node.inputs[0], i, dy[i] * factor(s, i));
        }
    }

    // Calls body(output, input) for every input of every window.
    template <typename Body>
    void for_windows(const Shape& in, const Shape& out, int height, int width, int stride,
                     int padding, Body&& body) const {
        for (std::int64_t plane = 0; plane < std::int64_t{n_} * in.channels; ++plane) {
            for (int o = 0; o < out.height * out.width; ++o) {
                for (int k = 0; k < height * width; ++k) {
                    const int row = o / out.width * stride - padding + k / width;
                    const int col = o % out.width * stride - padding + k % width;
                    if (row < 0 || row >= in.height || col < 0 || col >= in.width) {
                        continue;
                    }
                    body(size(plane * out.plane_elems() + o),
                         size(plane * in.plane_elems() + std::int64_t{row} * in.width + col));
                }
            }
        }
    }
    template <typename Body>
    void for_windows(const MaxPool2dSpec& s, Body&& body) const {
        for_windows(s.shape.in, s.out(), s.shape.kernel, s.shape.kernel, s.shape.stride,
                    s.shape.padding, body);
    }
    template <typename Body>
    void for_windows(const AvgPool2dSpec& s, Body&& body) const {
        for_windows(s.in, s.out(), s.kernel_height, s.kernel_width, s.stride, 0, body);
    }

    void forward(const AvgPool2dSpec& s, const model::Node& node, Values& y) {
        std::vector<BoundedSum> sums(y.size());
        for_windows(s, [&](std::size_t to, std::size_t from) {
            sums[to].add(x(node)[from] / (s.kernel_height * s.kernel_width));
        });
        y = results(sums, 1);
    }
    void backward(const AvgPool2dSpec& s, const model::Node& node, const Values& dy) {
        for_windows(s, [&](std::size_t to, std::size_t from) {
            pass(node.inputs[0], from, (dy[to] / (s.kernel_height * s.kernel_width)).rounded());
        });
    }

    void forward(const MaxPool2dSpec& s, const model::Node& node, Values& y) {
        std::fill(y.begin(), y.end(), Bounded(-HUGE_VAL));
        for_windows(s, [&](std::size_t to, std::size_t from) {
            const Bounded& v = x(node)[from];
            y[to] = {std::max(y[to].value, v.value), std::max(y[to].error, v.error)};
        });
    }
    // The first of the largest has the gradient.
    void backward(const MaxPool2dSpec& s, const model::Node& node, const Values& dy) {
        constexpr std::size_t kNone = ~std::size_t{0};
        std::vector<std::size_t> winners(dy.size(), kNone);
        for_windows(s, [&](std::size_t to, std::size_t from) {
            if (winners[to] == kNone || x(node)[from].value > x(node)[winners[to]].value) {
                winners[to] = from;
            }
        });
        for_windows(s, [&](std::size_t to, std::size_t from) {
            const Bounded &v = x(node)[from], &most = x(node)[winners[to]];
            const double off = v.error + most.error;
            undecided += from != winners[to] && off > 0.0 && v.value + off >= most.value;
        });
        for (std::size_t to = 0; to < dy.size(); ++to) {
            pass(node.inputs[0], winners[to], dy[to]);
        }
    }

    static std::vector<std::size_t> indices(const Shape& shape, int n, int channel) {
        std::vector<std::size_t> all;
        for (std::int64_t i = 0; i < n * shape.elems(); ++i) {
            if (i / shape.plane_elems() % shape.channels == channel) {
                all.push_back(size(i));
            }
        }
        return all;
    }
    static Values pick(const Values& from, const std::vector<std::size_t>& which) {
        Values picked;
        for (const std::size_t i : which) {
            picked.push_back(from[i]);
        }
        return picked;
    }
    NormChannel measured(const BatchNorm2dSpec& s, const Values& of_channel) const {
        return NormChannel::measured(of_channel, static_cast<int>(s.in.plane_elems()) + 6,
                                     s.epsilon);
    }
    void forward(const BatchNorm2dSpec& s, const model::Node& node, Values& y) {
        for (int c = 0; c < s.in.channels; ++c) {
            const auto at = indices(s.in, n_, c);
            const NormChannel channel = measured(s, pick(x(node), at));
            for (const std::size_t i : at) {
                y[i] = channel.y(x(node)[i], tensor(node, 0)[size(c)], tensor(node, 1)[size(c)]);
            }
        }
    }
    void backward(const BatchNorm2dSpec& s, const model::Node& node, const Values& dy) {
        for (int c = 0; c < s.in.channels; ++c) {
            const auto at = indices(s.in, n_, c);
            const Values of_channel = pick(x(node), at);
            const NormChannel channel = measured(s, of_channel);
            const auto sums = channel.gradients(of_channel, pick(dy, at));
            gradients[node.parameters[0].name].push_back(sums.weight);
            gradients[node.parameters[1].name].push_back(sums.bias);
            for (const std::size_t i : at) {
                pass(node.inputs[0], i,
                     channel.dx(x(node)[i], dy[i], tensor(node, 0)[size(c)], sums,
                                static_cast<double>(at.size())));
            }
        }
    }

    // Calls body(indices of a group's elements).
    template <typename Body>
    void for_groups(const GroupNormSpec& s, Body&& body) const {
        for (std::int64_t first = 0; first < n_ * s.in.elems(); first += s.group_elems()) {
            std::vector<std::size_t> all;
            for (std::int64_t i = first; i < first + s.group_elems(); ++i) {
                all.push_back(size(i));
            }
            body(all);
        }
    }
    NormChannel measured(const GroupNormSpec& s, const Values& of_group) const {
        return NormChannel::measured(of_group, static_cast<int>(s.in.plane_elems()) + 6, s.epsilon);
    }
    std::size_t channel(const GroupNormSpec& s, std::size_t i) const {
        return i / size(s.in.plane_elems()) % size(s.in.channels);
    }
    void forward(const GroupNormSpec& s, const model::Node& node, Values& y) {
        for_groups(s, [&](const std::vector<std::size_t>& at) {
            const NormChannel norm = measured(s, pick(x(node), at));
            for (const std::size_t i : at) {
                const std::size_t c = channel(s, i);
                y[i] = norm.y(x(node)[i], tensor(node, 0)[c], tensor(node, 1)[c]);
            }
        });
    }
    void backward(const GroupNormSpec& s, const model::Node& node, const Values& dy) {
        std::vector<BoundedSum> dweight(size(s.in.channels)), dbias(dweight.size());
        for_groups(s, [&](const std::vector<std::size_t>& at) {
            const Values values = pick(x(node), at);
            const NormChannel norm = measured(s, values);
            Values scaled;
            for (const std::size_t i : at) {
                const std::size_t c = channel(s, i);
                scaled.push_back((dy[i] * tensor(node, 0)[c]).rounded());
                dweight[c].add(dy[i] * (x(node)[i] - norm.mean) * norm.inverse);
                dbias[c].add(dy[i]);
            }
            const auto sums = norm.gradients(values, scaled);
            for (std::size_t i = 0; i < at.size(); ++i) {
                pass(node.inputs[0], at[i],
                     norm.dx(values[i], scaled[i], 1.0, sums, static_cast<double>(at.size())));
            }
        });
        gradients[node.parameters[0].name] = results(dweight, 6);
        gradients[node.parameters[1].name] = results(dbias, 6);
    }

    // As the test of cross_entropy bounds it: a few roundings for exp, sum, log and differences.
    // Logits that are off by e move the loss by 2 e, and a probability by a factor of exp(2 e).
    void compute_loss() {
        const std::size_t classes = size(graph_.nodes.back().out.elems());
        const double scale = 1.0 / n_;
        const double eps = 0x1p-24 * (static_cast<double>(classes) + 16);
        for (int image = 0; image < n_; ++image) {
            const Bounded* z = values_.back().data() + size(image) * classes;
            Bounded* dz = gradients_.back().data() + size(image) * classes;
            double sum = 0.0, off = 0.0, largest = 0.0;
            for (std::size_t k = 0; k < classes; ++k) {
                sum += std::exp(z[k].value);
                off = std::max(off, z[k].error);
                largest = std::max(largest, z[k].magnitude());
            }
            const auto label = size(images_.labels[size(image)]);
            loss.value += scale * (std::log(sum) - z[label].value);
            loss.error += scale * (2.0 * off + eps * (largest + 4.0));
            for (std::size_t k = 0; k < classes; ++k) {
                const double p = std::exp(z[k].value) / sum;
                dz[k] = {scale * (p - (k == label ? 1.0 : 0.0)),
                         scale * (p * std::expm1(2.0 * off) + eps)};
            }
        }
    }

    const model::Graph& graph_;
    const Images& images_;
    const int n_;
    Values input_;
    std::map<std::string, Values> tensors_;
    std::vector<Values> values_, gradients_;  // of each node's output
};

}  // namespace gyre::test
