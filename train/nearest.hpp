// The word that a mistyped one was meant to be.
#pragma once

#include <string>
#include <vector>

namespace gyre::train {

// The word closest to `typed`; empty where none is close.
std::string nearest(const std::string& typed, const std::vector<std::string>& words);
// "; did you mean WORD?" or nothing.
std::string did_you_mean(const std::string& typed, const std::vector<std::string>& words);

}  // namespace gyre::train
