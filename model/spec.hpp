// A net as data: the list of its layers, read from a small text file, one layer a line.
//
//   # comment                        nothing
//   conv OUT|classes kK [sS] [pP] [gG] [nobias]
//                                    2-D convolution, K x K window, stride S (1), padding P (0),
//                                    G groups of channels (1; depthwise: as many as channels)
//   maxpool K [sS] [pP] [ceil]       max-pooling, K x K window, stride S (K), padding P (0), the
//                                    number of windows rounded down or, with ceil, up
//   avgpool K [sS] | avgpool global  average over K x K windows | each whole plane
//   batchnorm [local] [eps E] [momentum M] [noaffine]
//                                    statistics over the global batch, or each rank's share; 1e-5,
//                                    0.1; without weight and bias
//   groupnorm G [eps E] [noaffine]   statistics of each image, over G groups of channels
//   relu | relu6 | gelu | silu | sigmoid | hardsigmoid | hardswish
//   leaky_relu SLOPE                 SLOPE > 0, of what is below zero
//   dropout P | dropout2d P          drops elements | whole channels with probability P in [0, 1]
//   flatten                          implied before the first linear layer
//   linear OUT                       OUT is a number, or the word `classes`
//   as NAME                          a name for the value so far
//   add NAME                         adds the value of that name (a residual connection)
//   mul NAME                         multiplies that value's channels by numbers (squeeze and
//                                    excitation)
//   concat NAME                      puts that value's channels before those of the value so far
//   chunk K/N                        the K-th of N equal parts of its channels (K from 1), as
//                                    torch.chunk divides them
//   shuffle G                        its channels in G groups, which take turns (ShuffleNet)
//   from NAME                        continues from that value: a branch, such as a 1 x 1
//                                    projection
//   log-softmax                      only as the last line, where it is implied: the loss has it
//
// The words, their usage and what becomes of them: model/layers.cpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gyre::model {

struct LayerType;  // model/layers.hpp

struct LayerSpec {
    const LayerType* type = nullptr;
    int out = 0;  // channels or features; 0: the number of classes
    int kernel = 1, stride = 1, padding = 0, groups = 1;
    bool bias = true;
    bool ceil = false;
    bool affine = true;       // of norms
    int part = 1, parts = 1;  // of chunk
    float probability = 0.0f;
    float slope = 0.0f;                     // of leaky_relu
    bool local = false;                     // statistics of a rank's share
    float epsilon = 0.0f, momentum = 0.0f;  // of norms; 0: PyTorch's defaults
    std::string name;                       // of a value
    std::string text;                       // as it was written
    int line = 0;                           // in its file, from 1
};

struct ModelSpec {
    std::string name;    // a built-in net's, or the file's path
    std::string source;  // the text it was read from
    std::vector<LayerSpec> layers;
};

// Throws Error(bad_input) naming source, line and what was expected.
ModelSpec parse_model(std::string_view text, const std::string& name);

// A built-in net by name, or a file.
ModelSpec load_model(const std::string& name_or_path);

std::vector<std::string> builtin_models();

}  // namespace gyre::model
