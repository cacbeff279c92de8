// A target for libFuzzer: `fuzz-NAME`, by the definition GYRE_FUZZ_TARGET.
//
// With GYRE_FUZZ_PLANTED in the environment there is a bug behind the reader: an input that it
// accepts and that is none of its seeds makes the program write behind the end of some memory. A
// fuzzer that does not find this would not find the reader's own bugs either.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/fuzz/targets.hpp"

namespace {

[[gnu::noinline]] void planted_bug(const std::string& input) {
    std::fputs("the planted bug\n", stderr);
    std::vector<char> copy(input.begin(), input.end());
    copy.shrink_to_fit();
    *static_cast<volatile char*>(copy.data() + copy.size()) = 'x';
}

bool planted() {
    const char* const value = std::getenv("GYRE_FUZZ_PLANTED");
    return value != nullptr && *value != '\0';
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
    static const gyre::test::Target& target = gyre::test::target(GYRE_FUZZ_TARGET);
    static const std::vector<std::string> seeds =
        planted() ? target.seeds() : std::vector<std::string>{};
    const std::string input(reinterpret_cast<const char*>(data), bytes);
    const bool accepted = gyre::test::run(target, input);
    if (accepted && !input.empty() && !seeds.empty() &&
        std::find(seeds.begin(), seeds.end(), input) == seeds.end()) {
        planted_bug(input);
    }
    return 0;
}
