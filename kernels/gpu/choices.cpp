#include "kernels/gpu/choices.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <system_error>

#include "base/error.hpp"

namespace gyre {
namespace {

constexpr const char* kFormat = "gyre kernel timings 1";

// Returns a time in microseconds. Errors do not name the file; the caller adds it.
double time_of(const nlohmann::json& entry, const char* name) {
    const nlohmann::json& value = entry.at(name);
    const double time = value.is_number() ? value.get<double>() : -1.0;
    if (!std::isfinite(time) || time <= 0.0) {
        throw input_error(fmt::format("{} is {}, not a time in µs", name, value.dump()));
    }
    return time;
}

int images_of(const nlohmann::json& entry) {
    const nlohmann::json& value = entry.at("n");
    const std::int64_t n = value.is_number_integer() ? value.get<std::int64_t>() : 0;
    if (n < 1 || n > std::numeric_limits<int>::max()) {
        throw input_error(fmt::format("n is {}, not a number of images", value.dump()));
    }
    return static_cast<int>(n);
}

}  // namespace

Choices::Choices(std::string environment, std::filesystem::path file)
    : environment_(std::move(environment)), file_(std::move(file)), timings_(read()) {}

std::map<Choices::Key, Timing> Choices::read() const {
    std::error_code error;
    if (file_.empty() || !std::filesystem::exists(file_, error)) {
        return {};
    }
    std::map<Key, Timing> timings;
    std::string problem;
    try {
        std::ifstream in(file_, std::ios::binary);
        std::ostringstream text;
        if (!in || (text << in.rdbuf()).bad()) {
            throw input_error(fmt::format("it cannot be read: {}", std::strerror(errno)));
        }
        const auto root = nlohmann::json::parse(text.str());
        const auto format = root.at("format").get<std::string>();
        if (format != kFormat) {
            throw input_error(fmt::format("its format is '{}'", format));
        }
        for (const nlohmann::json& entry : root.at("timings")) {
            Operation operation{entry.at("operation").get<std::string>(),
                                entry.at("shape").get<std::string>(), images_of(entry)};
            timings[{entry.at("environment").get<std::string>(), std::move(operation)}] = {
                time_of(entry, "ours_us"), time_of(entry, "library_us")};
        }
        return timings;
    } catch (const nlohmann::json::exception& caught) {
        problem = caught.what();
    } catch (const Error& caught) {
        problem = caught.what();
    }
    throw input_error(
        fmt::format("{}: not a file of '{}': {}; delete it, so that the layers are timed again, or "
                    "name another file",
                    file_.string(), kFormat, problem));
}

const Timing* Choices::find(const Operation& operation) const {
    const auto found = timings_.find({environment_, operation});
    return found == timings_.end() ? nullptr : &found->second;
}

void Choices::add(const Operation& operation, const Timing& timing) {
    timings_[{environment_, operation}] = timing;
}

void Choices::save() {
    if (file_.empty()) {
        return;
    }
    timings_.merge(read());  // if both have an entry, this process's is kept
    nlohmann::ordered_json entries = nlohmann::ordered_json::array();
    for (const auto& [key, timing] : timings_) {
        const auto& [environment, operation] = key;
        entries.push_back({{"environment", environment},
                           {"operation", operation.name},
                           {"shape", operation.shape},
                           {"n", operation.n},
                           {"ours_us", timing.ours_us},
                           {"library_us", timing.library_us}});
    }
    const nlohmann::ordered_json root = {{"format", kFormat}, {"timings", entries}};

    // Ranks on several hosts may share the folder, so a process ID is not unique.
    const std::filesystem::path aside =
        file_.string() +
        fmt::format(".{}.{:08x}.tmp", static_cast<long>(getpid()), std::random_device{}());
    std::error_code error;
    if (file_.has_parent_path()) {
        std::filesystem::create_directories(file_.parent_path(), error);
    }
    if (!error) {
        errno = 0;
        std::ofstream out(aside, std::ios::binary);
        out << root.dump(1) << '\n';
        out.close();
        if (out) {
            std::filesystem::rename(aside, file_, error);
        } else {
            error = {errno == 0 ? EIO : errno, std::generic_category()};
        }
    }
    if (error) {
        const std::string why = error.message();
        std::filesystem::remove(aside, error);
        throw input_error(
            fmt::format("{}: the kernel timings could not be written: {}; check the folder's "
                        "permissions and free space, or name another file",
                        file_.string(), why));
    }
}

void Choices::list(const std::string& layer, const Operation& operation) {
    const std::pair line{layer, operation};
    if (std::find(listed_.begin(), listed_.end(), line) == listed_.end()) {
        listed_.push_back(line);
    }
}

std::string Choices::table() const {
    using Row = std::array<std::string, 7>;
    std::vector<Row> rows = {
        {"layer", "operation", "shape", "n", "ours µs", "library µs", "chosen"}};
    for (const auto& [layer, operation] : listed_) {
        if (const Timing* timing = find(operation)) {
            rows.push_back({layer, operation.name, operation.shape, fmt::format("{}", operation.n),
                            fmt::format("{:.1f}", timing->ours_us),
                            fmt::format("{:.1f}", timing->library_us),
                            timing->ours_is_faster() ? "ours" : "library"});
        }
    }
    if (rows.size() == 1) {
        return {};
    }
    std::array<std::size_t, 7> widths{};
    for (const Row& row : rows) {
        for (std::size_t i = 0; i < row.size(); ++i) {
            // Counts bytes. Only the header has a non-ASCII character, which takes one byte more.
            const std::size_t extra = row[i].find("µ") == std::string::npos ? 0 : 1;
            widths[i] = std::max(widths[i], row[i].size() - extra);
        }
    }
    std::string text;
    for (const Row& row : rows) {
        text += fmt::format("{:<{}}  {:<{}}  {:<{}}  {:>{}}  {:>{}}  {:>{}}  {}\n", row[0],
                            widths[0], row[1], widths[1], row[2], widths[2], row[3], widths[3],
                            row[4], widths[4], row[5], widths[5], row[6]);
    }
    return text;
}

}  // namespace gyre
