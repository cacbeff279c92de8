// Shared parts of the kernel tests: guarded device memory, and every backend available here.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/make_backend.hpp"
#include "tests/kernels/reference.hpp"

namespace gyre::test {

using reference::Floats;
using reference::Sums;

// Random values in [-1, 1), the same in every run.
Floats random_floats(std::int64_t elems, std::uint32_t stream);

// Device memory between two guards, poisoned with NaN: what a kernel fails to write stays NaN, and
// writes outside change a guard. There are no guards under the checker, which detects accesses
// outside by itself.
class Guarded {
 public:
    Guarded(Guarded&&) = default;
    Guarded(Backend& backend, std::int64_t elems);
    ~Guarded();
    float* get() const { return buffer_.get() + kGuard; }
    Floats download() const;

 private:
#if defined(SIMT_CHECKER)
    static constexpr int kGuard = 0;
#else
    static constexpr int kGuard = 64;
#endif
    static constexpr float kCanary = -12345.0f;  // a value that ReLU would change
    Backend& backend_;
    std::int64_t elems_;
    DeviceBuffer<float> buffer_;
};

// One backend, and what tests need to use it.
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
    // Checks sums of products: each element must be within the bound of its rounding errors.
    // filtered: the sums may come from Winograd filtering on the CPU.
    void check_close(const Floats& found, const Sums& expected, bool filtered = false) const;

    Backend& backend;
    // The largest relative error of a product before it is added: 0, or that of two operands
    // rounded to TF32.
    double product_error = 0.0;
    // Libraries may compute sums by other algorithms (Winograd, FFT), for which only the norm of
    // all errors together is bounded, independently of the number of terms: a transform of N points
    // has an error of at most 7 log2(N) u (Higham, Accuracy and Stability of Numerical Algorithms,
    // section 24.1), and there are three, of up to 32 x 32 points.
    bool normwise = false;
    static constexpr int kTransformRoundings = 3 * 7 * 10;
    // True if convolutions may be computed by Winograd filtering, in which a tile shares an error:
    // over all shapes here it was at most 24 u times the norm of the products' magnitudes.
    bool may_filter = false;
    static constexpr int kFilterRoundings = 64;
};

double dot(const Floats& a, const Floats& b);
double norm(const Floats& a);

// Calls test(bench) for each backend that this program and machine have: the CPU's with 1 and 3
// threads; the emulated GPU's under several schedules, and with TF32; on a GPU gyre's own kernels,
// the same with TF32, and the libraries'. Reports once which are missing. GYRE_TEST_BACKENDS=gpu
// selects only the last group, and fails without a GPU; `cpu` and `emulated` work alike. With
// GYRE_TEST_ONCE set, as under the sanitizers, the emulated GPU runs each case under one schedule
// and without TF32, and the CPU with 3 threads only. Cases that call this, gpu_wanted() or
// on_tensor_cores() have the tag [gpu]; only these are of use on a GPU.
void on_every_backend(const std::function<void(Bench&)>& test);
// The numbers of threads with which a case runs on the CPU.
std::vector<int> cpu_threads();
// Returns whether there is a GPU for a test; reports its absence once, or fails, as above.
bool gpu_wanted();
// The same for tests of tensor cores: the emulated GPU under these schedules, and a GPU, both with
// TF32 and gyre's own kernels.
void on_tensor_cores(const std::function<void(Bench&)>& test,
                     std::initializer_list<std::uint64_t> schedules = {0, 1, 2});

}  // namespace gyre::test
