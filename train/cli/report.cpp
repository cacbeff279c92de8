#include "train/cli/report.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "kernels/base/clock.hpp"
#include "train/cli/terminal.hpp"

namespace gyre::train {
namespace {

constexpr const char* kClearLine = "\r\033[K";
constexpr const char* kEndings[] = {"complete", "interrupted", "max-seconds", "target-accuracy"};
constexpr double kBarInterval = 0.1;  // seconds between two drawings of the bar

}  // namespace

Report::Report(const TrainOptions& options, bool reports)
    : options_(options),
      reports_(reports),
      columns_(reports && !options.quiet ? terminal_columns() : 0),
      run_start_(Clock::now()) {
    if (reports) {
        files_ = MetricsFiles(options);
    }
}

void Report::say(const std::vector<std::string>& items, const std::string& separator) const {
    if (!options_.quiet) {
        fmt::print("{}{}\n", columns_ > 0 ? kClearLine : "", wrap(items, separator, columns_));
        std::fflush(stdout);
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
    files_.write(json);
}

void Report::step(int epoch, const StepResult& done, std::int64_t images_done, double mean_loss) {
    if (!reports_) {
        return;
    }
    const std::int64_t step = done.step + 1;
    const bool logged = step % options_.log_interval == 0 || step == facts_.steps_per_epoch;
    if (logged && files_.any()) {
        nlohmann::ordered_json json = {{"event", "step"},
                                       {"epoch", epoch},
                                       {"step", (epoch - 1) * facts_.steps_per_epoch + step},
                                       {"loss", done.loss},
                                       {"learning_rate", done.learning_rate}};
        if (options_.precision == Precision::fp16) {
            json["loss_scale"] = done.loss_scale;
            json["skipped"] = done.skipped;
        }
        files_.write(json);
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
                                   {"step", facts.epoch * facts_.steps_per_epoch},
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
    files_.write(json);
}

void Report::end(double seconds, double best_accuracy, std::int64_t peak_memory_bytes,
                 Ending ending) {
    if (!reports_) {
        return;
    }
    const bool early = ending == Ending::interrupted || ending == Ending::time;
    if (ending == Ending::target) {
        say({fmt::format("--target-accuracy {}: reached", *options_.target_accuracy)});
    }
    if (early) {
        std::vector<std::string> items = {fmt::format(
            "{}: all ranks stopped after the same step",
            ending == Ending::time ? fmt::format("--max-seconds {} are over", *options_.max_seconds)
                                   : "interrupted")};
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
                                   {"interrupted", early},
                                   {"ending", kEndings[static_cast<std::size_t>(ending)]},
                                   {"peak_memory_bytes", peak_memory_bytes}};
    if (evaluated) {
        json["best_test_accuracy"] = best_accuracy;
    }
    files_.write(json);
}

}  // namespace gyre::train
