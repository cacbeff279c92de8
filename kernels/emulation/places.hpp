// The source locations of this program's addresses, according to binutils.
#pragma once

#include <cstdint>
#include <string>

#include "base/function_ref.hpp"

namespace simt {

// The address at which the program was loaded, the base of addresses in its file.
std::uintptr_t program_begin();

// "file:line" followed by the callers it was inlined into, up to `most` in all, without helpers and
// the standard library. return_address: that of a call there, relative to program_begin().
std::string place_of(std::uint32_t return_address, int most = 3);

// The demangled name of the function at this address; empty: unknown.
std::string function_at(const void* entry);

// Runs a program of binutils on this program and calls line(text) for each line of output.
// `arguments`: the command line, with {} for this program's file.
void lines_of(const std::string& arguments, gyre::FunctionRef<void(const std::string&)> line);

}  // namespace simt
