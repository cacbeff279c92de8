// Operations on 16-bit values, for every backend: its own if it has them, otherwise its float32
// operations between conversions.
//
// A converted operation widens its inputs, runs the float32 operation and narrows the results: the
// same values on every device except for the order of sums. Weights of convolutions and linear
// layers are rounded first, as on tensor cores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/ops/backend.hpp"

namespace gyre {

// Float32 memory for the duration of one operation of a net, or of work between two operations.
class WideMemory {
 public:
    explicit WideMemory(Backend& backend) : backend_(backend) {}
    // Reserves at least this many floats. allocate() follows, and makes two halves of whole lines.
    void reserve(std::int64_t elems) { elems_ = std::max(elems_, elems); }
    void allocate() { buffer_ = {backend_, (elems_ + 127) / 128 * 128}; }
    float* get() const { return buffer_.get(); }
    std::int64_t elems() const { return buffer_.elems(); }
    Backend& backend() const { return backend_; }

 private:
    Backend& backend_;
    std::int64_t elems_ = 0;
    DeviceBuffer<float> buffer_;
};

// Like the backend's make(), but with conversions if the backend only has the operation in float32;
// null: it has neither. The operation reserves its part of `memory`, which must outlive it and must
// not be used by others between the functions of its backward pass, unless it has two inputs.
// A converted backward_params() also accepts x and dy in float32, for any number of images.
std::unique_ptr<Op> make_op(WideMemory& memory, const std::string& name, const OpSpec& spec,
                            const OpSizes& sizes, DataType type);

}  // namespace gyre
