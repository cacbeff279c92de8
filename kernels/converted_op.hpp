// Operations on values in 16 bits, for every backend: its own where it has such, else its float32
// ones between conversions.
//
// A converted operation widens what it reads, runs the float32 operation, and narrows what that has
// written: the same values on every device but for the order of its sums. Weights of convolutions
// and linear layers are rounded first, as tensor cores have them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/backend.hpp"

namespace gyre {

// Float32 memory for as long as one operation of a net runs, or something between two of them.
class WideMemory {
 public:
    explicit WideMemory(Backend& backend) : backend_(backend) {}
    // So many floats at least; before allocate(), which makes it two halves of whole lines.
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

// As the backend's make(), with conversions where it has the operation in float32 alone; null: it
// has neither. The operation reserves what it needs of `memory`, which must outlive it. Between its
// functions of a backward pass nothing else may use that, but for an operation of two inputs.
// A converted backward_params() takes x and dy in float32 as well, of any number of images.
std::unique_ptr<Op> make_op(WideMemory& memory, const std::string& name, const OpSpec& spec,
                            const OpSizes& sizes, DataType type);

}  // namespace gyre
