// The results of the GPU benchmark: the table, and the goals.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace gyre::bench {

struct Row {
    std::string net, layer, direction;
    int n = 0;                           // images; 0: independent of the batch
    double bytes = 0, flop = 0;          // the minimum; flop is 0 if only memory counts
    double floor_us = 0;                 // from bytes and flop at the ceilings
    const char* bound = "";              // the ceiling that determines the floor
    bool has_library = false;            // a library has this operation
    double ours_us = 0, library_us = 0;  // 0: not timed
    double estimate_us = 0;              // of ours, by arithmetic; 0: none
    std::string skipped;                 // reason, or empty

    std::string name() const;
    double ratio() const { return ours_us > 0 && library_us > 0 ? library_us / ours_us : 0.0; }
    double percent() const { return ours_us > 0 ? 100.0 * floor_us / ours_us : 0.0; }
};

class Report {
 public:
    // Rows are printed in the order in which they were first asked for.
    Row& row(const std::string& net, const std::string& layer, const std::string& direction, int n);
    std::string table() const;
    // Returns one line for each goal that is missed or could not be judged from these rows.
    std::vector<std::string> missed_goals() const;

 private:
    std::vector<Row> rows_;
    std::map<std::string, std::size_t> at_;
};

}  // namespace gyre::bench
