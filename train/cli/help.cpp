#include "train/cli/help.hpp"

#include <fmt/format.h>

#include <sstream>

#include "train/cli/terminal.hpp"

namespace gyre::train {
namespace {

constexpr int kHelpColumns = 80, kIndent = 28;

// The text in lines that begin at the column kIndent, after what is before it.
std::string beside(const std::string& head, const std::string& text) {
    std::vector<std::string> words;
    std::istringstream in(text);
    for (std::string word; in >> word;) {
        words.push_back(word);
    }
    std::istringstream lines(wrap(words, " ", kHelpColumns - kIndent));
    std::string result = head;
    int used = columns_of(head);
    if (used > kIndent - 2) {
        result += "\n";
        used = 0;
    }
    for (std::string line; std::getline(lines, line); used = 0) {
        result += std::string(static_cast<std::size_t>(kIndent - used), ' ');
        result += line.substr(line.find_first_not_of(' ')) + "\n";
    }
    return result;
}

}  // namespace

std::string HelpFormatter::make_option(const CLI::Option* option, bool) const {
    const bool takes = option->get_type_size() != 0;
    std::string text = option->get_description();
    if (takes && !option->get_default_str().empty()) {
        const std::string& value = option->get_default_str();
        text += value.front() == '[' ? " " + value : fmt::format(" [{}]", value);
    }
    if (option->get_required()) {
        text += " (required)";
    }
    return beside(fmt::format("  {}{}", option->get_name(false, true),
                              takes ? " " + option->get_type_name() : ""),
                  text);
}

std::string HelpFormatter::make_group(std::string group, bool is_positional,
                                      std::vector<const CLI::Option*> options) const {
    return Formatter::make_group(std::move(group), is_positional, std::move(options)).substr(1);
}

std::string HelpFormatter::make_usage(const CLI::App* app, std::string name) const {
    return Formatter::make_usage(app, std::move(name)) + "\n";
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
    return beside("  " + command->get_name(), command->get_description());
}

}  // namespace gyre::train
