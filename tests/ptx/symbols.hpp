// Names of this program's functions.
#pragma once

#include <string>

namespace gyre::ptx {

struct Symbol {
    std::string name;    // mangled
    std::string source;  // the file's name if no other file sees the function; otherwise empty
};
// The function that begins at the address. Throws Error if the program's table of symbols has none.
const Symbol& function_at(const void* address);

// As it is written in C++.
std::string demangled(const std::string& name);

}  // namespace gyre::ptx
