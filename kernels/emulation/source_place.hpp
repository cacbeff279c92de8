// Places in the program's source, for reports.
#pragma once

#include <cstdint>
#include <string>

namespace gyre::emulated {

// "file:line", and the calls that were inlined there; without helpers and the standard library.
// pc: counted from the program's beginning.
std::string source_place(std::uint32_t pc);

}  // namespace gyre::emulated
