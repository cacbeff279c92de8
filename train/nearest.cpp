#include "train/nearest.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace gyre::train {
namespace {

// Insertions, deletions, replacements and swaps of neighbours that lead from a to b.
std::size_t distance(const std::string& a, const std::string& b) {
    std::vector<std::vector<std::size_t>> steps(a.size() + 1,
                                                std::vector<std::size_t>(b.size() + 1));
    for (std::size_t i = 0; i <= a.size(); ++i) {
        for (std::size_t j = 0; j <= b.size(); ++j) {
            if (i == 0 || j == 0) {
                steps[i][j] = i + j;
                continue;
            }
            steps[i][j] = std::min({steps[i - 1][j] + 1, steps[i][j - 1] + 1,
                                    steps[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                steps[i][j] = std::min(steps[i][j], steps[i - 2][j - 2] + 1);
            }
        }
    }
    return steps[a.size()][b.size()];
}

}  // namespace

std::string nearest(const std::string& typed, const std::vector<std::string>& words) {
    std::string best;
    std::size_t least = std::max<std::size_t>(1, typed.size() / 3) + 1;
    for (const std::string& word : words) {
        const std::size_t steps = distance(typed, word);
        if (steps < least) {
            least = steps;
            best = word;
        }
    }
    return best;
}

std::string did_you_mean(const std::string& typed, const std::vector<std::string>& words) {
    const std::string meant = nearest(typed, words);
    return meant.empty() ? "" : fmt::format("; did you mean {}?", meant);
}

}  // namespace gyre::train
