#include "model/net.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "model/import.hpp"

namespace gyre::model {

Net::Net(Backend& backend, const ModelSpec& model, const Shape& input, int classes,
         const NetOptions& options)
    : backend_(backend),
      input_shape_(input),
      classes_(classes),
      layers_(make_layers(backend, model, input, classes, options.train_batch, options.dropout)) {
    bool weighted = false;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        if (layers_[i]->parameters.empty()) {
            continue;
        }
        if (!weighted) {
            first_weighted_ = i;
            weighted = true;
        }
        layer_begins_.push_back(flat_elems_);
        for (Parameter& parameter : layers_[i]->parameters) {
            parameter.offset_elems = flat_elems_;
            flat_elems_ += (parameter.elems + kAlignElems - 1) / kAlignElems * kAlignElems;
            parameters_.push_back(parameter);
        }
    }
    flat_parameters_ = {backend, flat_elems_};
    flat_gradients_ = {backend, gradient_elems()};

    const int largest_batch = std::max(options.train_batch, options.eval_batch);
    input_ = {backend, backend.activation_elems(input, largest_batch)};
    labels_ = {backend, largest_batch};
    const auto announce = [&](int most, std::vector<int> sizes, bool training) {
        if (sizes.empty() && most > 0) {
            sizes.push_back(most);
        }
        for (const auto& layer : layers_) {
            for (const int n : sizes) {
                layer->prepare(backend, n, training);
            }
        }
    };
    announce(options.train_batch, options.train_sizes, true);
    announce(options.eval_batch, options.eval_sizes, false);
    // Every output begins at a multiple of 256 bytes.
    const auto output_elems = [&](const Shape& shape, int n) {
        return (backend.activation_elems(shape, n) + 63) / 64 * 64;
    };
    std::vector<std::int64_t> offsets;  // of each layer's training output; -1: in place
    std::int64_t train_elems = 0, largest_gradient = 0;
    std::int64_t eval_elems[2] = {0, 0};
    int turn = 0;
    for (const auto& layer : layers_) {
        const std::int64_t train = output_elems(layer->out, options.train_batch);
        largest_gradient = std::max(largest_gradient, train);
        if (layer->in_place()) {
            offsets.push_back(-1);
            continue;
        }
        offsets.push_back(train_elems);
        train_elems += train;
        eval_elems[turn] = std::max(eval_elems[turn], output_elems(layer->out, options.eval_batch));
        turn = 1 - turn;
    }
    arena_ = {backend, std::max(train_elems, eval_elems[0] + eval_elems[1])};
    turn = 0;
    float *train_at = input_.get(), *eval_at = input_.get();
    for (const std::int64_t offset : offsets) {
        if (offset >= 0) {
            train_at = arena_.get() + offset;
            eval_at = arena_.get() + (turn == 0 ? 0 : eval_elems[0]);
            turn = 1 - turn;
        }
        train_output_.push_back(train_at);
        eval_output_.push_back(eval_at);
    }
    for (DeviceBuffer<float>& gradient : gradient_) {
        gradient = {backend, largest_gradient};
    }
}

std::int64_t Net::parameter_count() const {
    std::int64_t count = 0;
    for (const Parameter& parameter : parameters_) {
        count += parameter.elems;
    }
    return count;
}

void Net::initialise(std::uint64_t seed) {
    std::uint32_t index = 0;
    for (const Parameter& parameter : parameters_) {
        const RandomStream stream{seed, RandomPurpose::init, index++, 0};
        const float bound = 1.0f / std::sqrt(static_cast<float>(parameter.fan_in));
        std::vector<float> values(static_cast<std::size_t>(parameter.elems));
        for (std::size_t i = 0; i < values.size(); i += 4) {
            const Philox4 random = stream.group(0, static_cast<std::uint32_t>(i / 4));
            for (std::size_t j = 0; j < std::min<std::size_t>(4, values.size() - i); ++j) {
                values[i + j] = (2.0f * uniform01(random.word[j]) - 1.0f) * bound;
            }
        }
        backend_.upload(parameter_data() + parameter.offset_elems, values.data(),
                        values.size() * sizeof(float));
    }
}

std::vector<HostTensor> Net::export_parameters() const {
    std::vector<HostTensor> tensors;
    for (const Parameter& parameter : parameters_) {
        HostTensor tensor{parameter.name, parameter.shape,
                          std::vector<float>(static_cast<std::size_t>(parameter.elems))};
        backend_.download(tensor.values.data(), parameter_data() + parameter.offset_elems,
                          tensor.values.size() * sizeof(float));
        tensors.push_back(std::move(tensor));
    }
    return tensors;
}

std::vector<std::string> Net::import_parameters(const std::vector<HostTensor>& tensors,
                                                const std::string& source) {
    ParameterMatch match = match_parameters(parameters_, tensors, source);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        const HostTensor& tensor = tensors[match.tensors[i]];
        backend_.upload(parameter_data() + parameters_[i].offset_elems, tensor.values.data(),
                        tensor.values.size() * sizeof(float));
    }
    return std::move(match.remarks);
}

Pass Net::bound(Pass pass) const {
    pass.parameters = parameter_data();
    pass.gradients = gradient_data();
    return pass;
}

void Net::forward(const Pass& pass) {
    const Pass with_data = bound(pass);
    const float* x = input();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        float* y = pass.training ? train_output_[i] : eval_output_[i];
        layers_[i]->forward(backend_, with_data, x, y);
        x = y;
    }
    logits_ = x;
}

void Net::loss(const Pass& pass, float scale, float* sums) {
    backend_.cross_entropy(
        {classes_, logits_, labels(), scale, pass.training ? gradient_[0].get() : nullptr, sums},
        pass.n);
}

void Net::backward_weights(Layer& layer, const Pass& pass, const float* x, const float* dy) {
    layer.backward_weights(backend_, bound(pass), x, dy);
}

void Net::backward(const Pass& pass, const std::function<void(std::int64_t)>& ready,
                   const Take& take) {
    const Pass with_data = bound(pass);
    float* dy = gradient_[0].get();
    float* other = gradient_[1].get();
    for (std::size_t i = layers_.size(); i-- > 0;) {
        Layer& layer = *layers_[i];
        const float* x = i == 0 ? input() : train_output_[i - 1];
        if (!layer.parameters.empty()) {
            // First the weights: their reduction can start while the rest is computed.
            if (!take || !take(layer, x, dy)) {
                layer.backward_weights(backend_, with_data, x, dy);
            }
            ready(layer.parameters.front().offset_elems);
        }
        if (i <= first_weighted_) {
            return;
        }
        float* dx = layer.in_place() ? dy : other;
        layer.backward_data(backend_, with_data, x, train_output_[i], dy, dx);
        if (!layer.in_place()) {
            std::swap(dy, other);
        }
    }
}

}  // namespace gyre::model
