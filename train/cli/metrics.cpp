#include "train/cli/metrics.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/base/error.hpp"
#include "kernels/base/host_name.hpp"
#include "model/protobuf.hpp"

namespace gyre::train {
namespace {

using namespace model::protobuf;

// Of the CSV file, in this order for ever: new ones come at the end.
constexpr const char* kColumns[] = {"event",
                                    "epoch",
                                    "step",
                                    "loss",
                                    "learning_rate",
                                    "train_loss",
                                    "train_accuracy",
                                    "test_loss",
                                    "test_accuracy",
                                    "seconds",
                                    "train_seconds",
                                    "images_per_second",
                                    "exposed_comm_seconds",
                                    "loss_scale",
                                    "skipped"};

// A path that does not exist yet does, too.
bool takes_lines(const std::string& path) {
    struct stat found = {};
    if (stat(path.c_str(), &found) != 0 || S_ISREG(found.st_mode) || S_ISFIFO(found.st_mode)) {
        return true;
    }
    const int device = open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    const bool terminal = isatty(device) != 0;
    if (device >= 0) {
        close(device);
    }
    return terminal;
}

std::uint32_t crc32c(const std::string& data) {
    std::uint32_t crc = ~0u;
    for (const char c : data) {
        crc ^= static_cast<unsigned char>(c);
        for (int bit = 0; bit < 8; ++bit) {
            crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
        }
    }
    return ~crc;
}

std::string masked_crc(const std::string& data) {
    return little_endian(std::rotr(crc32c(data), 15) + 0xa282ead8u);
}

// tensorboard.Event: wall_time = 1, step = 2, file_version = 3, summary = 5.
std::string event_message(std::int64_t step, const std::string& content) {
    const double now =
        std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    return double_field(1, now) + int_field(2, step) + content;
}

// tensorboard.Summary: value = 1 of tag = 1 and simple_value = 2.
std::string scalar(const std::string& tag, double value) {
    return text_field(1, text_field(1, tag) + float_field(2, static_cast<float>(value)));
}

std::ofstream open_events(const std::string& folder) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(
                             std::chrono::system_clock::now().time_since_epoch())
                             .count();
    const auto path = std::filesystem::path(folder) /
                      fmt::format("events.out.tfevents.{}.{}.{}", seconds, host_name(), getpid());
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    if (!file) {
        throw input_error(fmt::format(
            "--tensorboard {}: no file can be written there: {}; give the path of a folder", folder,
            error ? error.message() : std::strerror(errno)));
    }
    file << tensorboard_record(event_message(0, text_field(3, "brain.Event:2"))) << std::flush;
    return file;
}

std::string csv_row(const nlohmann::ordered_json& event) {
    std::vector<std::string> cells;
    for (const char* column : kColumns) {
        const auto value = event.find(column);
        cells.push_back(value == event.end() || value->is_null() ? std::string{}
                        : value->is_string()                     ? value->get<std::string>()
                                                                 : value->dump());
    }
    return fmt::format("{}", fmt::join(cells, ","));
}

std::string scalars(const nlohmann::ordered_json& event) {
    std::string values;
    for (const auto& [name, value] : event.items()) {
        if (value.is_number() && name != "epoch" && name != "step") {
            const bool of_step = event.at("event") == "step";
            values +=
                scalar(fmt::format("{}/{}", of_step ? "step" : "epoch", name), value.get<double>());
        }
    }
    return event_message(event.at("step").get<std::int64_t>(), text_field(5, values));
}

}  // namespace

std::string tensorboard_record(const std::string& message) {
    const std::string length = little_endian(std::uint64_t{message.size()});
    return length + masked_crc(length) + message + masked_crc(message);
}

std::ofstream open_lines(const char* flag, const std::string& path, bool add) {
    if (!takes_lines(path)) {
        throw input_error(fmt::format(
            "{} {}: that is no file, pipe or terminal; give the path of a file", flag, path));
    }
    std::ofstream file(path, add ? std::ios::app : std::ios::trunc);
    if (!file) {
        throw input_error(fmt::format("{} {}: the file cannot be written: {}; check the path", flag,
                                      path, std::strerror(errno)));
    }
    return file;
}

MetricsFiles::MetricsFiles(const TrainOptions& options) {
    if (!options.json.empty()) {
        json_ = open_lines("--json", options.json, !options.resume.empty());
    }
    if (!options.csv.empty()) {
        csv_ = open_lines("--metrics", options.csv, !options.resume.empty());
        csv_.seekp(0, std::ios::end);
        if (csv_.tellp() <= 0) {  // or it is a resumed training's, or a pipe
            csv_.clear();
            csv_ << fmt::format("{}", fmt::join(kColumns, ",")) << std::endl;
        }
    }
    if (!options.tensorboard.empty()) {
        events_ = open_events(options.tensorboard);
    }
}

void MetricsFiles::write(const nlohmann::ordered_json& event) {
    if (json_.is_open()) {
        json_ << event.dump() << std::endl;
    }
    if (event.contains("epoch")) {
        if (csv_.is_open()) {
            csv_ << csv_row(event) << std::endl;
        }
        if (events_.is_open()) {
            events_ << tensorboard_record(scalars(event)) << std::flush;
        }
    }
    for (const auto& [flag, file] :
         {std::pair{"--json", &json_}, {"--metrics", &csv_}, {"--tensorboard", &events_}}) {
        if (file->is_open() && !*file) {
            throw input_error(fmt::format("{}: writing failed; is the disk full?", flag));
        }
    }
}

}  // namespace gyre::train
