// The metadata that gyre train stores in a file of weights.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "data/dataset.hpp"
#include "kernels/ops/shapes.hpp"
#include "model/safetensors.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

// An empty text if there is nothing.
class Stored {
 public:
    Stored(const TensorFile& weights, const std::string& path) : weights_(weights), path_(path) {}

    std::string text(const std::string& key) const;
    // Empty if the metadata have none, or none that makes sense.
    std::optional<Normalisation> normalisation(const std::string& prefix) const;
    std::optional<int> classes() const;
    std::optional<Shape> shape() const;
    // How images are brought to the net's size; throws if the metadata say it wrongly.
    std::optional<Resize> resize() const;
    std::vector<std::string> class_names() const;
    // The shards of the training; 0: none, or not known.
    int shards() const;

    // Everything needed to make the net again; throws if the metadata lack it.
    struct Trained {
        std::string model;  // source
        Shape shape;
        int classes;
        Normalisation normalisation;
        Resize resize;
    };
    Trained trained() const;

    [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;

 private:
    const TensorFile& weights_;
    const std::string path_;
};

}  // namespace gyre::train
