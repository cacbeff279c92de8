// A net on a backend: its layers, its flat buffers, and one pass forward and backward.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "model/layers.hpp"
#include "model/safetensors.hpp"
#include "model/spec.hpp"

namespace gyre::model {

struct NetOptions {
    int train_batch = 64;   // the most images in a training pass
    int eval_batch = 1000;  // the most images in an evaluation pass
    bool dropout = true;
    // The numbers of images for which kernels are chosen, as passes have them (Sharding::sizes());
    // empty: the most images.
    std::vector<int> train_sizes = {}, eval_sizes = {};
};

// Memory. Parameters lie in one flat buffer, each beginning at a multiple of kAlignElems; gradients
// in another with the same offsets, followed by kTailElems floats that travel with them through
// the reduction: the step's loss and other sums. The padding is always zero. Activations of a
// training pass are all kept for the backward pass; an evaluation pass needs two at a time; both
// use the same arena. Gradients of activations alternate between two buffers.
class Net {
 public:
    static constexpr std::int64_t kAlignElems = 16;
    static constexpr std::int64_t kTailElems = 16;

    Net(Backend& backend, const ModelSpec& model, const Shape& input, int classes,
        const NetOptions& options);

    const std::vector<Parameter>& parameters() const { return parameters_; }
    std::int64_t parameter_count() const;                    // without padding
    std::int64_t flat_elems() const { return flat_elems_; }  // parameters with padding
    std::int64_t gradient_elems() const { return flat_elems_ + kTailElems; }
    std::int64_t tail_offset() const { return flat_elems_; }
    // Where the parameters of each layer begin in the flat buffers, ascending.
    const std::vector<std::int64_t>& layer_begins() const { return layer_begins_; }
    float* parameter_data() const { return flat_parameters_.get(); }
    float* gradient_data() const { return flat_gradients_.get(); }
    const Shape& input_shape() const { return input_shape_; }

    // PyTorch's defaults for Conv2d and Linear: all values U(-1/sqrt(fan_in), 1/sqrt(fan_in)),
    // from the stream (seed, init, index of the parameter).
    void initialise(std::uint64_t seed);
    // Copies to and from host tensors. import matches them as match_parameters() does, and returns
    // its remarks for the user; `source` says where the tensors come from.
    std::vector<HostTensor> export_parameters() const;
    std::vector<std::string> import_parameters(const std::vector<HostTensor>& tensors,
                                               const std::string& source);

    // Where a batch goes: x [n][input], labels [n].
    float* input() const { return input_.get(); }
    std::int32_t* labels() const { return labels_.get(); }

    void forward(const Pass& pass);
    // After forward(): sums [2] on the device = scale * sum of losses, number of correct images;
    // in a training pass also the gradient of the first.
    void loss(const Pass& pass, float scale, float* sums);
    // After loss() in a training pass. Calls ready(offset) when all gradients at and after offset
    // are final. take (may be empty) is offered each layer with parameters, x [n][in] and dy
    // [n][out] first, and returns whether it sees to their gradients itself.
    using Take = std::function<bool(Layer&, const float* x, const float* dy)>;
    void backward(const Pass& pass, const std::function<void(std::int64_t)>& ready,
                  const Take& take = {});
    // Writes the gradients of a layer's parameters, from x and dy of pass.n images.
    void backward_weights(Layer& layer, const Pass& pass, const float* x, const float* dy);
    const std::vector<std::unique_ptr<Layer>>& layers() const { return layers_; }

 private:
    Pass bound(Pass pass) const;

    Backend& backend_;
    Shape input_shape_;
    int classes_;
    std::vector<std::unique_ptr<Layer>> layers_;
    std::vector<Parameter> parameters_;
    std::vector<std::int64_t> layer_begins_;
    std::int64_t flat_elems_ = 0;
    std::size_t first_weighted_ = 0;  // no layer up to this one needs the gradient of its input
    DeviceBuffer<float> flat_parameters_, flat_gradients_;
    DeviceBuffer<float> input_, arena_, gradient_[2];
    DeviceBuffer<std::int32_t> labels_;
    std::vector<float*> train_output_, eval_output_;  // [layer]
    const float* logits_ = nullptr;                   // of the last forward pass
};

}  // namespace gyre::model
