// Specs of a net's operations: the shapes of one image and what is computed. The number of images
// is not part of a spec.
//
// To add an operation, start here: define a struct with out() and add it to OpSpec.
#pragma once

#include <cstdint>
#include <variant>

#include "base/data_type.hpp"
#include "kernels/ops/batch.hpp"
#include "kernels/ops/shapes.hpp"

namespace gyre {

// y = x * mask / (1 - probability). by_channel: one random number per channel (Dropout2d). stream:
// the index of the operation's random stream in the net (base/philox.hpp).
struct DropoutSpec {
    Shape in;
    float probability = 0.5f;
    bool by_channel = false;
    std::uint32_t stream = 0;
    Shape out() const { return in; }
};

// y = max(x, 0); NaN stays NaN.
struct ReluSpec {
    Shape in;
    Shape out() const { return in; }
};

// y = f(x) for each element; formulas: kernels/ops/activations.hpp.
enum class Activation { gelu, silu, leaky_relu, relu6, sigmoid, hardsigmoid, hardswish };
struct ActivationSpec {
    Shape in;
    Activation function = Activation::gelu;
    float slope = 0.01f;  // of leaky_relu; > 0
    Shape out() const { return in; }
};

// y[c][oh][ow] = max over the window; NaN if the window contains one.
struct MaxPool2dSpec {
    MaxPool2dShape shape;
    const Shape& input() const { return shape.in; }
    Shape out() const { return shape.out(); }
};

// y[o] = b[o] + sum over c, kh, kw of w[o][c][kh][kw] * x[c][oh*stride - padding + kh][...];
// parameters: weight, bias. A factory may offer it fused with the operations that follow, in this
// order: dropout2d (probability > 0), max-pooling (pool_kernel > 0), ReLU. Between two consecutive
// convolutions, of which the first has a ReLU and no pooling, activation and gradient may be
// channels last, [n][height][width][channels], and rounded to TF32; the gradient is then already
// zero where the activation is not positive.
struct Conv2dSpec {
    Conv2dShape shape;  // of one group
    float dropout = 0.0f;
    std::uint32_t dropout_stream = 0;
    int pool_kernel = 0, pool_stride = 0;
    bool relu = false;
    bool in_channels_last = false, out_channels_last = false;  // x and dx; y and dy

    bool channels_last() const { return in_channels_last || out_channels_last; }
    bool fused() const { return dropout > 0.0f || pool_kernel > 0 || relu || channels_last(); }
    MaxPool2dShape pool() const { return {shape.out(), pool_kernel, pool_stride}; }
    Shape out() const { return pool_kernel > 0 ? pool().out() : shape.out(); }
};

// The same with several groups, of which each reads its own input channels, as torch.nn.Conv2d's
// `groups`; depthwise (Howard et al., "MobileNets", 2017) if each input channel is one:
//   y[o] = b[o] + sum over c, kh, kw of w[o][c][kh][kw] * x[g * group_inputs + c][oh*stride -
//   ...][...], g = o / group_outputs
struct GroupedConv2dSpec {
    Conv2dShape shape;
    Shape out() const { return shape.out(); }
};

// y = x w^T + b of a flattened activation; parameters: weight, bias. May be fused with a ReLU, and
// with dropout after it. If x is only read here and is the y of a layer with a ReLU, dx may be that
// layer's gradient before ReLU and dropout: dx_factor (dropout's scale of kept elements) times the
// gradient where x is positive, else zero.
struct LinearSpec {
    Shape in;
    LinearShape shape;
    bool relu = false;
    float dropout = 0.0f;  // only with a ReLU
    std::uint32_t dropout_stream = 0;
    bool dy_masked = false;
    float dx_factor = 0.0f;  // 0: dx is the gradient of x

    bool fused() const { return relu || dy_masked || dx_factor > 0.0f; }
    Shape out() const { return {shape.out_features, 1, 1}; }
};

// y = x + x2.
struct AddSpec {
    Shape in;
    Shape out() const { return in; }
};

// y[c] = x[c] * x2[c], where x has one number for each channel: the gate of "Squeeze-and-excitation
// networks" (Hu et al., CVPR 2018).
struct MulSpec {
    Shape in, in2;  // in: {in2.channels, 1, 1}
    Shape out() const { return in2; }
};

// y = x2 and after its channels x, which has other channels at most (torch.cat along them).
struct ConcatSpec {
    Shape in, in2;
    Shape out() const { return {in2.channels + in.channels, in.height, in.width}; }
};

// Some of a value's channels, in an order: y[c] = x[first + c % groups * (count / groups) + c /
// groups]. With one group these are the channels from `first` on (torch.chunk); with more, all of
// them, and the groups take turns (the shuffle of "ShuffleNet", Zhang et al., CVPR 2018).
struct ChannelsSpec {
    Shape in;
    int first = 0, count = 1, groups = 1;  // count: a multiple of groups
    Shape out() const { return {count, in.height, in.width}; }
    // The channel of x that y's channel c is, and the reverse; -1: none.
    GYRE_HOST_DEVICE int source(int c) const {
        return first + c % groups * (count / groups) + c / groups;
    }
    GYRE_HOST_DEVICE int reader(int c) const {
        const int at = c - first, of_group = count / groups;
        return at < 0 || at >= count ? -1 : at % of_group * groups + at / of_group;
    }
};

// y = scale * sum over the window, scale = 1 / number of elements in the window.
struct AvgPool2dSpec {
    Shape in;
    int kernel_height = 2, kernel_width = 2, stride = 2;
    float scale() const { return 1.0f / static_cast<float>(kernel_height * kernel_width); }
    Shape out() const {
        return {in.channels, window_extent(in.height, kernel_height, stride, 0),
                window_extent(in.width, kernel_width, stride, 0)};
    }
};

// torch.nn.BatchNorm2d (Ioffe and Szegedy, ICML 2015). For each channel, over images and pixels,
//   y = (x - mean) * inverse * weight + bias,   inverse = 1 / sqrt(variance + epsilon)
// A training pass uses the batch's mean and biased variance, and updates
//   running = (1 - momentum) * running + momentum * (mean, or the unbiased variance).
// An evaluation pass uses the running statistics. Backward, with xn = (x - mean) * inverse,
//   dbias = sum dy,  dweight = sum dy * xn
//   dx = weight * inverse * (dy - mean of dy - xn * mean of dy * xn).
// Statistics are those of the global batch (SyncBatchNorm) in three phases, in which its leaves
// meet; or, in one, those of this rank's images, or of this leaf's, if `local`.
// Parameters: weight, bias; state: running_mean, running_var.
struct BatchNorm2dSpec {
    Shape in;
    bool local = false;
    float momentum = 0.1f;
    float epsilon = 1e-5f;
    Shape out() const { return in; }

    // The number of values in each channel's statistics; may be 0.
    std::int64_t count(const Batch& batch) const {
        return (local || batch.global_n == 0 ? batch.n : batch.global_n) * in.plane_elems();
    }
    // Once for all leaves: their sums, which are `stride` values apart, become one over the ranks,
    // in the first one's place.
    void add_up(const Batch& batch, float* values, std::int64_t elems, std::int64_t stride) const {
        if (!local && batch.ranks != nullptr && batch.leaf == 0) {
            batch.ranks->sum({values, elems, batch.leaves, stride});
        }
    }
    static constexpr int kPhases = 3;  // the sum, that of squares, and the result
    int phases() const { return local ? 1 : kPhases; }
    // The most values that are summed over leaves and ranks at once; 0: none.
    std::int64_t sum_elems() const { return local ? 0 : std::int64_t{2} * in.channels; }
    // Where a leaf's sums are: if `local`, no other leaf's are needed at the same time.
    int leaf(const Batch& batch) const { return local ? 0 : batch.leaf; }
    void move(float& running, float measured) const { running += momentum * (measured - running); }
};

// torch.nn.GroupNorm (Wu and He, ECCV 2018), of which one group of a flat value is
// torch.nn.LayerNorm (Ba et al., 2016), and one channel a group torch.nn.InstanceNorm2d with
// affine=True. For each image and each of `groups` groups of neighbouring channels, over the
// channels and their pixels,
//   y = (x - mean) * inverse * weight[c] + bias[c],   inverse = 1 / sqrt(variance + epsilon)
// with the biased variance. Backward, with xn = (x - mean) * inverse and g = dy * weight[c],
//   dbias[c] = sum dy,  dweight[c] = sum dy * xn,  over images and pixels
//   dx = inverse * (g - mean of g - xn * mean of g * xn),  over the group.
// Parameters: weight, bias.
struct GroupNormSpec {
    Shape in;
    int groups = 1;  // divides the channels
    float epsilon = 1e-5f;
    Shape out() const { return in; }
    int group_channels() const { return in.channels / groups; }
    std::int64_t group_elems() const { return group_channels() * in.plane_elems(); }
};

using OpSpec = std::variant<Conv2dSpec, GroupedConv2dSpec, LinearSpec, MaxPool2dSpec, AvgPool2dSpec,
                            ReluSpec, ActivationSpec, DropoutSpec, BatchNorm2dSpec, AddSpec,
                            MulSpec, ConcatSpec, ChannelsSpec, GroupNormSpec>;

inline bool is_fused(const OpSpec& spec) {
    return std::visit(
        [](const auto& each) {
            if constexpr (requires { each.fused(); }) {
                return each.fused();
            } else {
                return false;
            }
        },
        spec);
}

}  // namespace gyre
