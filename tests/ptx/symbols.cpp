#include "tests/ptx/symbols.hpp"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

#include "tests/ptx/module.hpp"

namespace gyre::ptx {
namespace {

// Where the program was loaded: what is to be added to addresses in its file.
std::uintptr_t load_address() {
    std::uintptr_t base = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* result) {
            *static_cast<std::uintptr_t*>(result) = info->dlpi_addr;
            return 1;  // the program itself is the first
        },
        &base);
    return base;
}

std::map<std::uintptr_t, Symbol> read_symbols() {
    std::ifstream in("/proc/self/exe", std::ios::binary);
    const std::vector<char> file{std::istreambuf_iterator<char>(in), {}};
    const std::uintptr_t base = load_address();
    std::map<std::uintptr_t, Symbol> symbols;
    const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(file.data());
    const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(file.data() + header->e_shoff);
    for (int i = 0; i < header->e_shnum; ++i) {
        if (sections[i].sh_type != SHT_SYMTAB) {
            continue;
        }
        const auto* const table =
            reinterpret_cast<const Elf64_Sym*>(file.data() + sections[i].sh_offset);
        const char* const names = file.data() + sections[sections[i].sh_link].sh_offset;
        std::string source;
        for (std::size_t k = 0; k < sections[i].sh_size / sizeof *table; ++k) {
            const Elf64_Sym& symbol = table[k];
            const char* const name = names + symbol.st_name;
            if (ELF64_ST_TYPE(symbol.st_info) == STT_FILE) {
                source = name;
            } else if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && symbol.st_value != 0) {
                const bool local = ELF64_ST_BIND(symbol.st_info) == STB_LOCAL;
                symbols[base + symbol.st_value] = {name, local ? source : ""};
            }
        }
    }
    return symbols;
}

}  // namespace

const Symbol& function_at(const void* address) {
    static const std::map<std::uintptr_t, Symbol> symbols = read_symbols();
    const auto found = symbols.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == symbols.end()) {
        refuse("the program has no symbol for the kernel: it must not be stripped");
    }
    return found->second;
}

std::string demangled(const std::string& name) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> text(
        abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), &std::free);
    return status == 0 ? text.get() : name;
}

}  // namespace gyre::ptx
