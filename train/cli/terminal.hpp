// Lines that suit the terminal a person watches, if any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gyre::train {

// Columns of the terminal that standard output leads to; 0: it leads elsewhere.
int terminal_columns();

// Columns that a UTF-8 text takes.
int columns_of(const std::string& text);

// The items with the separator between them, in lines of at most `columns` where every item is
// shorter; lines after the first are indented. 0 columns: one line.
std::string wrap(const std::vector<std::string>& items, const std::string& separator, int columns);

// A training's progress within an epoch, or within an evaluation of its end.
struct Progress {
    int epoch = 1, epochs = 1;
    bool evaluates = false;
    std::int64_t done = 0, images = 1;  // of the epoch, or of the evaluation
    double images_per_second = 0.0, loss = 0.0, seconds_left = 0.0;
};
// A bar with as many figures as fit: a line that is too long could not be drawn over.
std::string progress_line(const Progress& progress, int columns);

}  // namespace gyre::train
