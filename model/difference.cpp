#include "model/difference.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>

namespace gyre::model {
namespace {

// The place of a float in the order of all floats; both zeros have the same.
std::int64_t place(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto magnitude = static_cast<std::int64_t>(bits & 0x7fffffffU);
    return bits >> 31 != 0 ? -magnitude : magnitude;
}

std::string ulps(std::int64_t count) {
    return fmt::format("{} ulp{}", count, count == 1 ? "" : "s");
}

// The position in each dimension of an element.
std::vector<std::int64_t> position(const std::vector<std::int64_t>& shape, std::int64_t element) {
    std::vector<std::int64_t> at(shape.size());
    for (std::size_t i = shape.size(); i-- > 0;) {
        at[i] = element % shape[i];
        element /= shape[i];
    }
    return at;
}

// Describes the values that differ between two tensors of one shape; empty if none does.
std::string value_differences(const HostTensor& a, const HostTensor& b) {
    std::size_t count = 0, first = 0;
    std::int64_t most = 0;
    bool comparable = true;
    for (std::size_t i = 0; i < a.values.size(); ++i) {
        const float x = a.values[i], y = b.values[i];
        if (std::bit_cast<std::uint32_t>(x) != std::bit_cast<std::uint32_t>(y)) {
            first = count == 0 ? i : first;
            ++count;
            comparable = comparable && !std::isnan(x) && !std::isnan(y);
            most = std::max(most, std::abs(place(x) - place(y)));
        }
    }
    if (count == 0) {
        return {};
    }
    const float x = a.values[first], y = b.values[first];
    std::string text =
        fmt::format("{} of {} values differ, the first at {}: {:.9g} and {:.9g}", count,
                    a.values.size(), position(a.shape, static_cast<std::int64_t>(first)), x, y);
    if (comparable) {
        text += ", " + ulps(std::abs(place(x) - place(y)));
        text += count > 1 ? fmt::format(", at most {}", ulps(most)) : "";
    } else {
        text += "; some are NaN";
    }
    return text;
}

}  // namespace

std::vector<std::string> tensor_differences(const std::vector<HostTensor>& a,
                                            const std::vector<HostTensor>& b) {
    std::vector<std::string> lines;
    std::map<std::string, const HostTensor*> others;
    for (const HostTensor& tensor : b) {
        others[tensor.name] = &tensor;
    }
    const auto add = [&](const HostTensor& tensor, const std::string& what) {
        if (!what.empty()) {
            lines.push_back(fmt::format("{} {}: {}", tensor.name, tensor.shape, what));
        }
    };
    for (const HostTensor& tensor : a) {
        const auto other = others.find(tensor.name);
        if (other == others.end()) {
            add(tensor, "only in the first");
            continue;
        }
        add(tensor, tensor.shape == other->second->shape
                        ? value_differences(tensor, *other->second)
                        : fmt::format("{} in the second", other->second->shape));
        others.erase(other);
    }
    for (const HostTensor& tensor : b) {
        if (others.contains(tensor.name)) {
            add(tensor, "only in the second");
        }
    }
    return lines;
}

}  // namespace gyre::model
