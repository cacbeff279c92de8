#include "kernels/cpu/bf16_tiles.hpp"

#include <array>

#if defined(__AVX512F__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define GYRE_AMX 1
#elif defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gyre::cpu {
namespace {

// While it exists, this thread's arithmetic takes subnormal operands as zero, and makes none.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
    FlushSubnormals() : before_(_mm_getcsr()) {
        _mm_setcsr(before_ | 0x8040u);
    }
    ~FlushSubnormals() {
        _mm_setcsr(before_);
    }

 private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" ::"r"(before_ | (std::uint64_t{1} << 24)) : "memory");
    }
    ~FlushSubnormals() {
        asm volatile("msr fpcr, %0" ::"r"(before_) : "memory");
    }

 private:
    std::uint64_t before_;
#endif
};

// kRegs registers of kRows rows of one tile. A call, so that its arithmetic stays where subnormals
// are flushed.
template <int kRows, int kRegs>
[[gnu::noinline]] void add_rows(const Bf16Loops& loops, const Bfloat16* a, const Bfloat16* b,
                                int pairs, bool first, float* sums) {
    const auto word = [](const Bfloat16* at) {
        std::uint32_t both;
        std::memcpy(&both, at, sizeof both);
        return both;
    };
    for (int lane = 0; lane < kTileExtent; lane += kRegs * kVec) {
        Vec acc[kRows][kRegs];
        for (int i = 0; i < kRows * kRegs; ++i) {
            acc[i / kRegs][i % kRegs] =
                first ? Vec{} : load(sums + i / kRegs * kTileExtent + lane + i % kRegs * kVec);
        }
        for (int i = 0; i < loops.outer; ++i) {
            for (int j = 0; j < loops.inner; ++j) {
                const Bfloat16* const at_a = a + loops.a_outer[i] + j * loops.a_inner;
                const Bfloat16* const at_b = b + loops.b_outer[i] + j * loops.b_inner + 2 * lane;
                Vec even[kRows][kRegs] = {}, odd[kRows][kRegs] = {};
                for (int pair = 0; pair < pairs; ++pair) {
                    WordVec both[kRegs];
                    std::memcpy(both, at_b + pair * 2 * kTileExtent, sizeof both);
                    for (int r = 0; r < kRows; ++r) {
                        const std::uint32_t of_row = word(at_a + 2 * (r * pairs + pair));
                        const Vec a_even = broadcast(narrow::float_of(of_row << 16));
                        const Vec a_odd = broadcast(narrow::float_of(of_row & 0xffff0000u));
                        for (int v = 0; v < kRegs; ++v) {
                            even[r][v] = multiply_add(a_even, reinterpret_cast<Vec>(both[v] << 16),
                                                      even[r][v]);
                            odd[r][v] = multiply_add(
                                a_odd, reinterpret_cast<Vec>(both[v] & 0xffff0000u), odd[r][v]);
                        }
                    }
                }
                for (int r = 0; r < kRows; ++r) {
                    for (int v = 0; v < kRegs; ++v) {
                        acc[r][v] += even[r][v] + odd[r][v];
                    }
                }
            }
        }
        for (int i = 0; i < kRows * kRegs; ++i) {
            store(sums + i / kRegs * kTileExtent + lane + i % kRegs * kVec,
                  acc[i / kRegs][i % kRegs]);
        }
    }
}

void add_by_multiply_add(const Bf16Loops& loops, const Bf16Operands& op, int pairs) {
    // The registers of b that share one broadcast of a row's operand: two where a register holds
    // less than a tile's row.
    constexpr int kRegs = kVec < kTileExtent ? 2 : 1, kRows = kRegs == 2 ? 2 : 4;
    const FlushSubnormals flush;
    for (int m = 0; m < op.rows; ++m) {
        for (int n = 0; n < op.cols; ++n) {
            for (int row = 0; row < kTileExtent; row += kRows) {
                add_rows<kRows, kRegs>(loops, op.a[m] + 2 * row * pairs, op.b[n], pairs, op.first,
                                       op.sums[m][n] + row * kTileExtent);
            }
        }
    }
}

#ifdef GYRE_AMX

bool ask_for_tiles() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16) == 0 || (d & kTile) == 0) {
        return false;
    }
    // Linux saves a process's tiles only if it has asked for that (arch_prctl, since 5.16).
    constexpr int kRequest = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// The operand of LDTILECFG: palette 1, and for each tile the bytes of a row and the number of rows.
struct alignas(64) TileConfiguration {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

// The intrinsics do not say which memory they use: nothing is moved across this.
[[gnu::always_inline]] inline void keep_order() {
    asm volatile("" ::: "memory");
}

#define GYRE_TILES __attribute__((target("amx-tile,amx-bf16")))

// Tiles 0 to 3 are the sums, 4 and 5 those of a, 6 and 7 those of b.
GYRE_TILES void configure_tiles(int pairs) {
    TileConfiguration configuration;
    for (int tile = 0; tile < 8; ++tile) {
        const bool of_a = tile == 4 || tile == 5, of_b = tile >= 6;
        configuration.row_bytes[tile] = static_cast<std::uint16_t>(of_a ? 4 * pairs : 64);
        configuration.rows[tile] = static_cast<std::uint8_t>(of_b ? pairs : kTileExtent);
    }
    keep_order();
    _tile_loadconfig(&configuration);
}

GYRE_TILES void release_tiles() {
    _tile_release();
}

template <int kRows, int kCols>
GYRE_TILES void add_by_tiles(const Bf16Loops& loops, const Bf16Operands& op, int pairs) {
    constexpr std::ptrdiff_t kLine = 64;
    const std::ptrdiff_t a_line = std::ptrdiff_t{4} * pairs;
    keep_order();
    if (op.first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, op.sums[0][0], kLine);
        if constexpr (kCols > 1) {
            _tile_loadd(1, op.sums[0][1], kLine);
        }
        if constexpr (kRows > 1) {
            _tile_loadd(2, op.sums[1][0], kLine);
        }
        if constexpr (kRows > 1 && kCols > 1) {
            _tile_loadd(3, op.sums[1][1], kLine);
        }
    }
    for (int i = 0; i < loops.outer; ++i) {
        std::ptrdiff_t a = loops.a_outer[i], b = loops.b_outer[i];
        for (int j = 0; j < loops.inner; ++j, a += loops.a_inner, b += loops.b_inner) {
            _tile_loadd(4, op.a[0] + a, a_line);
            _tile_loadd(6, op.b[0] + b, kLine);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (kCols > 1) {
                _tile_loadd(7, op.b[1] + b, kLine);
                _tile_dpbf16ps(1, 4, 7);
            }
            if constexpr (kRows > 1) {
                _tile_loadd(5, op.a[1] + a, a_line);
                _tile_dpbf16ps(2, 5, 6);
            }
            if constexpr (kRows > 1 && kCols > 1) {
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, op.sums[0][0], kLine);
    if constexpr (kCols > 1) {
        _tile_stored(1, op.sums[0][1], kLine);
    }
    if constexpr (kRows > 1) {
        _tile_stored(2, op.sums[1][0], kLine);
    }
    if constexpr (kRows > 1 && kCols > 1) {
        _tile_stored(3, op.sums[1][1], kLine);
    }
    keep_order();
}

#endif

}  // namespace

#ifdef GYRE_AMX

bool has_tile_products() {
    static const bool has = ask_for_tiles();
    return has;
}

Bf16Tiles::Bf16Tiles(int pairs) : pairs_(pairs) {
    if (has_tile_products()) {
        configure_tiles(pairs);
    }
}

Bf16Tiles::~Bf16Tiles() {
    if (has_tile_products()) {
        release_tiles();
    }
}

void Bf16Tiles::add(const Bf16Loops& loops, const Bf16Operands& op) const {
    if (!has_tile_products()) {
        return add_by_multiply_add(loops, op, pairs_);
    }
    constexpr std::array kFunctions = {&add_by_tiles<1, 1>, &add_by_tiles<1, 2>,
                                       &add_by_tiles<2, 1>, &add_by_tiles<2, 2>};
    kFunctions[static_cast<std::size_t>(2 * (op.rows - 1) + op.cols - 1)](loops, op, pairs_);
}

#else

bool has_tile_products() {
    return false;
}

Bf16Tiles::Bf16Tiles(int pairs) : pairs_(pairs) {}
Bf16Tiles::~Bf16Tiles() = default;

void Bf16Tiles::add(const Bf16Loops& loops, const Bf16Operands& op) const {
    add_by_multiply_add(loops, op, pairs_);
}

#endif

}  // namespace gyre::cpu
