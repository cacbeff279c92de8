// The flags of the PyTorch tutorials, examples and launchers that gyre calls otherwise.
#pragma once

#include <span>
#include <string_view>

namespace gyre::train {

struct TutorialFlag {
    std::string_view name;     // with dashes; underscores are taken for them
    std::string_view same;     // gyre's flag with the same values, which is taken; or empty:
    std::string_view instead;  // what to do here
};

std::span<const TutorialFlag> tutorial_flags();

}  // namespace gyre::train
