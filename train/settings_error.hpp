// Settings that cannot be as they are.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "kernels/base/error.hpp"

namespace gyre::train {

// The text names settings in braces, as in "{momentum} must be less than 1". what() is without the
// braces; who calls a setting otherwise, as the command line does, puts its own name in its place.
class SettingsError : public Error {
 public:
    explicit SettingsError(const std::string& text);
    std::string named(const std::function<std::string(std::string_view setting)>& name) const;

 private:
    std::string text_;
};

}  // namespace gyre::train
