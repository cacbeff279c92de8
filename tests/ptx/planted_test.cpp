// Bugs planted in the kernels' PTX, most of which the emulator cannot see: operands of asm strings
// are text to it. The second execution must notice each.
#include <cstdlib>
#include <regex>

#include "tests/ptx/second_execution.hpp"
#include "tests/ptx/training.hpp"
#include "tests/support/built_file.hpp"
#include "tests/support/catch.hpp"

namespace gyre::test {
namespace {

using ptx::Library;
using ptx::SecondExecution;

const Library& library() {
    static const Library library(built_file("tests/ptx/" GYRE_PTX_ARCHITECTURE));
    return library;
}

constexpr const char* kTensor = "conv2d_tensor.ptx";

// A training that uses all kinds of instructions.
constexpr const char* kModel =
    "conv 16 k3 p1\nrelu\nconv 16 k3 p1\nbatchnorm\nrelu\nmaxpool 2\nlinear 24\nrelu\n"
    "linear classes\n";
void train(Precision precision) {
    train_emulated(model::parse_model(kModel, "planted"), {1, 8, 8}, precision, 6, 1);
}

// The outcome of the training's launches with a change in each line that has `part` in it.
ptx::Tally with_bug(Precision precision, const std::string& file, const std::string& part,
                    const std::function<void(std::string&)>& change) {
    const Library changed(library(), file, part, change);
    const SecondExecution second({&changed});
    train(precision);
    return second.total();
}

// Registers of a line are counted from 0, without the one of its guard.
std::function<void(std::string&)> swap_registers(std::size_t first, std::size_t second) {
    return [=](std::string& line) {
        std::vector<std::pair<std::size_t, std::size_t>> found;  // begin, length
        for (std::size_t at = line[line.find_first_not_of("\t ")] == '@' ? line.find(' ') : 0;
             (at = line.find('%', at)) != std::string::npos;) {
            const std::size_t end = line.find_first_of(",; ]}", at);
            found.emplace_back(at, end - at);
            at = end;
        }
        const auto [a, a_length] = found.at(first);
        const auto [b, b_length] = found.at(second);
        const std::string of_a = line.substr(a, a_length), of_b = line.substr(b, b_length);
        line.replace(b, b_length, of_a).replace(a, a_length, of_b);
    };
}
std::function<void(std::string&)> replace(const std::string& from, const std::string& to) {
    return [=](std::string& line) {
        const std::size_t at = line.find(from);
        if (at != std::string::npos) {
            line.replace(at, from.size(), to);
        }
    };
}
void remove(std::string& line) {
    line.clear();
}

void check_different(const ptx::Tally& tally) {
    INFO(tally.first);
    CHECK(tally.launches > 0);
    CHECK(tally.different > 0);
}
void check_failed(const ptx::Tally& tally, const std::string& message) {
    INFO(tally.first);
    CHECK(tally.failed > 0);
    CHECK(tally.first.find(message) != std::string::npos);
}

}  // namespace

TEST_CASE("without a planted bug the PTX computes what the emulator does") {
    for (const auto& [word, precision] : model::kPrecisions) {
        const SecondExecution second({&library()});
        train(precision);
        INFO(word << ": " << second.total().first);
        CHECK(second.total().good());
    }
}

TEST_CASE("swapped registers of mma's operands are noticed") {
    const char* const kMma = "\tmma.sync";
    // 0 to 3 are D, 4 to 7 A, 8 and 9 B, 10 to 13 C.
    check_different(with_bug(Precision::tf32, kTensor, kMma, swap_registers(5, 6)));
    check_different(with_bug(Precision::tf32, kTensor, kMma, swap_registers(8, 9)));
    check_different(with_bug(Precision::tf32, kTensor, kMma, swap_registers(0, 1)));
    check_different(with_bug(Precision::bf16, kTensor, kMma, swap_registers(5, 6)));
}

TEST_CASE("swapped registers of ldmatrix, and one that is not transposed, are noticed") {
    check_different(with_bug(Precision::tf32, kTensor, "\tldmatrix", swap_registers(1, 2)));
    check_different(with_bug(Precision::bf16, kTensor, ".trans.", replace(".trans.", ".")));
}

TEST_CASE("conversions with the wrong rounding, or with swapped halves, are noticed") {
    check_different(with_bug(Precision::tf32, kTensor, "cvt.rna.tf32", replace(".rna.", ".rz.")));
    check_different(
        with_bug(Precision::bf16, "conv2d_first.ptx", "cvt.rn.bf16x2", replace(".rn.", ".rz.")));
    check_different(
        with_bug(Precision::fp16, "conv2d_first.ptx", "cvt.rn.f16x2", swap_registers(1, 2)));
}

TEST_CASE("a missing barrier is noticed") {
    check_different(with_bug(Precision::tf32, kTensor, "\tbar.sync", remove));
    check_different(with_bug(Precision::fp32, "batchnorm.ptx", "\tbar.sync", remove));
}

TEST_CASE("asynchronous copies that are not committed, or not waited for, are noticed") {
    check_failed(with_bug(Precision::tf32, kTensor, "cp.async.commit_group", remove),
                 "a thread leaves with copies that it has not committed");
    check_failed(with_bug(Precision::tf32, kTensor, "cp.async.wait_group",
                          [](std::string& line) { line = "\tcp.async.wait_group 9;"; }),
                 "a thread leaves with copies that it has not waited for");
}

TEST_CASE("an asynchronous copy that ignores what is outside of the matrix is noticed") {
    const ptx::Tally tally =
        with_bug(Precision::tf32, kTensor, "cp.async.cg", [](std::string& line) {
            line = std::regex_replace(line, std::regex(", 16, %r[0-9]+;"), ", 16, 16;");
        });
    INFO(tally.first);
    CHECK(tally.failed + tally.different > 0);
}

TEST_CASE("a shuffle over the wrong distance is noticed") {
    check_different(
        with_bug(Precision::fp32, "batchnorm.ptx", "\tshfl.sync.bfly", [](std::string& line) {
            line = std::regex_replace(line, std::regex("(bfly[^,]*,[^,]*, )[^,]*"), "$011");
        }));
}

TEST_CASE("elements of a vector in the wrong order are noticed") {
    check_different(
        with_bug(Precision::fp32, "relu.ptx", "ld.global.v4.f32", swap_registers(0, 3)));
}

TEST_CASE("an access outside of memory, or at no multiple of its size, is a failure") {
    const auto moved = [](const char* by) {
        return [=](std::string& line) {
            line = std::regex_replace(line, std::regex("\\[(%rd[0-9]+)\\]"),
                                      std::string("[$1+") + by + "]");
        };
    };
    check_failed(with_bug(Precision::fp32, "relu.ptx", "ld.global.v4.f32", moved("1073741824")),
                 "an address outside of memory");
    check_failed(with_bug(Precision::fp32, "relu.ptx", "ld.global.v4.f32", moved("4")),
                 "a misaligned address");
}

TEST_CASE("what the interpreter does not cover is a failure that says so") {
    const auto becomes = [](const char* text) { return [=](std::string& line) { line = text; }; };
    const auto fails = [&](const char* text, const char* message) {
        check_failed(with_bug(Precision::fp32, "relu.ptx", "cvta.to.global.u64", becomes(text)),
                     message);
    };
    fails("\tvote.sync.any.pred %p1, %p1, -1;", "an instruction that is not covered: vote");
    fails("\tbrx.idx %r1, ts;", "an instruction that is not covered: brx");
    fails("\tbarrier.cluster.arrive.release.aligned;", "clusters are not covered");
    fails("\tmov.u32 %r1, %cluster_ctarank;", "%cluster_ctarank is not covered");
    fails("\tld.local.u32 %r1, [%rd1];", "local memory is not covered");
}

}  // namespace gyre::test
