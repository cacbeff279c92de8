#include "train/settings_error.hpp"

namespace gyre::train {
namespace {

template <typename Name>
std::string replace_names(const std::string& text, const Name& name) {
    std::string result;
    std::size_t at = 0;
    for (std::size_t open; (open = text.find('{', at)) != text.npos;) {
        const std::size_t close = text.find('}', open);
        result += text.substr(at, open - at);
        result += name(std::string_view(text).substr(open + 1, close - open - 1));
        at = close + 1;
    }
    return result + text.substr(at);
}

}  // namespace

SettingsError::SettingsError(const std::string& text)
    : Error(ExitCode::usage,
            replace_names(text, [](std::string_view setting) { return std::string(setting); })),
      text_(text) {}

std::string SettingsError::named(
    const std::function<std::string(std::string_view setting)>& name) const {
    return replace_names(text_, name);
}

}  // namespace gyre::train
