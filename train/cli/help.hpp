// How --help looks: a flag and what it takes, then what it does, in 80 columns.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace gyre::train {

class HelpFormatter final : public CLI::Formatter {
 public:
    std::string make_option(const CLI::Option* option, bool is_positional) const override;
    std::string make_group(std::string group, bool is_positional,
                           std::vector<const CLI::Option*> options) const override;
    std::string make_usage(const CLI::App* app, std::string name) const override;
    std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace gyre::train
