#include "train/cli/report.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "kernels/base/clock.hpp"
#include "kernels/base/error.hpp"
#include "train/cli/terminal.hpp"

namespace gyre::train {
namespace {

constexpr const char* kClearLine = "\r\033[K";
constexpr double kBarInterval = 0.1;  // seconds between two drawings of the bar

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

}  // namespace

std::ofstream open_json_file(const std::string& path, bool add) {
    if (!takes_lines(path)) {
        throw input_error(fmt::format(
            "--json {}: that is no file, pipe or terminal; give the path of a file", path));
    }
    std::ofstream file(path, add ? std::ios::app : std::ios::trunc);
    if (!file) {
        throw input_error(fmt::format("--json {}: the file cannot be written: {}; check the path",
                                      path, std::strerror(errno)));
    }
    return file;
}

Report::Report(const TrainOptions& options, bool reports)
    : options_(options),
      reports_(reports),
      columns_(reports && !options.quiet ? terminal_columns() : 0),
      run_start_(Clock::now()) {
    if (reports && !options.json.empty()) {
        json_ = open_json_file(options.json, !options.resume.empty());
    }
}

void Report::say(const std::vector<std::string>& items, const std::string& separator) const {
    if (!options_.quiet) {
        fmt::print("{}{}\n", columns_ > 0 ? kClearLine : "", wrap(items, separator, columns_));
        std::fflush(stdout);
    }
}

void Report::write_json(const std::string& line) {
    if (json_.is_open()) {
        json_ << line << std::endl;
        if (!json_) {
            throw input_error(
                fmt::format("--json {}: writing failed; is the disk full?", options_.json));
        }
    }
}

void Report::start(const RunFacts& facts) {
    if (!reports_) {
        return;
    }
    facts_ = facts;
    run_start_ = Clock::now();
    std::vector<std::string> items = {
        fmt::format("{}: {} parameters", facts.model, facts.parameters),
        fmt::format("{}: {} + {} images, {} classes", facts.dataset, facts.train_images,
                    facts.test_images, facts.classes),
        fmt::format("{} rank{} of batch {} ({} in all), {} steps an epoch", facts.ranks,
                    facts.ranks == 1 ? "" : "s", facts.batch_size, facts.global_batch,
                    facts.steps_per_epoch),
        facts.device};
    if (options_.precision != Precision::fp32) {
        items.push_back(facts.precision);
    }
    say(items, " · ");
    nlohmann::ordered_json json = {{"event", "start"},
                                   {"model", facts.model},
                                   {"parameters", facts.parameters},
                                   {"dataset", facts.dataset},
                                   {"train_images", facts.train_images},
                                   {"test_images", facts.test_images},
                                   {"classes", facts.classes},
                                   {"ranks", facts.ranks},
                                   {"batch_size", facts.batch_size},
                                   {"global_batch", facts.global_batch},
                                   {"steps_per_epoch", facts.steps_per_epoch},
                                   {"device", facts.device},
                                   {"precision", facts.precision},
                                   {"communicator", facts.communicator}};
    if (facts.resumed) {
        say({fmt::format("resumed from {}: epoch {}, after step {}", options_.resume,
                         facts.begin.epoch, facts.begin.step)});
        json["resumed"] = {{"epoch", facts.begin.epoch}, {"step", facts.begin.step}};
    }
    write_json(json.dump());
}

void Report::step(int epoch, const StepResult& done, std::int64_t images_done, double mean_loss) {
    if (!reports_) {
        return;
    }
    const std::int64_t step = done.step + 1;
    const bool logged = step % options_.log_interval == 0 || step == facts_.steps_per_epoch;
    if (logged && json_.is_open()) {
        nlohmann::ordered_json json = {{"event", "step"},
                                       {"epoch", epoch},
                                       {"step", (epoch - 1) * facts_.steps_per_epoch + step},
                                       {"loss", done.loss},
                                       {"learning_rate", done.learning_rate}};
        if (options_.precision == Precision::fp16) {
            json["loss_scale"] = done.loss_scale;
            json["skipped"] = done.skipped;
        }
        write_json(json.dump());
    }
    if (columns_ > 0) {
        if (seconds_since(bar_drawn_) >= kBarInterval) {
            bar_drawn_ = Clock::now();
            draw_bar(epoch, images_done, mean_loss);
        }
    } else if (logged) {
        say({fmt::format("epoch {}/{}", epoch, options_.epochs),
             fmt::format("step {}/{}", step, facts_.steps_per_epoch),
             fmt::format("loss {:.6f}", done.loss)});
    }
}

void Report::draw_bar(int epoch, std::int64_t images_done, double mean_loss) {
    columns_ = terminal_columns();  // it may have become narrower
    const double elapsed = seconds_since(run_start_);
    const Cursor& begin = facts_.begin;
    const auto epochs = [&](int whole, std::int64_t images) {
        return whole - 1 + static_cast<double>(images) / static_cast<double>(facts_.train_images);
    };
    const double epochs_done = epochs(epoch, images_done);
    const double before = epochs(begin.epoch, begin.images);
    const std::int64_t new_images = images_done - (epoch == begin.epoch ? begin.images : 0);
    Progress progress;
    progress.epoch = epoch;
    progress.epochs = options_.epochs;
    progress.done = images_done;
    progress.images = facts_.train_images;
    progress.images_per_second = static_cast<double>(new_images) / (elapsed - done_seconds_);
    progress.loss = mean_loss;
    progress.seconds_left = elapsed / (epochs_done - before) * (options_.epochs - epochs_done);
    fmt::print("{}{}", kClearLine, progress_line(progress, columns_));
    std::fflush(stdout);
}

void Report::epoch(const EpochFacts& facts) {
    if (!reports_) {
        return;
    }
    done_seconds_ = seconds_since(run_start_);
    std::vector<std::string> items = {
        fmt::format("epoch {}/{}", facts.epoch, options_.epochs),
        fmt::format("train loss {:.4f}", facts.train_loss),
        fmt::format("train accuracy {:.2f} %", 100.0 * facts.train_accuracy)};
    nlohmann::ordered_json json = {{"event", "epoch"},
                                   {"epoch", facts.epoch},
                                   {"train_loss", facts.train_loss},
                                   {"train_accuracy", facts.train_accuracy}};
    if (facts.test.images > 0) {
        items.push_back(fmt::format("test loss {:.4f}", facts.test.loss));
        items.push_back(fmt::format("test accuracy {:.2f} % ({}/{})", 100.0 * facts.test.accuracy,
                                    facts.test.correct, facts.test.images));
        json["test_loss"] = facts.test.loss;
        json["test_accuracy"] = facts.test.accuracy;
    }
    items.push_back(fmt::format("{:.2f} s", facts.seconds));
    items.push_back(fmt::format("{:.0f} images/s", facts.images_per_second()));
    items.push_back(fmt::format("exposed communication {:.1f} %",
                                100.0 * facts.exposed_comm_seconds / facts.train_seconds));
    if (facts.saved) {
        items.emplace_back("saved");
    }
    say(items);
    json["seconds"] = facts.seconds;
    json["train_seconds"] = facts.train_seconds;
    json["images_per_second"] = facts.images_per_second();
    json["exposed_comm_seconds"] = facts.exposed_comm_seconds;
    write_json(json.dump());
}

void Report::end(double seconds, double best_accuracy, std::int64_t peak_memory_bytes,
                 bool interrupted) {
    if (!reports_) {
        return;
    }
    if (interrupted) {
        std::vector<std::string> items = {"interrupted: all ranks stopped after the same step"};
        if (!options_.save.empty()) {
            items.push_back(fmt::format("--resume {} goes on from here", options_.save));
        }
        say(items, "; ");
    }
    const bool evaluated = best_accuracy >= 0.0;
    std::vector<std::string> items = {fmt::format("total {:.2f} s", seconds)};
    if (evaluated) {
        items.push_back(fmt::format("best test accuracy {:.2f} %", 100.0 * best_accuracy));
    }
    say(items, ", ");
    nlohmann::ordered_json json = {{"event", "end"},
                                   {"seconds", seconds},
                                   {"interrupted", interrupted},
                                   {"peak_memory_bytes", peak_memory_bytes}};
    if (evaluated) {
        json["best_test_accuracy"] = best_accuracy;
    }
    write_json(json.dump());
}

}  // namespace gyre::train
