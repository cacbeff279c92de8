// The user's settings for the net and its loss.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/data_type.hpp"
#include "model/init.hpp"

namespace gyre::model {

// The precision of a net: float32; that with operands of products rounded to TF32; or values
// between operations and operands of products in 16 bits, with all sums, weights and updates in
// float32.
enum class Precision { fp32, tf32, bf16, fp16 };
inline const std::vector<std::pair<std::string, Precision>> kPrecisions = {
    {"fp32", Precision::fp32},
    {"tf32", Precision::tf32},
    {"bf16", Precision::bf16},
    {"fp16", Precision::fp16}};
inline const std::string& name_of(Precision precision) {
    return kPrecisions[static_cast<std::size_t>(precision)].first;
}
// The type of activations and their gradients between operations; the logits' as the loss has them,
// and all else, are float32.
constexpr DataType type_of(Precision precision) {
    return precision == Precision::bf16   ? DataType::bfloat16
           : precision == Precision::fp16 ? DataType::float16
                                          : DataType::float32;
}

struct NetSpec {
    std::string model = "net";  // a built-in net, or a file
    std::string init = {};      // a file of weights to start from; empty: they are drawn
    bool finetune = false;      // layers that the file does not fit are drawn
    WeightInit weight_init = WeightInit::automatic;
    std::string init_scale = {};  // PATTERN=F,...: of parameters that begin as F times that
    std::string whiten = {};      // a convolution that begins as whiten.hpp says; empty: none does
    bool dropout = true;
    Precision precision = Precision::fp32;
    // For comparisons: whether operations are fused, and whether a training pass in float32 is one
    // operation, as far as the backend offers that.
    bool fuse = true, pass = true;
    // Batchnorms become part of the layers before them, in a net that only evaluates.
    bool fold = false;
};

// The loss of training passes; evaluations have none of it.
struct LossSpec {
    float label_smoothing = 0.0f;  // in [0, 1)
    // [classes], by which an image's loss is multiplied, by its label, once they are divided by
    // their mean over the training images; empty: none are.
    std::vector<float> class_weights = {};
    bool balanced = false;  // class_weights are 1 / the number of a class's training images

    bool mixed = false;  // training images are mixed from two, whose labels count

    bool plain() const {
        return label_smoothing == 0.0f && class_weights.empty() && !balanced && !mixed;
    }
};

}  // namespace gyre::model
