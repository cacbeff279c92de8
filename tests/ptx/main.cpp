// Runs its cases on the emulated GPU, each launch also by the kernel's PTX, and says in a table
// what became of the launches. With the names of cases, or other arguments of Catch2, kernels that
// these cases do not reach are not a failure.
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include <fmt/format.h>

#include "tests/ptx/second_execution.hpp"
#include "tests/support/built_file.hpp"
#include "tests/support/run_tests.hpp"

namespace gyre::ptx {
namespace {

void print_table(const SecondExecution& second) {
    fmt::print("{:6} {:40} {:>8} {:>8} {:>9} {:>6} {:>12} {:>8}\n", "GPU", "kernel", "launches",
               "same", "different", "failed", "instructions", "seconds");
    const auto row = [](const std::string& architecture, const std::string& name, const Tally& of) {
        fmt::print("{:6} {:40} {:8} {:8} {:9} {:6} {:12} {:8.2f}\n", architecture, name,
                   of.launches, of.launches - of.different - of.failed, of.different, of.failed,
                   of.instructions, of.seconds);
    };
    for (const auto& [of, tally] : second.tallies()) {
        row(of.first, of.second, tally);
    }
    row("all", "", second.total());
    for (const auto& [of, tally] : second.tallies()) {
        if (!tally.first.empty()) {
            fmt::print("{}: {}\n", of.first, tally.first);
        }
    }
}

int run_all(int argc, char** argv) {
    setenv("GYRE_TEST_BACKENDS", "emulated", 1);
    std::vector<std::unique_ptr<Library>> libraries;
    std::vector<const Library*> pointers;
    std::istringstream architectures(GYRE_PTX_ARCHITECTURES);
    for (std::string architecture; architectures >> architecture;) {
        libraries.push_back(
            std::make_unique<Library>(test::built_file("tests/ptx/" + architecture)));
        for (const auto& [name, entry] : libraries.back()->entries()) {
            entry.module->kernel(entry.mangled);  // what no launch reaches is parsed, too
        }
        pointers.push_back(libraries.back().get());
    }
    SecondExecution second(pointers);
    const bool every_case = argc == 1;
    // Without a case whose launches are those of another one.
    std::string but = "~conv2d gradients agree*";
    char* every[] = {argv[0], but.data(), nullptr};
    const int code = every_case ? test::run_tests(2, every) : test::run_tests(argc, argv);
    print_table(second);
    for (std::size_t i = 1; i < pointers.size(); ++i) {
        const auto [other, all] = second.with_other_code(i);
        fmt::print(
            "{}: {} of {} kernels have other PTX than for {}; their launches were run by it, "
            "too\n",
            pointers[i]->architecture(), other, all, pointers[0]->architecture());
    }
    // Each kernel must be reached; which instances of a template are not, the output says.
    std::size_t reached = 0, instances = 0;
    bool all_reached = true;
    for (const auto& [kernel, of] : second.coverage()) {
        instances += of.instances;
        reached += of.instances - of.not_reached.size();
        all_reached = all_reached && of.not_reached.size() < of.instances;
        for (const std::string& name : every_case ? of.not_reached : std::vector<std::string>{}) {
            fmt::print("{}{}: no launch has reached {}\n",
                       of.not_reached.size() < of.instances ? "" : "FAILED: ", kernel, name);
        }
    }
    const bool good = second.total().good() && (all_reached || !every_case);
    fmt::print("{} of {} kernels and instances of templates reached: {}\n", reached, instances,
               good ? "the PTX computes what the emulator does" : "FAILED");
    return code != 0 ? code : good ? 0 : 1;
}

}  // namespace
}  // namespace gyre::ptx

int main(int argc, char** argv) {
    try {
        return gyre::ptx::run_all(argc, argv);
    } catch (const std::exception& error) {
        fmt::print(stderr, "{}\n", error.what());
        return 1;
    }
}
