// Where in the sources an address of this program lies, as binutils know it.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/base/function_ref.hpp"

namespace gyre::emulated {

// Where the program was loaded: what addresses in its file are relative to.
std::uintptr_t program_begin();

// "file:line", and the calls that were inlined there, up to `most` in all; without helpers and the
// standard library. return_address: of a call there, relative to program_begin().
std::string place_of(std::uint32_t return_address, int most = 3);

// The function that begins at this address, as c++filt prints it; empty: unknown.
std::string function_at(const void* entry);

// Calls line(text) for each line that a program of binutils prints of this program: `arguments`
// with
// {} for its file.
void lines_of(const std::string& arguments, FunctionRef<void(const std::string&)> line);

}  // namespace gyre::emulated
