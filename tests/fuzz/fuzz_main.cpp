// A target for libFuzzer: `fuzz-NAME`, by the definition GYRE_FUZZ_TARGET.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
    static const gyre::test::Target& target = gyre::test::target(GYRE_FUZZ_TARGET);
    gyre::test::run(target, {reinterpret_cast<const char*>(data), bytes});
    return 0;
}
