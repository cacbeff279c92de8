// The building blocks of tensor-core products, compared with plain loops. Compiled twice: for the
// emulated GPU, and with CUDA for a GPU.
#include <bit>
#include <cstdio>
#include <utility>
#include <vector>

#include "base/error.hpp"
#if defined(GYRE_EMULATED)
#include "kernels/emulation/emulator.hpp"
#else
#include "tests/support/backends.hpp"
#endif
#include "tests/emulation/tensor_kernels.hpp"
#include "tests/support/catch.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

#if defined(GYRE_EMULATED)
#define TENSOR_TAGS "[emulation]"
using emulator::set_schedule;
bool has_device() {
    return true;
}
#else
#define TENSOR_TAGS "[gpu]"
void set_schedule(std::uint64_t) {}
bool has_device() {
    if (!test::gpu_wanted()) {
        return false;
    }
    if (!has_tensor_kernels()) {
        static const int said = std::printf(
            "skipped: the tests' own tensor-core kernels (they are only built for the last of "
            "CMAKE_CUDA_ARCHITECTURES, and this GPU is a different one)\n");
        static_cast<void>(said);
        return false;
    }
    return true;
}
#endif

template <typename T>
class OnDevice {
 public:
    explicit OnDevice(const std::vector<T>& values)
        : bytes_(values.size() * sizeof(T)), memory_(static_cast<T*>(allocate(bytes_))) {
        stream.upload(memory_, values.data(), bytes_);
        stream.synchronize();
    }
    ~OnDevice() { release(memory_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    T* get() const { return memory_; }
    std::vector<T> download() {
        std::vector<T> values(bytes_ / sizeof(T));
        stream.download(values.data(), memory_, bytes_);
        stream.synchronize();
        return values;
    }
    Stream stream;

 private:
    std::size_t bytes_;
    T* memory_;
};

// The bits of a small integer in the type.
std::uint32_t bits_of(MatrixType type, int value) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    if (type == MatrixType::tf32) {
        return bits;
    }
    if (type == MatrixType::bf16) {
        return bits >> 16;
    }
    const std::uint32_t exponent = bits >> 23 & 0xffu;
    const std::uint32_t magnitude =
        value == 0 ? 0 : (exponent - 127 + 15) << 10 | (bits & 0x7fffffu) >> 13;
    return bits >> 31 << 15 | magnitude;
}

}  // namespace

TEST_CASE("tensor-core fragments match the instructions' manual", TENSOR_TAGS) {
    if (!has_device()) {
        return;
    }
    for (const MatrixType type : {MatrixType::tf32, MatrixType::bf16, MatrixType::f16}) {
        for (const MatrixLayout layout : {MatrixLayout::rows, MatrixLayout::transposed}) {
            if (type == MatrixType::tf32 && layout == MatrixLayout::transposed) {
                continue;  // there is no such instruction
            }
            const int per_word = type == MatrixType::tf32 ? 1 : 2, depth = 8 * per_word;
            const auto element = [](int row, int k) { return (row * 7 + k * 5) % 17 - 8; };
            const auto words = [&](int rows, int first) {
                std::vector<std::uint32_t> all(static_cast<std::size_t>(rows * 8));
                for (int row = 0; row < rows; ++row) {
                    for (int k = 0; k < depth; ++k) {
                        all[static_cast<std::size_t>(row * 8 + k / per_word)] |=
                            bits_of(type, element(first + row, k)) << k % per_word * 16;
                    }
                }
                return all;
            };
            OnDevice a(words(16, 0)), b(words(8, 100));
            OnDevice d(std::vector<float>(16 * 8));
            start_fragments(d.stream, type, layout, a.get(), b.get(), d.get());
            std::vector<float> expected;
            for (int i = 0; i < 16; ++i) {
                for (int j = 0; j < 8; ++j) {
                    int sum = 0;
                    for (int k = 0; k < depth; ++k) {
                        sum += element(i, k) * element(100 + j, k);
                    }
                    expected.push_back(static_cast<float>(sum));
                }
            }
            INFO("type " << static_cast<int>(type) << ", layout " << static_cast<int>(layout));
            CHECK(d.download() == expected);
        }
    }
}

// Small integers have exact sums in every type and order.
TEST_CASE("products of every type and layout are right, and the same on every GPU", TENSOR_TAGS) {
    if (!has_device()) {
        return;
    }
    using enum MatrixLayout;
    struct Extents {
        int m, n, k;
    };
    for (const MatrixType type : {MatrixType::tf32, MatrixType::bf16, MatrixType::f16}) {
        const int chunk = type == MatrixType::tf32 ? 4 : 8;
        for (const auto& [layout_a, layout_b] :
             {std::pair{rows, rows}, {rows, transposed}, {transposed, transposed}}) {
            for (const Extents& e :
                 {Extents{1, 1, 1}, {63, 130, 70}, {130, 64, 33}, {129, 131, 1100}}) {
                const auto up = [&](int elems) { return (elems + chunk - 1) / chunk * chunk; };
                // Contiguous extents are multiples of a chunk.
                const int k = layout_a == rows || layout_b == rows ? up(e.k) : e.k;
                const int m = layout_a == rows ? e.m : up(e.m);
                const int n = layout_b == rows ? e.n : up(e.n);
                const auto element = [](int row, int at) { return (row * 7 + at * 5) % 9 - 4; };
                const auto matrix = [&](MatrixType of, MatrixLayout layout, int count, int first) {
                    std::vector<std::uint16_t> halves;
                    for (int i = 0; i < count * k; ++i) {
                        const int row = layout == rows ? i / k : i % count;
                        const int at = layout == rows ? i % k : i / count;
                        const std::uint32_t bits = bits_of(of, element(first + row, at));
                        halves.push_back(static_cast<std::uint16_t>(bits & 0xffffu));
                        if (of == MatrixType::tf32) {
                            halves.push_back(static_cast<std::uint16_t>(bits >> 16));
                        }
                    }
                    return halves;
                };
                OnDevice a(matrix(type, layout_a, m, 0)), b(matrix(type, layout_b, n, 3));
                OnDevice floats_b(matrix(MatrixType::tf32, layout_b, n, 3));
                std::vector<float> expected;
                for (int i = 0; i < m; ++i) {
                    for (int j = 0; j < n; ++j) {
                        int sum = 0;
                        for (int at = 0; at < k; ++at) {
                            sum += element(i, at) * element(3 + j, at);
                        }
                        expected.push_back(static_cast<float>(sum));
                    }
                }
                INFO("type " << static_cast<int>(type) << ", " << m << " x " << n << " x " << k);
                for (const auto& [multiprocessors, floats] :
                     {std::pair{1, false}, {132, false}, {132, true}}) {
                    OnDevice c(std::vector<float>(expected.size()));
                    run_tensor_product({type, layout_a, layout_b, m, n, k, layout_a == rows ? k : m,
                                        layout_b == rows ? k : n, floats},
                                       multiprocessors, a.get(), floats ? floats_b.get() : b.get(),
                                       c.get());
                    CHECK(c.download() == expected);
                }
            }
        }
    }
}

TEST_CASE("a product's bits depend neither on the schedule nor on the number of multiprocessors",
          TENSOR_TAGS) {
    if (!has_device()) {
        return;
    }
    const int m = 100, n = 132, k = 1104;  // k is divided into parts
    const auto values = [](int count, std::uint32_t seed) {
        std::vector<float> all;
        for (int i = 0; i < count; ++i) {
            seed = seed * 1664525u + 1013904223u;
            all.push_back(static_cast<float>(seed >> 8) * 0x1p-24f - 0.5f);
        }
        return all;
    };
    OnDevice a(values(m * k, 1)), b(values(n * k, 2));
    std::vector<float> first;
    for (const std::uint64_t seed : {0, 1, 2}) {
        for (const int multiprocessors : {1, 4, 132}) {
            set_schedule(seed);
            OnDevice c(std::vector<float>(static_cast<std::size_t>(m * n)));
            run_tensor_product(
                {MatrixType::tf32, MatrixLayout::rows, MatrixLayout::transposed, m, n, k, k, n},
                multiprocessors, a.get(), b.get(), c.get());
            first = first.empty() ? c.download() : first;
            CHECK(c.download() == first);
        }
    }
    set_schedule(0);
}

// Enough parts that blocks add groups of them, and the last block adds the groups.
TEST_CASE("a product of more than eight parts adds them in groups, in every order", TENSOR_TAGS) {
    if (!has_device()) {
        return;
    }
    const int m = 5, n = 8, k = 2820;  // ten parts
    const auto element = [](int row, int at) { return (row * 7 + at * 5) % 9 - 4; };
    const auto matrix = [&](int rows, int first) {
        std::vector<float> all;
        for (int i = 0; i < rows * k; ++i) {
            all.push_back(static_cast<float>(element(first + i / k, i % k)));
        }
        return all;
    };
    OnDevice a(matrix(m, 0)), b(matrix(n, 3));
    std::vector<float> expected;
    for (int i = 0; i < m * n; ++i) {
        int sum = 0;
        for (int at = 0; at < k; ++at) {
            sum += element(i / n, at) * element(3 + i % n, at);
        }
        expected.push_back(static_cast<float>(sum));
    }
    for (const std::uint64_t seed : {0, 1, 2}) {
        set_schedule(seed);
        OnDevice c(std::vector<float>(expected.size()));
        run_tensor_product(
            {MatrixType::tf32, MatrixLayout::rows, MatrixLayout::rows, m, n, k, k, k}, 4, a.get(),
            b.get(), c.get());
        CHECK(c.download() == expected);
    }
    set_schedule(0);
}

}  // namespace gyre::SIMT_NAMESPACE
