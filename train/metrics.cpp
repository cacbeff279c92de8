#include "train/metrics.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/descriptor.hpp"
#include "base/error.hpp"
#include "base/host_name.hpp"
#include "model/protobuf.hpp"
#include "model/whole_file.hpp"
#include "train/settings.hpp"

namespace gyre::train {
namespace {

using namespace model::protobuf;

// The columns of the CSV file, in this order for ever: new ones come at the end.
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
                                    "skipped",
                                    "val_loss",
                                    "val_accuracy",
                                    "grad_norm"};

// A path that does not exist yet does, too.
bool takes_lines(const std::string& path) {
    struct stat found = {};
    if (stat(path.c_str(), &found) != 0 || S_ISREG(found.st_mode) || S_ISFIFO(found.st_mode)) {
        return true;
    }
    const Descriptor device(open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
    return isatty(device.fd()) != 0;
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

// A text, which TensorBoard shows as Markdown: tensorboard.Summary: value = 1 of tag = 1, tensor =
// 8 and metadata = 9, of which plugin_data = 1 has the plugin's name. tensorflow.TensorProto: dtype
// = 1, tensor_shape = 2 of dim = 2, and string_val = 8.
std::string text_value(const std::string& tag, const std::string& text) {
    constexpr std::int64_t kString = 7;  // tensorflow.DataType
    const std::string tensor =
        int_field(1, kString) + text_field(2, text_field(2, int_field(1, 1))) + text_field(8, text);
    return text_field(1, text_field(1, tag) + text_field(8, tensor) +
                             text_field(9, text_field(1, text_field(1, "text"))));
}

std::string table_of(const std::vector<SettingValue>& settings) {
    std::string table = "| setting | value |\n|---|---|\n";
    for (const SettingValue& setting : settings) {
        if (setting.given) {
            table += fmt::format("| {} | {} |\n", setting.name, setting.value);
        }
    }
    return table;
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
            "`tensorboard` {}: no file can be written there: {}; give the path of a folder", folder,
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

// Names of files need not be UTF-8.
std::string text_of(const nlohmann::ordered_json& event) {
    return event.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// The record of an event's figures of these images; empty if there are none. "train_loss" is the
// figure "loss" of the images "train".
std::string scalars(const nlohmann::ordered_json& event, const std::string& images) {
    std::string values;
    for (const auto& [name, value] : event.items()) {
        if (!value.is_number() || name == "epoch" || name == "step") {
            continue;
        }
        const bool of_images = name.ends_with("_loss") || name.ends_with("_accuracy");
        const std::size_t end = of_images ? name.rfind('_') : 0;
        if (name.substr(0, end) == images) {
            values += scalar(fmt::format("{}/{}", event.at("event").get<std::string>(),
                                         name.substr(of_images ? end + 1 : 0)),
                             value.get<double>());
        }
    }
    return values.empty() ? values
                          : tensorboard_record(event_message(event.at("step").get<std::int64_t>(),
                                                             text_field(5, values)));
}

// The subject of a line of a metrics file.
struct Line {
    std::string event;
    std::int64_t epoch = 0, step = 0;
};
// Returns nothing for a line without these, such as that of a start.
std::optional<Line> line_of(const std::string& text, bool row) {
    if (row) {
        std::array<char, 16> event{};
        long long epoch = 0, step = 0;
        return std::sscanf(text.c_str(), "%15[^,],%lld,%lld", event.data(), &epoch, &step) == 3
                   ? std::optional(Line{event.data(), epoch, step})
                   : std::nullopt;
    }
    const auto json = nlohmann::json::parse(text, nullptr, false);
    if (!json.is_object() || !json.contains("event") || !json["event"].is_string() ||
        !json.contains("epoch") || !json["epoch"].is_number_integer() || !json.contains("step") ||
        !json["step"].is_number_integer()) {
        return std::nullopt;
    }
    return Line{json["event"], json["epoch"], json["step"]};
}

// The largest resident set of any rank, in bytes. Collective.
std::int64_t peak_memory_bytes(Communicator& comm) {
    struct rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    std::vector<double> all(static_cast<std::size_t>(comm.size()));
    all[static_cast<std::size_t>(comm.rank())] = static_cast<double>(usage.ru_maxrss) * 1024.0;
    comm.allreduce_sum(all);
    return static_cast<std::int64_t>(*std::max_element(all.begin(), all.end()));
}

}  // namespace

std::string tensorboard_record(const std::string& message) {
    const std::string length = little_endian(std::uint64_t{message.size()});
    return length + masked_crc(length) + message + masked_crc(message);
}

std::ofstream open_lines(const char* option, const std::string& path, bool add) {
    if (!takes_lines(path)) {
        throw input_error(fmt::format(
            "{} {}: that is not a file, pipe or terminal; give the path of a file", option, path));
    }
    std::ofstream file(path, add ? std::ios::app : std::ios::trunc);
    if (!file) {
        throw input_error(fmt::format("{} {}: the file cannot be written: {}; check the path",
                                      option, path, std::strerror(errno)));
    }
    return file;
}

MetricsFiles::MetricsFiles(const RunSpec& run, bool is_root) : run_(run) {
    if (!is_root) {
        return;
    }
    const bool resumes = !run.checkpoints.resume.empty();
    const std::string& path = run.reports.metrics;
    if (!path.empty()) {
        metrics_place_ = "`metrics` " + path;
        metrics_ = open_lines("`metrics`", path, resumes);
        rows_ = path.ends_with(".csv");
        metrics_.seekp(0, std::ios::end);
        const bool begins = metrics_.tellp() <= 0;  // or it is a pipe
        metrics_.clear();
        if (rows_ && begins) {
            metrics_ << fmt::format("{}", fmt::join(kColumns, ",")) << std::endl;
        }
    }
    if (!run.reports.tensorboard.empty()) {
        events_[""] = open_events(run.reports.tensorboard);
        events_place_ = "`tensorboard` " + run.reports.tensorboard;
    }
}

void MetricsFiles::drop_later_lines(const Training& training) {
    const Cursor& from = training.cursor;
    const std::int64_t steps = training.session.sharding().steps();
    const std::int64_t done = (from.epoch - 1) * steps + from.step;
    std::error_code error;
    const auto path = std::filesystem::canonical(run_.reports.metrics, error);
    if (metrics_.is_open() && std::filesystem::is_regular_file(path, error)) {
        std::ifstream in(path);
        std::string kept;
        bool all = true;
        for (std::string text; std::getline(in, text);) {
            const bool whole = !in.eof();  // or it was cut off as it was written
            const auto line = line_of(text, rows_);
            const bool later =
                line && (line->event == "epoch" ? line->epoch >= from.epoch : line->step > done);
            if (whole && !later) {
                kept += text + '\n';
            } else {
                all = false;
            }
        }
        if (!all) {
            metrics_.close();
            model::write_whole_file({path}, {kept}, "the metrics");
            metrics_ = open_lines("`metrics`", path.string(), true);
        }
    }
    for (auto& [images, file] : events_) {
        // tensorboard.Event: session_log = 7 of status = 1, START: what other files have from this
        // step on no longer counts. If the epoch's evaluation is still to come, that is the last
        // step.
        constexpr std::int64_t kStart = 1;
        file << tensorboard_record(event_message(done + (from.step == steps ? 0 : 1),
                                                 text_field(7, int_field(1, kStart))))
             << std::flush;
    }
}

void MetricsFiles::on_start(const Training& training) {
    if (!events_.empty()) {
        std::vector<std::string> sets = {"train"};
        if (run_.evaluation.enabled) {
            sets.push_back(training.evaluated.name);
        }
        for (const std::string& images : sets) {
            const auto folder = std::filesystem::path(run_.reports.tensorboard) / images;
            events_[images] = open_events(folder.string());
        }
    }
    if (training.resumed && any()) {
        drop_later_lines(training);
    }
    Session& session = training.session;
    const EvaluatedSet& set = training.evaluated;
    nlohmann::ordered_json json = {{"event", "start"},
                                   {"model", training.model},
                                   {"parameters", session.net().parameter_count()},
                                   {"dataset", training.dataset},
                                   {"train_images", session.sharding().images},
                                   {set.name + "_images", set.images->count()},
                                   {"classes", training.classes},
                                   {"ranks", session.sharding().ranks},
                                   {"batch_size", session.sharding().most_local()},
                                   {"global_batch", session.sharding().global_batch},
                                   {"steps_per_epoch", session.sharding().steps()},
                                   {"device", session.backend().description()},
                                   {"precision", name_of(run_.net.precision)},
                                   {"communicator", session.communicator().description()}};
    json["settings"] = nlohmann::ordered_json::object();
    const std::vector<SettingValue> settings = values_of(run_);
    for (const SettingValue& setting : settings) {
        if (setting.given) {
            json["settings"][setting.name] = setting.value;
        }
    }
    if (training.held_back) {
        json[training.held_back->name + "_images"] = training.held_back->images->count();
    }
    if (training.resumed) {
        json["resumed"] = {{"epoch", training.cursor.epoch}, {"step", training.cursor.step}};
    }
    write(json);
    if (!events_.empty()) {
        events_[""] << tensorboard_record(
                           event_message(training.steps(),
                                         text_field(5, text_value("settings", table_of(settings)))))
                    << std::flush;
    }
}

void MetricsFiles::on_step(const Training& training, const StepResult& done) {
    const std::int64_t step = done.step + 1, steps = training.session.sharding().steps();
    if (!any() || !(step % run_.reports.log_interval == 0 || step == steps)) {
        return;
    }
    nlohmann::ordered_json json = {{"event", "step"},
                                   {"epoch", training.cursor.epoch},
                                   {"step", (training.cursor.epoch - 1) * steps + step},
                                   {"loss", done.loss},
                                   {"learning_rate", done.learning_rate}};
    if (run_.net.precision == Precision::fp16) {
        json["loss_scale"] = done.loss_scale;
        json["skipped"] = done.skipped;
    }
    if (run_.optimizer.max_grad_norm && std::isfinite(done.gradient_norm)) {
        json["grad_norm"] = done.gradient_norm;
    }
    write(json);
}

void MetricsFiles::on_epoch(const Training& training, const EpochFacts& epoch) {
    if (!any() || epoch.stopped) {
        return;
    }
    nlohmann::ordered_json json = {{"event", "epoch"},
                                   {"epoch", epoch.epoch},
                                   {"step", epoch.epoch * training.session.sharding().steps()},
                                   {"train_loss", epoch.train_loss},
                                   {"train_accuracy", epoch.train_accuracy}};
    if (epoch.evaluation.images > 0) {
        json[training.evaluated.name + "_loss"] = epoch.evaluation.loss;
        json[training.evaluated.name + "_accuracy"] = epoch.evaluation.accuracy;
    }
    json["seconds"] = seconds_since(epoch.begin);
    json["train_seconds"] = epoch.train_seconds;
    json["images_per_second"] = epoch.images_per_second();
    json["exposed_comm_seconds"] = epoch.communication.exposed;
    write(json);
}

void MetricsFiles::on_end(const Training& training, Ending ending) {
    nlohmann::ordered_json json = {
        {"event", "end"},
        {"seconds", seconds_since(training.begin)},
        {"interrupted", facts(ending).within_epoch},
        {"ending", facts(ending).name},
        {"peak_memory_bytes", peak_memory_bytes(training.session.communicator())}};
    if (training.cursor.best_accuracy >= 0.0) {
        json[fmt::format("best_{}_accuracy", training.evaluated.name)] =
            training.cursor.best_accuracy;
    }
    if (training.outcome) {
        json[training.held_back->name + "_loss"] = training.outcome->loss;
        json[training.held_back->name + "_accuracy"] = training.outcome->accuracy;
    }
    write(json);
}

void MetricsFiles::write(const nlohmann::ordered_json& event) {
    const bool has_figures = event.contains("epoch");
    if (metrics_.is_open() && (has_figures || !rows_)) {
        metrics_ << (rows_ ? csv_row(event) : text_of(event)) << std::endl;
    }
    const auto check = [](const std::string& place, const std::ofstream& file) {
        if (file.is_open() && !file) {
            throw input_error(fmt::format(
                "{}: writing failed; is the disk full? Make room there, and resume the training "
                "from its last checkpoint",
                place));
        }
    };
    check(metrics_place_, metrics_);
    for (auto& [images, file] : events_) {
        if (has_figures) {
            file << scalars(event, images) << std::flush;
        }
        check(events_place_, file);
    }
}

}  // namespace gyre::train
