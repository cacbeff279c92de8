// Statements of a kernel, as instructions.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "tests/ptx/instructions.hpp"
#include "tests/ptx/operands.hpp"

namespace gyre::ptx {
namespace {

struct Statement {
    std::string text, opcode;
    std::vector<std::string> parts;  // of the opcode, between its dots
    std::vector<std::string> operands;

    bool has(const char* part) const {
        return std::find(parts.begin(), parts.end(), part) != parts.end();
    }
    const std::string& type() const { return parts.back(); }
    const std::string& operand(std::size_t i) const {
        if (i >= operands.size()) {
            refuse("an operand is missing");
        }
        return operands[i];
    }
};

class Parser {
 public:
    Parser(const Module& module, Kernel& kernel, const std::string& text)
        : kernel_(kernel), operands_(module, kernel), text_(text) {}

    void parse() {
        const std::size_t body = text_.find("\n{");
        if (body == std::string::npos) {
            refuse("a kernel without a body");
        }
        parse_head(text_.substr(0, body));
        at_ = body + 2;
        while (at_ < text_.size()) {
            parse_next();
        }
        for (const auto& [index, label] : branches_) {
            const auto found = labels_.find(label);
            if (found == labels_.end()) {
                refuse("an unknown label: " + label);
            }
            kernel_.code[index].target = found->second;
        }
        Instruction end;
        end.kind = Kind::exit;
        kernel_.texts.emplace_back("the end of the kernel");
        end.text = static_cast<std::uint32_t>(kernel_.texts.size() - 1);
        kernel_.code.push_back(end);
    }

 private:
    void parse_head(const std::string& head) {
        std::istringstream lines(head);
        for (std::string line; std::getline(lines, line);) {
            if (const std::size_t found = line.find(".maxntid"); found != std::string::npos) {
                unsigned x = 1, y = 1, z = 1;
                std::sscanf(line.c_str() + found, ".maxntid %u, %u, %u", &x, &y, &z);
                kernel_.most_threads = x * y * z;
            }
            if (line.find(".param") == std::string::npos) {
                continue;
            }
            if (const std::size_t pointer = line.find(".ptr"); pointer != std::string::npos) {
                // ".ptr .align N" is about what it points to.
                line.erase(pointer, line.find_last_of(" \t") - pointer);
            }
            const Declaration parameter = parse_declaration(line);
            const std::size_t offset = (kernel_.parameter_bytes + parameter.alignment - 1) /
                                       parameter.alignment * parameter.alignment;
            kernel_.parameters.push_back({parameter.name, offset, parameter.bytes});
            kernel_.parameter_bytes = offset + parameter.bytes;
        }
    }

    void parse_next() {
        const char c = text_[at_];
        if (std::isspace(static_cast<unsigned char>(c)) != 0 || c == '{' || c == '}') {
            ++at_;
            return;
        }
        const auto line_end = [&] { return std::min(text_.find('\n', at_), text_.size()); };
        if (text_.compare(at_, 2, "//") == 0) {
            at_ = line_end();
        } else if (text_.compare(at_, 4, ".loc") == 0) {
            char* next = nullptr;
            file_ = static_cast<std::uint32_t>(std::strtoul(text_.c_str() + at_ + 4, &next, 10));
            line_ = static_cast<std::uint32_t>(std::strtoul(next, nullptr, 10));
            at_ = line_end();
        } else if (const std::size_t colon = text_.find(':', at_);
                   c == '$' && colon < text_.find_first_of(" \t\n;", at_)) {
            labels_[text_.substr(at_, colon - at_)] =
                static_cast<std::uint32_t>(kernel_.code.size());
            at_ = colon + 1;
        } else {
            const std::size_t end = std::min(text_.find(';', at_), text_.size());
            std::string statement = text_.substr(at_, end - at_);
            std::replace_if(
                statement.begin(), statement.end(), [](char x) { return x == '\n' || x == '\t'; },
                ' ');
            at_ = end + 1;
            try {
                if (c == '.') {
                    declare(statement);
                } else {
                    parse_statement(statement);
                }
            } catch (const Error& error) {
                refuse(fmt::format("{}, in: {}", error.what(), statement));
            }
        }
    }

    void declare(const std::string& text) {
        std::istringstream words(text);
        std::string kind, type;
        words >> kind >> type;
        if (kind == ".reg") {
            const std::size_t bytes = type_bytes(type.substr(1));
            for (std::string name; words >> name;) {
                declare_registers(name.substr(0, name.find(',')), bytes);
            }
        } else if (kind == ".shared") {
            operands_.declare_shared(parse_declaration(text));
        } else if (kind == ".param") {
            operands_.declare_call_parameter(parse_declaration(text).name);
        } else if (kind != ".pragma") {
            refuse("a declaration that is not covered");
        }
    }
    void declare_registers(const std::string& name, std::size_t bytes) {
        const std::size_t bracket = name.find('<');
        if (bracket == std::string::npos) {
            operands_.declare_register(name, bytes);
            return;
        }
        const int count = std::atoi(name.c_str() + bracket + 1);
        for (int i = 0; i < count; ++i) {
            operands_.declare_register(name.substr(0, bracket) + std::to_string(i), bytes);
        }
    }

    void parse_statement(const std::string& text) {
        Instruction instruction;
        instruction.file = file_;
        instruction.line = line_;
        instruction.text = static_cast<std::uint32_t>(kernel_.texts.size());
        kernel_.texts.push_back(text);
        std::istringstream words(text);
        Statement statement;
        statement.text = text;
        words >> statement.opcode;
        if (statement.opcode[0] == '@') {
            instruction.guard_negated = statement.opcode[1] == '!';
            instruction.guard =
                operands_.place(statement.opcode.substr(instruction.guard_negated ? 2 : 1), 4);
            words >> statement.opcode;
        }
        std::string rest;
        std::getline(words, rest);
        statement.operands = split_operands(rest);
        std::istringstream parts(statement.opcode);
        for (std::string part; std::getline(parts, part, '.');) {
            statement.parts.push_back(part);
        }
        const std::string& base = statement.parts.at(0);
        if (base == "membar" || base == "fence") {
            return;  // blocks run one after another
        }
        const std::string name = parse_operands(statement, base, instruction);
        if (instruction.kind == Kind::plain || instruction.kind == Kind::whole_warp) {
            instruction.handler = find_handler(name);
            if (instruction.handler == nullptr) {
                refuse("an instruction that is not covered: " + name);
            }
        }
        kernel_.code.push_back(instruction);
    }

    // The places of a statement's operands; returns the name of its handler.
    std::string parse_operands(const Statement& statement, const std::string& base,
                               Instruction& instruction) {
        if (base == "bra") {
            instruction.kind = Kind::branch;
            branches_.emplace_back(kernel_.code.size(), statement.operand(0));
            return {};
        }
        if (base == "ret" || base == "exit") {
            instruction.kind = Kind::exit;
            return {};
        }
        if (base == "bar" || base == "barrier") {
            return parse_barrier(statement, instruction);
        }
        if (base == "ld" || base == "st") {
            return parse_access(statement, instruction);
        }
        if (base == "cp") {
            return parse_copy(statement, instruction);
        }
        if (base == "ldmatrix" || base == "mma" || base == "shfl") {
            return parse_whole_warp(statement, instruction);
        }
        if (base == "atom") {
            const std::size_t bytes = statement.has("u64") ? 8 : 4;
            instruction.results[0] = operands_.place(statement.operand(0), bytes);
            instruction.sources[0] =
                address(statement.operand(1), statement.has("shared") ? 4 : 8, instruction);
            instruction.sources[1] = operands_.place(statement.operand(2), bytes);
            return statement.opcode;
        }
        if (base == "call") {
            if (statement.text.find("__internal_accurate_pow") == std::string::npos) {
                refuse("a call that is not covered");
            }
            instruction.results[0] = operands_.call_parameter("retval0").value();
            instruction.sources[0] = operands_.call_parameter("param0").value();
            instruction.sources[1] = operands_.call_parameter("param1").value();
            return "call.pow";
        }
        if (base == "mov") {
            return parse_move(statement, instruction);
        }
        return parse_computation(statement, base, instruction);
    }

    static std::string parse_barrier(const Statement& statement, Instruction& instruction) {
        if (statement.has("cluster")) {
            refuse("a barrier of a cluster: clusters are not covered");
        }
        if (statement.opcode == "bar.warp.sync") {
            if (statement.operand(0) != "-1" && statement.operand(0) != "0xffffffff" &&
                statement.operand(0) != "4294967295") {
                refuse("a barrier of some lanes of a warp is not covered");
            }
            instruction.kind = Kind::whole_warp;
            return statement.opcode;
        }
        if ((statement.opcode != "bar.sync" && statement.opcode != "barrier.sync") ||
            statement.operand(0) != "0" || statement.operands.size() != 1) {
            refuse("a barrier that is not covered");
        }
        instruction.kind = Kind::barrier;
        return {};
    }

    // "[base+offset]": the place of the base; the offset is the instruction's.
    std::int32_t address(const std::string& text, std::size_t bytes, Instruction& instruction) {
        if (text.size() < 3 || text[0] != '[') {
            refuse("an address that is not covered: " + text);
        }
        const std::string inner = text.substr(1, text.size() - 2);
        const std::size_t plus = inner.find('+');
        if (plus != std::string::npos) {
            instruction.offset = std::strtoll(inner.c_str() + plus + 1, nullptr, 0);
        }
        return operands_.place(inner.substr(0, plus), bytes);
    }
    // "{a, b}" or "a": the places, of which there may be as many; returns how many there are.
    template <std::size_t kMost>
    int vector(const std::string& text, std::int32_t (&places)[kMost], std::size_t first,
               std::size_t most, std::size_t bytes, bool any_width = false) {
        const auto names = text[0] == '{' ? split_operands(text.substr(1, text.size() - 2))
                                          : std::vector<std::string>{text};
        if (names.empty() || names.size() > most || first + names.size() > kMost) {
            refuse(fmt::format("{} elements in {}", names.size(), text));
        }
        for (std::size_t i = 0; i < names.size(); ++i) {
            places[first + i] = any_width ? operands_.place_of_any(names[i], bytes)
                                          : operands_.place(names[i], bytes);
        }
        return static_cast<int>(names.size());
    }

    std::string parse_access(const Statement& statement, Instruction& instruction) {
        const bool load = statement.parts[0] == "ld";
        const std::string& place = statement.operand(load ? 1 : 0);
        const std::string& data = statement.operand(load ? 0 : 1);
        const std::size_t bytes = type_bytes(statement.type());
        const std::string base = place.substr(1, place.find_first_of("+]") - 1);
        if (const auto parameter = operands_.call_parameter(base)) {
            if (bytes != 8) {
                refuse("a parameter of a call that has not 64 bits is not covered");
            }
            const std::int32_t value = operands_.place(data, 8);
            instruction.results[0] = load ? value : *parameter;
            instruction.sources[0] = load ? *parameter : value;
            return "mov.b64";
        }
        if (statement.has("local")) {
            refuse("local memory is not covered");
        }
        const std::string space = statement.has("shared")  ? "shared"
                                  : statement.has("param") ? "param"
                                                           : "global";
        instruction.sources[0] = address(place, space == "shared" ? 4 : 8, instruction);
        const std::string first = split_operands(data[0] == '{' ? data.substr(1) : data).at(0);
        instruction.wide = operands_.is_wide_register(first.substr(0, first.find('}')));
        const int count = load ? vector(data, instruction.results, 0, 4, bytes, true)
                               : vector(data, instruction.sources, 1, 4, bytes, true);
        instruction.elements = static_cast<std::uint8_t>(count);
        const bool extend = load && statement.type()[0] == 's' && bytes < 8;
        return fmt::format("{}.{}.{}{}", statement.parts[0], space, extend ? 's' : 'u', bytes * 8);
    }

    std::string parse_copy(const Statement& statement, Instruction& instruction) {
        if (statement.has("wait_group")) {
            instruction.offset = std::strtoll(statement.operand(0).c_str(), nullptr, 0);
            return "cp.async.wait_group";
        }
        if (statement.has("commit_group")) {
            return statement.opcode;
        }
        instruction.sources[0] = address(statement.operand(0), 4, instruction);
        instruction.sources[1] = address(statement.operand(1), 8, instruction);
        if (instruction.offset != 0 || statement.operand(2) != "16") {
            refuse("a copy with an offset, or not of 16 bytes, is not covered");
        }
        instruction.sources[2] = operands_.place(statement.operands.back(), 4);
        return statement.opcode;
    }

    std::string parse_whole_warp(const Statement& statement, Instruction& instruction) {
        instruction.kind = Kind::whole_warp;
        if (statement.parts[0] == "ldmatrix") {
            if (vector(statement.operand(0), instruction.results, 0, 4, 4) != 4) {
                refuse("ldmatrix is covered for four matrices");
            }
            instruction.sources[0] = address(statement.operand(1), 4, instruction);
        } else if (statement.parts[0] == "mma") {
            auto& sources = instruction.sources;
            if (vector(statement.operand(0), instruction.results, 0, 4, 4) != 4 ||
                vector(statement.operand(1), sources, 0, 4, 4) != 4 ||
                vector(statement.operand(2), sources, 4, 2, 4) != 2 ||
                vector(statement.operand(3), sources, 6, 4, 4) != 4) {
                refuse("mma has other fragments than are covered");
            }
        } else {
            const std::string& to = statement.operand(0);
            const std::size_t bar = to.find('|');
            instruction.results[0] = operands_.place(to.substr(0, bar), 4);
            instruction.results[1] =
                bar == std::string::npos ? -1 : operands_.place(to.substr(bar + 1), 4);
            for (std::size_t i = 0; i < 4; ++i) {
                instruction.sources[i] = operands_.place(statement.operand(i + 1), 4);
            }
        }
        return statement.opcode;
    }

    std::string parse_move(const Statement& statement, Instruction& instruction) {
        const std::string &to = statement.operand(0), &from = statement.operand(1);
        const std::size_t bytes = type_bytes(statement.type());
        if (statement.type() == "pred") {
            instruction.results[0] = operands_.place(to, bytes);
            instruction.sources[0] = operands_.place(from, bytes);
            return statement.opcode;
        }
        const bool unpack = to[0] == '{', pack = from[0] == '{';
        const int results = vector(to, instruction.results, 0, 2, unpack ? bytes / 2 : bytes);
        const int sources = vector(from, instruction.sources, 0, 2, pack ? bytes / 2 : bytes);
        if (results != (unpack ? 2 : 1) || sources != (pack ? 2 : 1)) {
            refuse("a move of other parts than halves is not covered");
        }
        const char* const kind = unpack ? "unpack" : pack ? "pack" : "b";
        return fmt::format("mov.{}{}", kind, bytes == 8 ? 64 : 32);
    }

    // A result, and sources of the last type; with the exceptions below.
    std::string parse_computation(const Statement& statement, const std::string& base,
                                  Instruction& instruction) {
        const std::size_t bytes = type_bytes(statement.type());
        if (bytes == 0) {
            refuse("an instruction that is not covered: " + statement.opcode);
        }
        const bool wide = statement.has("wide");
        const std::string& to_type = statement.parts.at(statement.parts.size() - 2);
        const std::size_t result = base == "cvt"    ? type_bytes(to_type)
                                   : base == "setp" ? 4
                                   : wide           ? 2 * bytes
                                                    : bytes;
        instruction.results[0] = operands_.place(statement.operand(0), result);
        for (std::size_t i = 1; i < statement.operands.size(); ++i) {
            const std::string& name = statement.operands[i];
            const bool shift = (base == "shl" || base == "shr") && i == 2;
            const bool narrow = shift || (base == "selp" && i == 3) || (base == "bfe" && i > 1);
            const std::size_t expected = narrow ? 4 : wide && i == 3 ? result : bytes;
            instruction.sources[i - 1] =
                base == "cvt" && expected < 8 && operands_.is_wide_register(name)
                    ? lower_half(name, instruction)
                    : operands_.place(name, expected);
        }
        return statement.opcode;
    }
    // An instruction of its own puts the lower half of a wide register into a narrow one.
    std::int32_t lower_half(const std::string& name, const Instruction& of) {
        Instruction instruction = of;
        instruction.handler = find_handler("cvt.u32.u64");
        instruction.sources[0] = operands_.place(name, 8);
        instruction.results[0] = operands_.unnamed_register(4);
        kernel_.code.push_back(instruction);
        return instruction.results[0];
    }

    Kernel& kernel_;
    Operands operands_;
    const std::string& text_;
    std::size_t at_ = 0;
    std::uint32_t file_ = 0, line_ = 0;
    std::unordered_map<std::string, std::uint32_t> labels_;
    std::vector<std::pair<std::size_t, std::string>> branches_;  // index, label
};

}  // namespace

std::unique_ptr<Kernel> parse_kernel(const Module& module, const std::string& entry,
                                     const std::string& text) {
    auto kernel = std::make_unique<Kernel>();
    kernel->name = entry;
    try {
        Parser(module, *kernel, text).parse();
    } catch (const Error& error) {
        refuse(fmt::format("{}: {}", module.name(), error.what()));
    }
    return kernel;
}

}  // namespace gyre::ptx
