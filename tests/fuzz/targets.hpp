// The readers of strangers' bytes, for fuzzing: each is a function of its input, and has inputs
// that it accepts, from which a fuzzer begins.
#pragma once

#include <string>
#include <vector>

namespace gyre::test {

struct Target {
    const char* name;
    std::vector<std::string> (*seeds)();
    void (*read)(const std::string& input);  // throws what the reader throws
};
const std::vector<Target>& targets();
// Ends the program with a message if there is none of this name.
const Target& target(const std::string& name);

// Lets the reader read. It may refuse the input by an Error that is not internal; anything else
// ends the program by abort(). Returns whether it accepted the input.
bool run(const Target& target, const std::string& input);

}  // namespace gyre::test
