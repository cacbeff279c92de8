#include "model/import.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/error.hpp"

namespace gyre::model {
namespace {

using Dims = std::vector<std::int64_t>;

struct Entry {
    std::string name;
    Dims shape;
};

std::string text_of_dims(const Dims& shape) {
    return fmt::format("[{}]", fmt::join(shape, ", "));
}

// "conv1.weight [10, 1, 5, 5], conv1.bias [10], ..."
std::string list_of(const std::vector<Entry>& entries) {
    constexpr std::size_t kMostListed = 40;
    std::string text;
    for (std::size_t i = 0; i < std::min(entries.size(), kMostListed); ++i) {
        text += fmt::format("{}{} {}", i == 0 ? "" : ", ", entries[i].name,
                            text_of_dims(entries[i].shape));
    }
    if (entries.size() > kMostListed) {
        text += fmt::format(" and {} more", entries.size() - kMostListed);
    }
    return text.empty() ? "nothing" : text;
}

// A module of PyTorch, and its entries by the last part of their names (weight, bias).
struct Module {
    std::string name;
    std::map<std::string, Dims> shapes;
    std::map<std::string, std::size_t> entries;
};

// In the order of their first entries.
std::vector<Module> modules_of(const std::vector<Entry>& entries) {
    std::vector<Module> modules;
    std::map<std::string, std::size_t> places;
    for (std::size_t i = 0; i < entries.size(); ++i) {
        const std::string& name = entries[i].name;
        const std::size_t leaf_at = name.rfind('.') + 1;  // 0 if there is no dot
        const std::string module = name.substr(0, leaf_at == 0 ? 0 : leaf_at - 1);
        const auto [place, added] = places.try_emplace(module, modules.size());
        if (added) {
            modules.push_back({module, {}, {}});
        }
        modules[place->second].shapes[name.substr(leaf_at)] = entries[i].shape;
        modules[place->second].entries[name.substr(leaf_at)] = i;
    }
    return modules;
}

std::optional<std::uint32_t> number_of(std::string_view text) {
    std::uint32_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = result.ec == std::errc{} && result.ptr == text.data() + text.size();
    return whole ? std::optional(value) : std::nullopt;
}

// True if module a runs before b, as far as the names tell: if they first differ in two numbers,
// these are places in an nn.Sequential; anything else leaves it open.
std::optional<bool> comes_before(std::string_view a, std::string_view b) {
    while (!a.empty() && !b.empty()) {
        const std::string_view part_a = a.substr(0, a.find('.'));
        const std::string_view part_b = b.substr(0, b.find('.'));
        if (part_a != part_b) {
            const auto number_a = number_of(part_a), number_b = number_of(part_b);
            return number_a && number_b && *number_a != *number_b
                       ? std::optional(*number_a < *number_b)
                       : std::nullopt;
        }
        a.remove_prefix(std::min(part_a.size() + 1, a.size()));
        b.remove_prefix(std::min(part_b.size() + 1, b.size()));
    }
    return std::nullopt;
}

// Those whose names no other has.
std::vector<Module> without(std::vector<Module> modules, const std::vector<Module>& others) {
    std::erase_if(modules, [&](const Module& module) {
        return std::ranges::count(others, module.name, &Module::name) > 0;
    });
    return modules;
}

void take(const Module& wanted, const Module& given, ParameterMatch& match) {
    for (const auto& [leaf, parameter] : wanted.entries) {
        match.tensors[parameter] = given.entries.at(leaf);
    }
}

// Takes a module of the file as the net's of the same name, or returns why it cannot be that.
std::string take_namesake(const Module& wanted, const Module& given, const std::vector<Entry>& net,
                          const std::vector<Entry>& file, ParameterMatch& match) {
    for (const auto& [leaf, entry] : given.entries) {
        if (!wanted.entries.contains(leaf)) {
            return fmt::format("the net has no parameter '{}'", file[entry].name);
        }
    }
    for (const auto& [leaf, entry] : wanted.entries) {
        const auto found = given.shapes.find(leaf);
        if (found == given.shapes.end()) {
            return fmt::format("parameter '{}' is missing", net[entry].name);
        }
        if (found->second != net[entry].shape) {
            return fmt::format("'{}' has shape {}, but the net needs {}", net[entry].name,
                               text_of_dims(found->second), text_of_dims(net[entry].shape));
        }
    }
    take(wanted, given, match);
    return {};
}

// Takes the modules of the file as the net's whose names are others, or returns why there is no
// match or more than one.
std::string match_by_order(const std::vector<Module>& wanted, const std::vector<Module>& given,
                           bool others_match, bool finetune, ParameterMatch& match) {
    if (wanted.size() != given.size() && !finetune) {
        return fmt::format("the net has {} {}layers with parameters, the file {}", wanted.size(),
                           others_match ? "other " : "", given.size());
    }
    std::vector<bool> taken(given.size(), false);
    std::vector<std::pair<const Module*, const Module*>> pairs;  // of the net and the file
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto alike = [&](const Module& m) { return m.shapes == wanted[i].shapes; };
        const auto here = std::ranges::count_if(wanted, alike);
        const auto there = std::ranges::count_if(given, alike);
        if (finetune && there == 0) {
            continue;
        }
        if (here != there && there != 0) {
            return fmt::format("the net has {} layers with the shapes of {}, the file {}", here,
                               wanted[i].name, there);
        }
        // The first of those that fit. Their order is transitive, so that comparing each with the
        // first so far finds every choice that the names leave open.
        std::size_t first = given.size();
        for (std::size_t j = 0; j < given.size(); ++j) {
            if (taken[j] || given[j].shapes != wanted[i].shapes) {
                continue;
            }
            const auto before =
                first == given.size() ? true : comes_before(given[j].name, given[first].name);
            if (!before) {
                return fmt::format(
                    "'{}' and '{}' have the same shapes, and their names do not tell "
                    "which of them comes first",
                    given[first].name, given[j].name);
            }
            first = *before ? j : first;
        }
        if (first == given.size()) {
            auto without_bias = wanted[i].shapes;
            without_bias.erase("bias");
            const auto found = std::ranges::find(given, without_bias, &Module::shapes);
            return found == given.end()
                       ? fmt::format("nothing in the file has the shapes of {}", wanted[i].name)
                       : fmt::format("'{}' has the shapes of {}, but no bias", found->name,
                                     wanted[i].name);
        }
        taken[first] = true;
        take(wanted[i], given[first], match);
        pairs.emplace_back(&wanted[i], &given[first]);
    }
    std::string text;
    for (auto a = pairs.begin(); a != pairs.end(); ++a) {
        for (auto b = a + 1; b != pairs.end(); ++b) {
            if (!comes_before(a->second->name, b->second->name).value_or(true)) {
                return fmt::format("by their shapes '{}' is {} and '{}' is {}, against their order",
                                   a->second->name, a->first->name, b->second->name,
                                   b->first->name);
            }
        }
        text +=
            fmt::format("{}'{}' as {}", text.empty() ? "" : ", ", a->second->name, a->first->name);
    }
    if (!pairs.empty()) {
        match.remarks.push_back(fmt::format("{} names are not the net's; by order and shape {}",
                                            others_match ? "some layers'" : "the layers'", text));
    }
    return {};
}

}  // namespace

ParameterMatch match_parameters(const std::vector<Parameter>& parameters,
                                const std::vector<HostTensor>& tensors, const std::string& source,
                                bool finetune) {
    ParameterMatch match;
    std::vector<Entry> net, file;
    for (const Parameter& parameter : parameters) {
        net.push_back({parameter.name, parameter.shape});
    }
    std::set<std::string> converted;
    for (const HostTensor& tensor : tensors) {
        file.push_back({tensor.name, tensor.shape});
        if (tensor.dtype != "F32") {
            converted.insert(tensor.dtype);
        }
    }
    if (!converted.empty()) {
        match.remarks.push_back(
            fmt::format("{} tensors are converted to F32", fmt::join(converted, " and ")));
    }
    std::string stripped;
    for (bool again = !file.empty(); again;) {
        again = false;
        for (const std::string prefix : {"module.", "_orig_mod."}) {
            if (std::all_of(file.begin(), file.end(),
                            [&](const Entry& e) { return e.name.starts_with(prefix); })) {
                for (Entry& entry : file) {
                    entry.name.erase(0, prefix.size());
                }
                stripped += prefix;
                again = true;
            }
        }
    }
    if (!stripped.empty()) {
        match.remarks.push_back(fmt::format("the prefix '{}' of all names is stripped", stripped));
    }
    match.tensors.assign(net.size(), file.size());
    std::vector<Module> wanted = modules_of(net), given = modules_of(file);
    const auto others_wanted = without(wanted, given), others_given = without(given, wanted);
    std::string problem;
    if (finetune) {
        // Both may have what the other has not.
    } else if (others_wanted.empty() && !others_given.empty()) {
        problem = fmt::format("the net has no parameter '{}'",
                              file[others_given.front().entries.begin()->second].name);
    } else if (!others_wanted.empty() && others_given.empty()) {
        problem = fmt::format("parameter '{}' is missing",
                              net[others_wanted.front().entries.begin()->second].name);
    }
    for (const Module& module : wanted) {
        const auto found = std::ranges::find(given, module.name, &Module::name);
        if (problem.empty() && found != given.end()) {
            const std::string misfit = take_namesake(module, *found, net, file, match);
            problem = finetune ? "" : misfit;
        }
    }
    if (problem.empty() && !others_wanted.empty()) {
        problem = match_by_order(others_wanted, others_given, others_wanted.size() < wanted.size(),
                                 finetune, match);
    }
    std::vector<Entry> initialised, unused;
    for (std::size_t i = 0; i < net.size(); ++i) {
        if (match.tensors[i] == file.size()) {
            initialised.push_back(net[i]);
        }
    }
    for (std::size_t i = 0; i < file.size(); ++i) {
        if (std::ranges::count(match.tensors, i) == 0) {
            unused.push_back(file[i]);
        }
    }
    if (problem.empty() && initialised.size() == net.size()) {
        problem = "nothing in the file fits the net";
    }
    if (!problem.empty()) {
        throw input_error(fmt::format(
            "{}: {}; were these weights made for another model or data set?\n  the file has {}\n  "
            "the net has {}",
            source, problem, list_of(file), list_of(net)));
    }
    if (!initialised.empty() || !unused.empty()) {
        match.remarks.push_back(fmt::format("these are initialised: {}; unused in the file: {}",
                                            list_of(initialised), list_of(unused)));
    }
    return match;
}

}  // namespace gyre::model
