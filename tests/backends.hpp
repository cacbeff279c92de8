// What the tests of the kernels share: guarded device memory, and every backend there is here.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "tests/reference.hpp"

namespace gyre::test {

using reference::Floats;
using reference::Sums;

// Random values in [-1, 1), the same in every run.
Floats random_floats(std::int64_t elems, std::uint32_t stream);

// Device memory between two guards, poisoned with NaN: what a kernel does not write stays NaN, and
// what it writes outside changes a guard. Under the checker there are no guards, as it sees itself
// what lies outside.
class Guarded {
 public:
    Guarded(Guarded&&) = default;
    Guarded(Backend& backend, std::int64_t elems);
    ~Guarded();
    float* get() const { return buffer_.get() + kGuard; }
    Floats download() const;

 private:
#if defined(GYRE_CHECKER)
    static constexpr int kGuard = 0;
#else
    static constexpr int kGuard = 64;
#endif
    static constexpr float kCanary = -12345.0f;  // which ReLU would change
    Backend& backend_;
    std::int64_t elems_;
    DeviceBuffer<float> buffer_;
};

// One backend and what the tests need around it.
class Bench {
 public:
    explicit Bench(Backend& on) : backend(on) {}

    Guarded vector(const Floats& values);
    Guarded empty(std::int64_t elems) { return {backend, elems}; }
    Guarded activation(const Shape& shape, int n, const Floats& values);
    Guarded empty_activation(const Shape& shape, int n) {
        return {backend, backend.activation_elems(shape, n)};
    }
    Floats read(const Shape& shape, int n, const Guarded& device);
    template <typename T>
    DeviceBuffer<T> array(const std::vector<T>& values) {
        DeviceBuffer<T> device(backend, static_cast<std::int64_t>(values.size()));
        backend.upload(device.get(), values.data(), device.bytes());
        return device;
    }
    // Sums of products: each element within the bound of its rounding errors. filtered: they may
    // come from Winograd's filtering on the CPU.
    void check_close(const Floats& found, const Sums& expected, bool filtered = false) const;

    Backend& backend;
    // The largest relative error of a product before it is added: 0, or that of two operands
    // rounded to TF32.
    double product_error = 0.0;
    // Libraries may compute sums by other formulas (Winograd, FFT), for which only the norm of all
    // errors together is bounded, and does not fall with the number of terms: a transform of N
    // points is off by 7 log2(N) u at most (Higham, Accuracy and Stability of Numerical Algorithms,
    // section 24.1), and there are three, of up to 32 x 32 points.
    bool normwise = false;
    static constexpr int kTransformRoundings = 3 * 7 * 10;
    // Whether convolutions may be computed by Winograd's filtering, where an error is shared by a
    // tile: of all shapes here it was at most 24 u times the norm of the products' magnitudes.
    bool may_filter = false;
    static constexpr int kFilterRoundings = 64;
};

double dot(const Floats& a, const Floats& b);
double norm(const Floats& a);

// Calls test(bench) for each backend that this program and machine have: the CPU's with 1 and 3
// threads; the emulated GPU's under several schedules, and with TF32; on a GPU gyre's kernels, the
// same with TF32, and the libraries'. Says once what is missing. GYRE_TEST_BACKENDS=gpu leaves all
// but the last away, and fails where there is no GPU; cpu and emulated likewise.
void on_every_backend(const std::function<void(Bench&)>& test);

}  // namespace gyre::test
