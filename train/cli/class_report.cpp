#include "train/cli/class_report.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/printable.hpp"
#include "train/cli/terminal.hpp"

namespace gyre::train {
namespace {

// "-" of none.
std::string percent(double part, double all) {
    return all > 0.0 ? fmt::format("{:.2f} %", 100.0 * part / all) : "-";
}

// Filled up to a width, by columns of the terminal.
std::string filled(const std::string& text, std::size_t width) {
    const auto columns = static_cast<std::size_t>(columns_of(text));
    return text + std::string(width > columns ? width - columns : 0, ' ');
}

std::size_t widest(const std::vector<std::string>& texts) {
    int most = 0;
    for (const std::string& text : texts) {
        most = std::max(most, columns_of(text));
    }
    return static_cast<std::size_t>(most);
}

}  // namespace

int predicted_class(const float* logits, int classes) {
    return static_cast<int>(std::max_element(logits, logits + classes) - logits);
}

std::vector<std::string> class_labels(const std::vector<std::string>& names, int classes) {
    std::vector<std::string> result;
    for (int k = 0; k < classes; ++k) {
        const auto at = static_cast<std::size_t>(k);
        result.push_back(at < names.size() ? printable(names[at]) : std::to_string(k));
    }
    return result;
}

ClassCounts::ClassCounts(int classes, bool pairs)
    : classes_(static_cast<std::size_t>(classes)),
      counts_(3 * classes_),
      pairs_(pairs ? classes_ * classes_ : 0) {}

void ClassCounts::add(const std::vector<float>& logits, const std::int32_t* labels, int n) {
    for (int i = 0; i < n; ++i) {
        const auto label = static_cast<std::size_t>(labels[i]);
        const auto predicted = static_cast<std::size_t>(predicted_class(
            logits.data() + static_cast<std::size_t>(i) * classes_, static_cast<int>(classes_)));
        counts_[label] += 1.0;
        counts_[classes_ + label] += label == predicted ? 1.0 : 0.0;
        counts_[2 * classes_ + predicted] += 1.0;
        if (!pairs_.empty()) {
            pairs_[label * classes_ + predicted] += 1.0;
        }
    }
}

void ClassCounts::add_up(Communicator& comm) {
    comm.allreduce_sum(counts_);
    comm.allreduce_sum(pairs_);
}

std::string ClassCounts::table(const std::vector<std::string>& names) const {
    const std::size_t width = std::max<std::size_t>(5, widest(names));
    std::string text = fmt::format("{}  {:>8}  {:>9}  {:>9}\n", filled("class", width), "images",
                                   "recall", "precision");
    for (std::size_t k = 0; k < classes_; ++k) {
        const double hits = counts_[classes_ + k];
        text += fmt::format("{}  {:>8.0f}  {:>9}  {:>9}\n", filled(names[k], width), counts_[k],
                            percent(hits, counts_[k]), percent(hits, counts_[2 * classes_ + k]));
    }
    return text;
}

std::string ClassCounts::confusion(const std::vector<std::string>& names) const {
    const double most = *std::max_element(pairs_.begin(), pairs_.end());
    const std::size_t width = std::max(std::size_t{9}, widest(names));
    const auto column = std::max(fmt::format("{:.0f}", most).size(), widest(names)) + 2;
    std::string text = filled("is \\ taken", width);
    for (std::size_t k = 0; k < classes_; ++k) {
        text +=
            std::string(column - static_cast<std::size_t>(columns_of(names[k])), ' ') + names[k];
    }
    for (std::size_t k = 0; k < classes_; ++k) {
        text += "\n" + filled(names[k], width);
        for (std::size_t p = 0; p < classes_; ++p) {
            text += fmt::format("{:>{}.0f}", pairs_[k * classes_ + p], column);
        }
    }
    return text + "\n";
}

}  // namespace gyre::train
