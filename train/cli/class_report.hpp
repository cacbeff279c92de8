// How well each class is told from the others.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "train/rooms.hpp"

namespace gyre::train {

constexpr int kMostConfused = 1000;  // classes of a confusion matrix

// The class with the greatest logit, of several the first: what accuracy counts.
int predicted_class(const float* logits, int classes);

// Names for all classes: their numbers if there are none.
std::vector<std::string> class_labels(const std::vector<std::string>& names, int classes);

class ClassCounts {
 public:
    // pairs: also which class was taken for which.
    ClassCounts(int classes, bool pairs);

    // logits [n][classes], labels [n].
    void add(const std::vector<float>& logits, const std::int32_t* labels, int n);
    // Collective: the sums of all ranks.
    void add_up(Communicator& comm);

    // A line for each class: images, recall, precision.
    std::string table(const std::vector<std::string>& names) const;
    // A line for each class, a column for each prediction.
    std::string confusion(const std::vector<std::string>& names) const;

 private:
    const std::size_t classes_;
    std::vector<double> counts_;  // images, hits, predictions [classes] each
    std::vector<double> pairs_;   // [classes][predictions]
};

}  // namespace gyre::train
