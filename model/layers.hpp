// The words of a model file: for each its usage, how its line is read and which operations it
// appends to the net.
#pragma once

#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>

#include "model/spec.hpp"

namespace gyre::model {

class GraphBuilder;

// The words of one line after the first, taken from the front. Throws Error(bad_input) with the
// place, what is wrong and the usage.
class Words {
 public:
    Words(const std::string& line, std::string where, const char* usage);

    std::string next(const char* what);
    std::optional<std::string> optional();
    int integer(const char* what, int least);
    int checked_integer(const std::string& digits, const std::string& word, const char* what,
                        int least) const;
    float probability();
    float positive(const char* what, const char* usual);
    std::string name();
    // The remaining words, each a letter and a number, such as k5: kernel, stride, padding, groups;
    // or, if `letters` has n, nobias. The kernel must be among them if `letters` has it.
    void options(std::string_view letters, LayerSpec& layer);
    void end();
    [[noreturn]] void fail(const std::string& what) const;

 private:
    std::istringstream in_;
    const std::string where_;
    const char* usage_;
};

struct LayerType {
    const char* word;
    const char* usage;
    void (*parse)(Words&, LayerSpec&);
    void (*build)(GraphBuilder&, const LayerSpec&);
    bool last = false;  // nothing may follow
};

std::span<const LayerType> layer_types();

}  // namespace gyre::model
