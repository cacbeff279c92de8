// Kernels with one bug each, to show that the emulator finds it, and the same without the bug.
#pragma once

#include <string>
#include <vector>

#include "kernels/emulation/runtime.hpp"

namespace simt {

constexpr int kPlantedFloats = 512;  // of x, which holds 0, 1, 2, ..., and of y, which holds zeros

// The check that finds a bug at the latest.
enum class Finder {
    emulator,           // in every build
    address_sanitizer,  // or UndefinedBehaviorSanitizer, or the checker
    checker
};

// The lines of planted_bugs.cu and planted_clusters.cu with the comments "bug: <name>" and "other:
// <name>" must be named.
struct PlantedBug {
    std::string name;
    Finder finder;
    std::vector<std::string> words;  // of the checker's or the emulator's report
    void (*start)(Stream& stream, bool bug, float* x, float* y);
};
const std::vector<PlantedBug>& planted_bugs();
std::vector<PlantedBug> planted_cluster_bugs();  // those of planted_clusters.cu, among them

float touch_from_host(const float* x);
// y = factor * x, kPlantedFloats of them
void start_scale(Stream& stream, float factor, const float* x, float* y);

}  // namespace simt
