// Feeds a reader with its seeds, with files, or with changed seeds, without a fuzzer:
//   fuzz-replay TARGET COUNT         changed seeds, always the same ones in this order
//   fuzz-replay TARGET FILE...       these inputs, such as one that a fuzzer has found
//   fuzz-replay --seeds FOLDER TARGET...   writes the seeds of these targets to
//   FOLDER/TARGET/NUMBER fuzz-replay --targets            prints the names of all targets
// It ends by abort() if a reader does what it must not, and leaves the input in fuzz-TARGET.input
// in the working folder. It fails if the reader accepts none of the changed inputs: such a target
// does not get far enough to find anything.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "tests/fuzz/targets.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;
namespace fs = std::filesystem;

namespace {

class Changes {
 public:
    explicit Changes(std::vector<std::string> seeds) : seeds_(std::move(seeds)) {}

    std::string next() {
        std::string input = seeds_[below(seeds_.size())];
        for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
            change(input);
        }
        return input;
    }

 private:
    std::size_t below(std::size_t end) { return end == 0 ? 0 : random_() % end; }
    void change(std::string& input) {
        static constexpr std::uint32_t kNumbers[] = {
            0,      1,      2,       0x7f,       0x80,       0xff,       0x100,     0x7fff,
            0x8000, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
        const std::size_t at = below(input.size() + 1);
        switch (below(7)) {
            case 0:  // a bit
                if (at < input.size()) {
                    input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
                }
                break;
            case 1:  // a byte
                if (at < input.size()) {
                    input[at] = static_cast<char>(below(256));
                }
                break;
            case 2: {  // a number of 1, 2 or 4 bytes, either end first
                const std::uint32_t number = kNumbers[below(std::size(kNumbers))];
                const std::size_t bytes = std::size_t{1} << below(3);
                const bool big = below(2) == 0;
                for (std::size_t i = 0; i < bytes && at + i < input.size(); ++i) {
                    const std::size_t shift = 8 * (big ? bytes - 1 - i : i);
                    input[at + i] = static_cast<char>(number >> shift & 0xff);
                }
                break;
            }
            case 3:  // less
                input.erase(at, 1 + below(8));
                break;
            case 4:  // the end is missing
                input.resize(at);
                break;
            case 5: {  // a piece again
                const std::string piece = input.substr(at, 1 + below(16));
                input.insert(below(input.size() + 1), piece);
                break;
            }
            default: {  // a piece of another seed
                const std::string& other = seeds_[below(seeds_.size())];
                const std::string piece = other.substr(below(other.size() + 1), 1 + below(32));
                input.replace(at, below(piece.size() + 1), piece);
                break;
            }
        }
    }

    const std::vector<std::string> seeds_;
    std::mt19937_64 random_{1};
};

void write_seeds(const fs::path& folder, const Target& target) {
    fs::create_directories(folder / target.name);
    int number = 0;
    for (const std::string& seed : target.seeds()) {
        std::ofstream(folder / target.name / std::to_string(number++), std::ios::binary) << seed;
    }
}

int change_seeds(const Target& target, long count) {
    const std::vector<std::string> seeds = target.seeds();
    for (const std::string& seed : seeds) {
        if (!run(target, seed)) {
            std::fprintf(stderr, "fuzz-replay: %s refuses its own seed\n", target.name);
            return 1;
        }
    }
    const std::string left = std::string("fuzz-") + target.name + ".input";
    Changes changes(seeds);
    long inputs = 0, accepted = 0;
    while (inputs < count) {
        const std::string input = changes.next();
        std::ofstream(left, std::ios::binary) << input;
        ++inputs;
        const bool unchanged = std::find(seeds.begin(), seeds.end(), input) != seeds.end();
        accepted += run(target, input) && !unchanged ? 1 : 0;
    }
    fs::remove(left);
    std::printf("%s: %ld inputs, of which %ld changed ones were accepted\n", target.name, inputs,
                accepted);
    return accepted == 0 ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc >= 4 && std::strcmp(argv[1], "--seeds") == 0) {
        for (int i = 3; i < argc; ++i) {
            write_seeds(argv[2], target(argv[i]));
        }
        return 0;
    }
    if (argc == 2 && std::strcmp(argv[1], "--targets") == 0) {
        for (const Target& each : targets()) {
            std::printf("%s\n", each.name);
        }
        return 0;
    }
    if (argc < 3) {
        std::fprintf(stderr,
                     "fuzz-replay TARGET COUNT | TARGET FILE... | --seeds FOLDER TARGET... | "
                     "--targets; targets:");
        for (const Target& each : targets()) {
            std::fprintf(stderr, " %s", each.name);
        }
        std::fprintf(stderr, "\n");
        return 2;
    }
    const Target& chosen = target(argv[1]);
    char* end = nullptr;
    const long count = std::strtol(argv[2], &end, 10);
    if (*end == '\0' && argc == 3) {
        return change_seeds(chosen, count);
    }
    for (int i = 2; i < argc; ++i) {
        const std::string input = file_bytes(argv[i]);
        std::printf("%s: %s\n", argv[i], run(chosen, input) ? "accepted" : "refused");
    }
    return 0;
}
