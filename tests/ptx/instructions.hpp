// The handlers of instructions, by what the parser calls them: the instruction's own name, but that
// loads, stores and moves of the same bits share one ("ld.global.u32").
#pragma once

#include <string>
#include <unordered_map>

#include "tests/ptx/module.hpp"

namespace gyre::ptx {

class Handlers {
 public:
    // The handler of each of these names, divided by spaces.
    void add(const std::string& names, Handler handler);
    Handler find(const std::string& name) const;

 private:
    std::unordered_map<std::string, Handler> handlers_;
};

// Null if the interpreter does not know the instruction.
Handler find_handler(const std::string& name);

void add_arithmetic(Handlers& handlers);
void add_conversions(Handlers& handlers);
void add_memory(Handlers& handlers);
void add_warp_operations(Handlers& handlers);

}  // namespace gyre::ptx
