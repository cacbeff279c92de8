#include "train/report.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "kernels/clock.hpp"
#include "kernels/error.hpp"

namespace gyre::train {
namespace {

std::string duration_text(double seconds) {
    const auto whole = static_cast<long>(std::ceil(seconds));
    return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                         : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

// Whether a person watches. mpirun gives each rank a terminal of its own, wherever the output goes
// from there, so under a launcher its standard output counts: the parent's.
bool on_terminal() {
    if (isatty(STDOUT_FILENO) == 0) {
        return false;
    }
    if (std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) {
        return true;
    }
    std::error_code error;
    const auto target = std::filesystem::read_symlink(
        fmt::format("/proc/{}/fd/{}", static_cast<long>(getppid()), STDOUT_FILENO), error);
    return !error &&
           (target.string().starts_with("/dev/pts/") || target.string().starts_with("/dev/tty"));
}

constexpr double kBarInterval = 0.1;  // seconds between two drawings of the bar
constexpr int kBarWidth = 24;

}  // namespace

Report::Report(const TrainOptions& options, bool quiet)
    : options_(options),
      quiet_(quiet),
      terminal_(!quiet && on_terminal()),
      run_start_(Clock::now()) {
    if (!quiet && !options.json.empty()) {
        json_.open(options.json, std::ios::trunc);
        if (!json_) {
            throw input_error(
                fmt::format("--json {}: the file cannot be written; check the path", options.json));
        }
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
    if (quiet_) {
        return;
    }
    facts_ = facts;
    run_start_ = Clock::now();
    fmt::print(
        "{}: {} parameters · {}: {} + {} images, {} classes · {} rank{} of batch {} ({} in "
        "all), {} steps an epoch · {}\n",
        facts.model, facts.parameters, facts.dataset, facts.train_images, facts.test_images,
        facts.classes, facts.ranks, facts.ranks == 1 ? "" : "s", facts.batch_size,
        facts.global_batch, facts.steps_per_epoch, facts.device);
    std::fflush(stdout);
    write_json(nlohmann::ordered_json({{"event", "start"},
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
                                       {"communicator", facts.communicator}})
                   .dump());
}

void Report::step(int epoch, std::int64_t step, std::int64_t images_done, double loss,
                  double mean_loss) {
    if (quiet_) {
        return;
    }
    const bool logged = step % options_.log_interval == 0 || step == facts_.steps_per_epoch;
    if (logged && json_.is_open()) {
        write_json(nlohmann::ordered_json({{"event", "step"},
                                           {"epoch", epoch},
                                           {"step", (epoch - 1) * facts_.steps_per_epoch + step},
                                           {"loss", loss}})
                       .dump());
    }
    if (terminal_) {
        if (seconds_since(bar_drawn_) < kBarInterval) {
            return;
        }
        bar_drawn_ = Clock::now();
        const double done =
            static_cast<double>(images_done) / static_cast<double>(facts_.train_images);
        const double elapsed = seconds_since(run_start_);
        const double all = elapsed / (epoch - 1 + done) * options_.epochs;
        const int filled = static_cast<int>(done * kBarWidth);
        const double in_epoch = elapsed - done_seconds_;
        fmt::print(
            "\r\033[Kepoch {}/{} [{:#<{}}{:.<{}}] {}/{}  {:.0f} images/s  loss {:.4f}  ETA {}",
            epoch, options_.epochs, "", filled, "", kBarWidth - filled, images_done,
            facts_.train_images, static_cast<double>(images_done) / in_epoch, mean_loss,
            duration_text(all - elapsed));
        std::fflush(stdout);
    } else if (logged) {
        fmt::print("epoch {}/{}  step {}/{}  loss {:.6f}\n", epoch, options_.epochs, step,
                   facts_.steps_per_epoch, loss);
        std::fflush(stdout);
    }
}

void Report::clear_bar() {
    if (terminal_) {
        fmt::print("\r\033[K");
    }
}

void Report::epoch(const EpochFacts& facts) {
    if (quiet_) {
        return;
    }
    done_seconds_ = seconds_since(run_start_);
    clear_bar();
    std::string test;
    nlohmann::ordered_json json = {
        {"event", "epoch"}, {"epoch", facts.epoch}, {"train_loss", facts.train_loss}};
    if (facts.test.images > 0) {
        test = fmt::format("test loss {:.4f}  test accuracy {:.2f} % ({}/{})  ", facts.test.loss,
                           100.0 * facts.test.accuracy, facts.test.correct, facts.test.images);
        json["test_loss"] = facts.test.loss;
        json["test_accuracy"] = facts.test.accuracy;
    }
    fmt::print(
        "epoch {}/{}  train loss {:.4f}  {}{:.2f} s  {:.0f} images/s  exposed communication "
        "{:.1f} %{}\n",
        facts.epoch, options_.epochs, facts.train_loss, test, facts.seconds,
        facts.images_per_second(), 100.0 * facts.exposed_comm_seconds / facts.train_seconds,
        facts.saved ? "  saved" : "");
    std::fflush(stdout);
    json["seconds"] = facts.seconds;
    json["train_seconds"] = facts.train_seconds;
    json["images_per_second"] = facts.images_per_second();
    json["exposed_comm_seconds"] = facts.exposed_comm_seconds;
    write_json(json.dump());
}

void Report::end(double seconds, double best_accuracy, std::int64_t peak_memory_bytes,
                 bool interrupted) {
    if (quiet_) {
        return;
    }
    clear_bar();
    if (interrupted) {
        fmt::print("interrupted: all ranks stopped after the same step{}\n",
                   options_.save.empty() ? "" : "; the best weights so far are kept");
    }
    const bool evaluated = best_accuracy >= 0.0;
    fmt::print(
        "total {:.2f} s{}\n", seconds,
        evaluated ? fmt::format(", best test accuracy {:.2f} %", 100.0 * best_accuracy) : "");
    std::fflush(stdout);
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
