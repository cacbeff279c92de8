#include "kernels/emulation/basic_blocks.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/emulation/places.hpp"

namespace simt {
namespace {

bool starts_with(std::string_view text, std::string_view start) {
    return text.substr(0, start.size()) == start;
}

// The number of elements of this size in the widest register named.
int elements(std::string_view operands, int bytes) {
    const int register_bytes = operands.find("%zmm") != operands.npos   ? 64
                               : operands.find("%ymm") != operands.npos ? 32
                                                                        : 16;
    return register_bytes / bytes;
}

}  // namespace

int flop_of(const std::string& instruction) {
    const std::size_t space = std::min(instruction.find(' '), instruction.size());
    std::string_view name = std::string_view(instruction).substr(0, space);
    const std::string_view operands = std::string_view(instruction).substr(space);
    if (name == "call") {  // if fmaf is not an instruction
        return operands.find("<fmaf") != operands.npos || operands.find("<fma@") != operands.npos ||
                       operands.find("<fma>") != operands.npos
                   ? 2
                   : 0;
    }
    if (starts_with(name, "v")) {
        name.remove_prefix(1);
    }
    const bool fused = starts_with(name, "fmadd") || starts_with(name, "fmsub") ||
                       starts_with(name, "fnmadd") || starts_with(name, "fnmsub");
    constexpr std::array<std::string_view, 5> kSimple = {"add", "sub", "mul", "div", "sqrt"};
    const auto simple = [&] {
        return std::any_of(kSimple.begin(), kSimple.end(), [&](std::string_view one) {
            return starts_with(name, one) && name.size() == one.size() + 2;
        });
    };
    if (name.size() < 4 || !(fused || simple())) {
        return 0;
    }
    const std::string_view type = name.substr(name.size() - 2);
    const int each = fused ? 2 : 1;
    if (type == "ss" || type == "sd") {
        return each;
    }
    return type == "ps"   ? each * elements(operands, 4)
           : type == "pd" ? each * elements(operands, 8)
                          : 0;
}

namespace {

struct Instruction {
    std::uint32_t address = 0;
    std::string text;
};

// The instructions of one function of the program.
class Function {
 public:
    void add(std::uint32_t address, std::string text) {
        at_[address] = code_.size();
        code_.push_back({address, std::move(text)});
    }
    // Adds the function's blocks.
    void finish(std::unordered_map<std::uint32_t, BasicBlock>& blocks) {
        seen_.assign(code_.size(), 0);
        for (std::size_t i = 0; i + 1 < code_.size(); ++i) {
            if (begins_block(code_[i].text)) {
                blocks[code_[i + 1].address] = block_from(i + 1);
            }
        }
        code_.clear();
        at_.clear();
    }

 private:
    static bool begins_block(const std::string& text) {
        return text.find("<__sanitizer_cov_trace_pc") != text.npos;
    }
    // Collects everything that is reachable before another block begins: the compiler orders blocks
    // freely, and splits some by checks whose branches meet again.
    BasicBlock block_from(std::size_t first) {
        BasicBlock block;
        ++round_;
        std::vector<std::size_t> open{first};
        while (!open.empty()) {
            std::size_t i = open.back();
            open.pop_back();
            for (; i < code_.size() && seen_[i] != round_ && !begins_block(code_[i].text); ++i) {
                seen_[i] = round_;
                const std::string& text = code_[i].text;
                ++block.instructions;
                block.flop += flop_of(text);
                const bool jumps = text[0] == 'j';
                if (jumps) {
                    const std::size_t operand =
                        text.find_first_of("0123456789abcdef*", text.find(' '));
                    const auto target = at_.find(static_cast<std::uint32_t>(
                        std::strtoull(text.c_str() + std::min(operand, text.size()), nullptr, 16)));
                    if (target != at_.end()) {
                        open.push_back(target->second);
                    }
                }
                if (starts_with(text, "ret") || starts_with(text, "jmp")) {
                    break;
                }
            }
        }
        return block;
    }

    std::vector<Instruction> code_;
    std::unordered_map<std::uint32_t, std::size_t> at_;
    std::vector<std::uint32_t> seen_;  // the round in which it was seen
    std::uint32_t round_ = 0;
};

}  // namespace

std::unordered_map<std::uint32_t, BasicBlock> disassemble() {
    std::unordered_map<std::uint32_t, BasicBlock> blocks;
    Function function;
    lines_of("objdump -d -w {}", [&](const std::string& line) {
        // "   1f2a:\tf3 0f 59 c8 \tmulss  %xmm0,%xmm1"
        const std::size_t colon = line.find(":\t");
        const std::size_t tab = colon == line.npos ? line.npos : line.find('\t', colon + 2);
        if (tab == line.npos) {
            function.finish(blocks);
        } else {
            function.add(static_cast<std::uint32_t>(std::strtoull(line.c_str(), nullptr, 16)),
                         line.substr(tab + 1));
        }
    });
    function.finish(blocks);
    return blocks;
}

}  // namespace simt
