// PTX as the interpreter runs it: the kernels of a text, as instructions whose operands are places
// in a warp's registers. The meaning of everything is that of NVIDIA's manual, "Parallel Thread
// Execution ISA"; the interpreter knows nothing of gyre's kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace gyre::ptx {

[[noreturn]] inline void refuse(const std::string& what) {
    throw Error(ExitCode::internal, what);
}

struct Warp;
struct Instruction;
// A handler does an instruction for the lanes of the mask.
using Handler = void (*)(Warp& warp, const Instruction& instruction, std::uint32_t mask);

// All lanes of a warp meet at a barrier, and at an operation of the whole warp.
enum class Kind : std::uint8_t { plain, branch, exit, barrier, whole_warp };

struct Instruction {
    Handler handler = nullptr;
    Kind kind = Kind::plain;
    bool guard_negated = false;
    std::uint8_t elements = 1;         // that a load or store moves
    bool wide = false;                 // a load or store of less than 64 bits has a register of 64
    std::int32_t guard = -1;           // a predicate, or -1
    std::int32_t results[4] = {};      // places of registers
    std::int32_t sources[10] = {};     // likewise
    std::int64_t offset = 0;           // of an address, or a number in the text
    std::uint32_t target = 0;          // of a branch: index of an instruction
    std::uint32_t text = 0;            // index in the kernel's texts
    std::uint32_t file = 0, line = 0;  // of the source, for messages
    mutable std::uintptr_t begin = 1, end = 0;  // the allocation that it met last
};

struct Kernel {
    struct Constant {
        std::int32_t at;
        bool wide;
        std::uint64_t bits;
    };
    struct Parameter {
        std::string name;
        std::size_t offset, bytes;
    };

    std::string name;
    std::vector<Instruction> code;
    std::vector<std::string> texts;  // of instructions, for messages
    std::size_t register_bytes = 0;  // of a warp, constants included
    std::vector<Constant> constants;
    std::vector<Parameter> parameters;
    std::size_t parameter_bytes = 0;
    std::vector<std::pair<std::int32_t, std::size_t>> parameter_addresses;  // register, offset
    std::map<std::string, std::int32_t> special_registers;                  // %tid.x and the like
    std::uint32_t shared_bytes = 0;  // without the dynamic ones
    bool dynamic_shared = false;
    std::vector<std::pair<std::int32_t, bool>> dynamic_addresses;  // register, whether of 64 bits
    unsigned most_threads = 0;                                     // 0: not said
};

// The text of one file, made by nvcc -ptx. Kernels are parsed when they are asked for.
class Module {
 public:
    Module(std::string name, std::string text);
    static Module read(const std::string& path);

    const std::string& name() const { return name_; }
    const std::string& text() const { return text_; }
    // The mangled names of the kernels.
    const std::vector<std::string>& entries() const { return entries_; }
    const Kernel& kernel(const std::string& entry) const;
    // The part that two architectures may share: a kernel's text without lines of the source.
    std::string body(const std::string& entry) const;
    // A source file by its number in .loc.
    std::string source(std::uint32_t number) const;

    struct Shared {
        std::size_t alignment = 1, bytes = 0;
        bool dynamic = false;
    };
    // A variable of shared memory outside kernels; null if there is none of this name.
    const Shared* shared(const std::string& name) const;
    // Variables of global and constant memory: address and bytes.
    const std::map<std::string, std::pair<std::uintptr_t, std::size_t>>& globals() const {
        return globals_;
    }

 private:
    struct Extent {
        std::size_t begin, end;  // in the text, from the list of parameters on
    };
    void read_line(const std::string& line);
    void read_global(const std::string& line);

    std::string name_, text_;
    std::vector<std::string> entries_;
    std::unordered_map<std::string, Extent> extents_;
    std::map<std::string, Shared> shared_;
    std::map<std::uint32_t, std::string> sources_;
    std::map<std::string, std::pair<std::uintptr_t, std::size_t>> globals_;
    std::vector<std::unique_ptr<std::uint64_t[]>> global_memory_;
    mutable std::unordered_map<std::string, std::unique_ptr<Kernel>> kernels_;
};

// Parses a kernel whose text goes from the list of its parameters to the end of its body.
std::unique_ptr<Kernel> parse_kernel(const Module& module, const std::string& entry,
                                     const std::string& text);

// A declaration such as ".shared .align 4 .b8 name[96]".
struct Declaration {
    std::string name;
    std::size_t alignment = 0;  // 0: that of the type
    std::size_t bytes = 0;      // of all elements
};
Declaration parse_declaration(const std::string& text);
// The bytes of a type such as f32 or bf16x2; of a predicate 4, as registers hold it. 0: no type.
std::size_t type_bytes(const std::string& type);

}  // namespace gyre::ptx
