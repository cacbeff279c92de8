// Timings of operations by gyre's own kernels and by a library, the faster of the two, and the file
// that keeps the timings for later runs. Independent of CUDA.
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
    // environment: everything besides the operation that timings depend on (GPU, versions,
    // arithmetic); timings of other environments are kept but not found. file: read if it exists;
    // empty: timings are not kept. Throws Error (bad_input) if it is not a file written by save().
    Choices(std::string environment, std::filesystem::path file);

    const Timing* find(const Operation& operation) const;  // null: not timed yet
    void add(const Operation& operation, const Timing& timing);
    // Replaces the whole file, including what other processes have added meanwhile. Throws Error
    // (bad_input) on failure.
    void save();

    // Adds a timed operation to the table, at most once.
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
