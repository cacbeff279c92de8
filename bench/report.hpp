// What the GPU's benchmark found: the table, and the goals.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace gyre::bench {

struct Row {
    std::string net, layer, direction;
    int n = 0;                           // images; 0: whatever the batch
    double bytes = 0, flop = 0;          // the fewest; flop is 0 where memory is all there is
    double floor_us = 0;                 // of bytes and flop at the ceilings
    const char* bound = "";              // the ceiling that makes the floor
    bool has_library = false;            // a library has this operation
    double ours_us = 0, library_us = 0;  // 0: not timed
    double estimate_us = 0;              // of ours, by arithmetic; 0: none
    std::string skipped;                 // why, or empty

    std::string name() const;
    double ratio() const { return ours_us > 0 && library_us > 0 ? library_us / ours_us : 0.0; }
    double percent() const { return ours_us > 0 ? 100.0 * floor_us / ours_us : 0.0; }
};

class Report {
 public:
    // Rows are printed in the order in which they were first asked for.
    Row& row(const std::string& net, const std::string& layer, const std::string& direction, int n);
    std::string table() const;
    // One line for each goal that is missed, or could not be judged among the rows there are.
    std::vector<std::string> missed_goals() const;

 private:
    std::vector<Row> rows_;
    std::map<std::string, std::size_t> at_;
};

}  // namespace gyre::bench
