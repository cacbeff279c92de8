// A net as an ONNX model (https://onnx.ai, onnx.proto), for inference elsewhere.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/graph.hpp"
#include "model/safetensors.hpp"

namespace gyre::model {

// The net as it evaluates, without dropout: from `input`, float32 [N][C][H][W], N any number,
// normalised as in training, to `logits`, float32 [N][classes]. graph: not fused, for images of
// this shape; tensors: its parameters and state by their names; metadata go into the model's. The
// file's bytes, of opset 13, which ONNX 1.8 and later read. Throws Error(bad_input) if they
// would be 2 GiB or more, which protocol buffers cannot be.
std::string onnx_model(const Graph& graph, const Shape& image,
                       const std::vector<HostTensor>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace gyre::model
