// The interpreter's mma and ldmatrix, written from NVIDIA's manual of PTX, against the layouts that
// CuTe states for the same instructions: MMA_Traits<SM80_16x8x8_F32TF32TF32F32_TN>,
// <SM80_16x8x16_F32BF16BF16F32_TN> and <SM80_16x8x16_F32F16F16F32_TN>,
// Copy_Traits<SM75_U32x4_LDSM_N> and <SM75_U16x8_LDSM_T>. They are strides of (thread, value) in
// matrices whose first extent (m or n) is contiguous, and in bits of shared memory.
#include <random>

#include "tests/ptx/instructions.hpp"
#include "tests/ptx/warp.hpp"
#include "tests/support/catch.hpp"

namespace gyre::ptx {
namespace {

enum class Type { tf32, bf16, f16 };

// A small integer.
std::uint32_t bits_of(Type type, int value) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    if (type == Type::tf32) {
        return bits;
    }
    if (type == Type::bf16) {
        return bits >> 16;
    }
    const std::uint32_t exponent = bits >> 23 & 0xffu, sign = bits >> 31 << 15;
    return value == 0 ? 0 : sign | (exponent - 127 + 15) << 10 | (bits & 0x7fffffu) >> 13;
}

// Registers of one warp, which instructions name by their numbers.
struct OneWarp {
    explicit OneWarp(int count) : words(static_cast<std::size_t>(count) * kLanes) {
        warp.registers = reinterpret_cast<std::uint8_t*>(words.data());
        warp.block = &block;
    }
    std::uint32_t& word(int number, int thread) {
        return words[static_cast<std::size_t>(number) * kLanes + static_cast<std::size_t>(thread)];
    }
    static constexpr std::int32_t kBytes = kLanes * 4;  // of a register
    std::vector<std::uint32_t> words;
    Block block;
    Warp warp;
};

void check_mma(const std::string& name, Type type) {
    INFO(name);
    constexpr int kA = 0, kB = 4, kC = 6, kD = 10, kCount = 14;
    const bool halves = type != Type::tf32;
    const int depth = halves ? 16 : 8, per_word = halves ? 2 : 1;
    std::mt19937 random(1);
    const auto number = [&] { return static_cast<int>(random() % 17) - 8; };
    int a[16][16], b[16][8], c[16][8];
    for (auto* const matrix : {&a[0][0], &b[0][0], &c[0][0]}) {
        for (int i = 0; i < (matrix == &a[0][0] ? 256 : 128); ++i) {
            matrix[i] = number();
        }
    }
    OneWarp one(kCount);
    for (int thread = 0; thread < 32; ++thread) {
        const int t0 = thread % 4, t1 = thread / 4;
        for (int v = 0; v < 4 * per_word; ++v) {
            const int at = halves ? t0 * 32 + t1 + v % 2 * 16 + v / 2 % 2 * 8 + v / 4 * 128
                                  : t0 * 16 + t1 + v % 2 * 8 + v / 2 * 64;
            one.word(kA + v / per_word, thread) |= bits_of(type, a[at % 16][at / 16])
                                                   << v % per_word * 16;
        }
        for (int v = 0; v < 2 * per_word; ++v) {
            const int at = halves ? t0 * 16 + t1 + v % 2 * 8 + v / 2 * 64 : t0 * 8 + t1 + v * 32;
            one.word(kB + v / per_word, thread) |= bits_of(type, b[at / 8][at % 8])
                                                   << v % per_word * 16;
        }
        for (int v = 0; v < 4; ++v) {
            const int at = t0 * 32 + t1 + v % 2 * 16 + v / 2 * 8;
            one.word(kC + v, thread) = bits_of(Type::tf32, c[at % 16][at / 16]);
        }
    }
    Instruction instruction;
    for (int i = 0; i < kD; ++i) {
        instruction.sources[i] = i * OneWarp::kBytes;
    }
    for (int i = 0; i < 4; ++i) {
        instruction.results[i] = (kD + i) * OneWarp::kBytes;
    }
    const Handler handler = find_handler(name);
    REQUIRE(handler != nullptr);
    handler(one.warp, instruction, kAllLanes);
    int wrong = 0;
    for (int thread = 0; thread < 32; ++thread) {
        for (int v = 0; v < 4; ++v) {
            const int at = thread % 4 * 32 + thread / 4 + v % 2 * 16 + v / 2 * 8;
            int sum = c[at % 16][at / 16];
            for (int k = 0; k < depth; ++k) {
                sum += a[at % 16][k] * b[k][at / 16];
            }
            wrong += one.word(kD + v, thread) != bits_of(Type::tf32, sum);
        }
    }
    CHECK(wrong == 0);
}

void check_ldmatrix(const std::string& name, bool transposed) {
    INFO(name);
    OneWarp one(5);
    std::vector<std::uint8_t> shared(kSharedBegin + 4096);
    std::mt19937 random(2);
    for (std::uint8_t& byte : shared) {
        byte = static_cast<std::uint8_t>(random());
    }
    one.block.shared = shared.data();
    one.block.shared_end = static_cast<std::uint32_t>(shared.size());
    std::uint8_t rows[512];  // 128 bits of each thread
    for (int thread = 0; thread < 32; ++thread) {
        const int place = thread * 7 % 32 * 112 + thread % 3 * 16;
        one.word(0, thread) = kSharedBegin + static_cast<std::uint32_t>(place);
        std::memcpy(rows + thread * 16, shared.data() + one.word(0, thread), 16);
    }
    Instruction instruction;
    for (int i = 0; i < 4; ++i) {
        instruction.results[i] = (1 + i) * OneWarp::kBytes;
    }
    const Handler handler = find_handler(name);
    REQUIRE(handler != nullptr);
    handler(one.warp, instruction, kAllLanes);
    const auto half = [&](int bit) {
        return static_cast<std::uint32_t>(rows[bit / 8] | rows[bit / 8 + 1] << 8);
    };
    int wrong = 0;
    for (int thread = 0; thread < 32; ++thread) {
        for (int j = 0; j < 4; ++j) {
            const int low =
                transposed ? thread % 4 * 256 + thread / 4 * 16 + j * 1024 : thread * 32 + j * 1024;
            const int high = low + (transposed ? 128 : 16);
            wrong += one.word(1 + j, thread) != (half(high) << 16 | half(low));
        }
    }
    CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("fragments of mma are where CuTe has them") {
    check_mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", Type::tf32);
    check_mma("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", Type::bf16);
    check_mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", Type::f16);
}

TEST_CASE("ldmatrix brings to each lane what CuTe says") {
    check_ldmatrix("ldmatrix.sync.aligned.m8n8.x4.shared.b16", false);
    check_ldmatrix("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", true);
}

}  // namespace gyre::ptx
