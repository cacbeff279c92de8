// Timings of an operation by gyre's kernels and by a library, which of them is the faster, and the
// file that keeps the timings for later runs. Knows nothing of CUDA.
#pragma once

#include <compare>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace gyre {

struct Operation {
    std::string name;   // such as "conv2d forward"
    std::string shape;  // such as "1x28x28 -> 10x24x24, kernel 5"
    int n = 1;          // images
    auto operator<=>(const Operation&) const = default;
};

struct Timing {
    double ours_us = 0.0;
    double library_us = 0.0;
    bool ours_is_faster() const { return ours_us <= library_us; }
};

class Choices {
 public:
    // environment: all that timings depend on beside the operation (GPU, versions, arithmetic);
    // those of other environments are kept, but not found. file: read where it exists; empty:
    // nothing is kept. Throws Error (bad_input) where it is no file that save() wrote.
    Choices(std::string environment, std::filesystem::path file);

    const Timing* find(const Operation& operation) const;  // null: not timed yet
    void add(const Operation& operation, const Timing& timing);
    // Replaces the file as a whole, with what other processes have added to it since. Throws Error
    // (bad_input) where that fails.
    void save();

    // Makes a known operation a line of the table; again: no second line.
    void list(const std::string& layer, const Operation& operation);
    std::string table() const;

 private:
    using Key = std::pair<std::string, Operation>;  // environment first
    std::map<Key, Timing> read() const;

    std::string environment_;
    std::filesystem::path file_;
    std::map<Key, Timing> timings_;
    std::vector<std::pair<std::string, Operation>> listed_;  // layer first
};

}  // namespace gyre
