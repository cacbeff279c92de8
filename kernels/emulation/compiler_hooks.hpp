// Functions that code compiled with SIMT_CHECKER_OPTIONS calls at each memory access and in each
// basic block. Include this at the end of one file of a program that defines, in simt,
//   template <bool kWrite, std::size_t kBytes> void access(const void* at, const void* pc, size_t)
//     kBytes: size of an aligned access, or 0; pc: its return address
//   void code_reached(const void* pc)
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "kernels/emulation/emulator.hpp"

#define GYRE_HOOKS(bytes)                                                   \
    void __tsan_read##bytes(void* at) {                                     \
        simt::access<false, bytes>(at, __builtin_return_address(0), bytes); \
    }                                                                       \
    void __tsan_write##bytes(void* at) {                                    \
        simt::access<true, bytes>(at, __builtin_return_address(0), bytes);  \
    }                                                                       \
    void __tsan_unaligned_read##bytes(void* at) {                           \
        simt::access<false, 0>(at, __builtin_return_address(0), bytes);     \
    }                                                                       \
    void __tsan_unaligned_write##bytes(void* at) {                          \
        simt::access<true, 0>(at, __builtin_return_address(0), bytes);      \
    }
// The argument passed by -fsanitize=alignment.
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
    simt::access<false, 0>(at, __builtin_return_address(0), static_cast<std::size_t>(bytes));
}
void __tsan_write_range(void* at, long bytes) {
    simt::access<true, 0>(at, __builtin_return_address(0), static_cast<std::size_t>(bytes));
}
void __sanitizer_cov_trace_pc() {
    simt::code_reached(__builtin_return_address(0));
}

// Kernels have no atomics; these are for guards of static variables and shared_ptr.
std::uint8_t __tsan_atomic8_load(const volatile void* at, int) {
    return __atomic_load_n(static_cast<const volatile std::uint8_t*>(at), __ATOMIC_SEQ_CST);
}
std::uint32_t __tsan_atomic32_fetch_add(volatile void* at, std::uint32_t value, int) {
    return __atomic_fetch_add(static_cast<volatile std::uint32_t*>(at), value, __ATOMIC_SEQ_CST);
}

// A 16-byte vector may be accessed as four 4-byte words, so the access hooks alone do not see its
// required alignment.
void __ubsan_handle_type_mismatch_v1(const TypeMismatch* mismatch, std::uintptr_t at) {
    const std::string what =
        fmt::format("misaligned: an access at {}:{} to address {:#x}; it must be a multiple of {}",
                    mismatch->place.file, mismatch->place.line, at, 1 << mismatch->log_alignment);
    if (simt::emulator::thread == nullptr) {
        std::fprintf(stderr, "emulated GPU: %s\n", what.c_str());
        std::abort();  // the compiler assumes that this does not throw
    }
    simt::emulator::report(what);
}

}  // extern "C"
