// What products on tensor cores are made of, on the emulated GPU, against plain loops.
#include <bit>
#include <vector>

#include "kernels/base/error.hpp"
#include "kernels/emulation/emulator.hpp"
#include "tests/catch.hpp"
#include "tests/tensor_kernels.hpp"

namespace gyre::emulated {
namespace {

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

// A small integer as the type has it.
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

TEST_CASE("fragments of the emulated tensor cores are those of the instructions' manual",
          "[emulation]") {
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

}  // namespace gyre::emulated
