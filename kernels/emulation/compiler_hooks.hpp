// What code compiled with GYRE_CHECKER_OPTIONS calls: at each access to memory, and in each basic
// block. For the end of one file of a program, which has before, in gyre::emulated,
//   template <bool kWrite, std::size_t kBytes> void access(const void* at, const void* pc, size_t)
//     kBytes is what an aligned access has, or 0; pc: where it returns to
//   void code_reached(const void* pc)
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "kernels/emulation/emulator.hpp"

#define GYRE_HOOKS(bytes)                                                             \
    void __tsan_read##bytes(void* at) {                                               \
        gyre::emulated::access<false, bytes>(at, __builtin_return_address(0), bytes); \
    }                                                                                 \
    void __tsan_write##bytes(void* at) {                                              \
        gyre::emulated::access<true, bytes>(at, __builtin_return_address(0), bytes);  \
    }                                                                                 \
    void __tsan_unaligned_read##bytes(void* at) {                                     \
        gyre::emulated::access<false, 0>(at, __builtin_return_address(0), bytes);     \
    }                                                                                 \
    void __tsan_unaligned_write##bytes(void* at) {                                    \
        gyre::emulated::access<true, 0>(at, __builtin_return_address(0), bytes);      \
    }
// What -fsanitize=alignment hands over.
struct TypeMismatch {
    struct {
        const char* file;
        std::uint32_t line, column;
    } place;
    const void* type;
    unsigned char log_alignment, kind;
};

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
GYRE_HOOKS(1)
GYRE_HOOKS(2)
GYRE_HOOKS(4)
GYRE_HOOKS(8)
GYRE_HOOKS(16)
void __tsan_read_range(void* at, long bytes) {
    gyre::emulated::access<false, 0>(at, __builtin_return_address(0),
                                     static_cast<std::size_t>(bytes));
}
void __tsan_write_range(void* at, long bytes) {
    gyre::emulated::access<true, 0>(at, __builtin_return_address(0),
                                    static_cast<std::size_t>(bytes));
}
void __sanitizer_cov_trace_pc() {
    gyre::emulated::code_reached(__builtin_return_address(0));
}

// Kernels have no atomics; these belong to the guards of static variables and to shared_ptr.
std::uint8_t __tsan_atomic8_load(const volatile void* at, int) {
    return __atomic_load_n(static_cast<const volatile std::uint8_t*>(at), __ATOMIC_SEQ_CST);
}
std::uint32_t __tsan_atomic32_fetch_add(volatile void* at, std::uint32_t value, int) {
    return __atomic_fetch_add(static_cast<volatile std::uint32_t*>(at), value, __ATOMIC_SEQ_CST);
}

// A vector of 16 bytes may reach memory as four accesses of 4, so the hooks alone do not see where
// it should have been.
void __ubsan_handle_type_mismatch_v1(const TypeMismatch* mismatch, std::uintptr_t at) {
    const std::string what =
        fmt::format("misaligned: an access at {}:{} to address {:#x}; it must be a multiple of {}",
                    mismatch->place.file, mismatch->place.line, at, 1 << mismatch->log_alignment);
    if (gyre::emulated::emulator::thread == nullptr) {
        std::fprintf(stderr, "emulated GPU: %s\n", what.c_str());
        std::abort();  // the compiler takes it that this throws nothing
    }
    gyre::emulated::emulator::report(what);
}

}  // extern "C"
