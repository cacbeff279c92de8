#include "train/cli/progress_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "comm/launch/local_ranks.hpp"
#include "train/cli/terminal.hpp"
#include "train/settings.hpp"

namespace gyre::train {
namespace {

constexpr double kBarInterval = 0.1;  // seconds between two drawings of the bar

std::string graph_text(const GraphCache& graphs) {
    if (!graphs.enabled()) {
        return "none";
    }
    return graphs.max_steps() == 1
               ? "a step of a whole batch"
               : fmt::format("{} steps of a whole batch each", graphs.max_steps());
}

void add_result(std::vector<std::string>& items, const EvaluatedSet& set, const Evaluation& found) {
    items.push_back(fmt::format("{} loss {:.4f}", set.name, found.loss));
    items.push_back(fmt::format("{} accuracy {:.2f} % ({}/{})", set.name, 100.0 * found.accuracy,
                                found.correct, found.images));
}

// How the training runs, for -v.
std::string structure(Session& session) {
    return fmt::format("{}step: {}\ncommunicator: {}\nCUDA graph: {}\n{}{}{}",
                       session.net().description(), session.program().description(),
                       session.communicator().description(), graph_text(session.trainer().graphs()),
                       bucket_table(session.reducer().buckets(), session.net()),
                       session.factors().summary(), session.backend().choices());
}

}  // namespace

ProgressReport::ProgressReport(const RunSpec& run, bool is_root)
    : run_(run),
      is_root_(is_root),
      columns_(is_root && !run.reports.quiet ? terminal_columns() : 0),
      run_start_(Clock::now()) {}

void ProgressReport::say(const std::vector<std::string>& items,
                         const std::string& separator) const {
    if (!run_.reports.quiet) {
        fmt::print("{}{}\n", columns_ > 0 ? comm::kClearLine : "",
                   wrap(items, separator, columns_));
        std::fflush(stdout);
    }
}

void ProgressReport::on_start(const Training& training) {
    if (!is_root_) {
        return;
    }
    Session& session = training.session;
    const Sharding& sharding = session.sharding();
    begin_ = training.cursor;
    run_start_ = Clock::now();
    std::vector<std::string> items = {
        fmt::format("{}: {} parameters", training.model, session.net().parameter_count()),
        fmt::format("{}: {} + {} images, {} classes", training.dataset, sharding.images,
                    training.evaluated.images->count(), training.classes),
        fmt::format("{} rank{} of batch {} ({} in all), {} steps an epoch", sharding.ranks,
                    sharding.ranks == 1 ? "" : "s", sharding.most_local(), sharding.global_batch,
                    sharding.steps()),
        session.backend().description()};
    if (run_.net.precision != Precision::fp32) {
        items.push_back(name_of(run_.net.precision));
    }
    say(items, " · ");
    const std::string& resume = run_.checkpoints.resume;
    if (training.resumed) {
        say({fmt::format("resumed from {}: epoch {}, after step {}", resume, begin_.epoch,
                         begin_.step)});
    }
    if (run_.reports.verbose) {
        fmt::print("{}", structure(session));
    }
    if (begin_.epoch > run_.stop.epochs) {
        fmt::print(stderr, "gyre: --resume {}: all {} epochs are done; --epochs asks for more\n",
                   resume, begin_.epoch - 1);
    }
}

void ProgressReport::on_step(const Training& training, const StepResult& done) {
    if (!is_root_) {
        return;
    }
    const std::int64_t step = done.step + 1, steps = training.session.sharding().steps();
    if (columns_ > 0) {
        if (seconds_since(bar_drawn_) >= kBarInterval) {
            draw_bar(training, {.done = training.cursor.images,
                                .images = training.session.sharding().images});
        }
    } else if (step % run_.reports.log_interval == 0 || step == steps) {
        say({fmt::format("epoch {}/{}", training.cursor.epoch, run_.stop.epochs),
             fmt::format("step {}/{}", step, steps), fmt::format("loss {:.6f}", done.loss)});
    }
}

void ProgressReport::on_evaluation(const Training& training, const EvaluatedSet& set,
                                   std::int64_t done, std::int64_t images) {
    const bool begins = !evaluation_begin_;
    evaluation_begin_ = evaluation_begin_.value_or(Clock::now());
    if (columns_ > 0 && (begins || seconds_since(bar_drawn_) >= kBarInterval)) {
        const std::int64_t all = set.images->count();
        draw_bar(training, {.evaluates = true, .done = all * done / images, .images = all});
    }
}

// Steps are to take as long as they have taken so far, and so are evaluations. Until one has been
// measured, an image takes a third of its time in a step.
double ProgressReport::seconds_left(const Training& training) const {
    const auto images = static_cast<double>(training.session.sharding().images);
    const auto epochs = [&](const Cursor& at) {
        return at.epoch - 1 + static_cast<double>(at.images) / images;
    };
    const double done = epochs(training.cursor), before = epochs(begin_);
    const double evaluates = evaluation_begin_ ? seconds_since(*evaluation_begin_) : 0.0;
    const double of_epoch =
        (seconds_since(run_start_) - evaluation_seconds_ - evaluates) / (done - before);
    const double of_evaluation =
        !run_.evaluation.enabled ? 0.0
        : evaluations_ > 0
            ? evaluation_seconds_ / evaluations_
            : of_epoch / 3.0 * static_cast<double>(training.evaluated.images->count()) / images;
    return of_epoch * (run_.stop.epochs - done) + std::max(0.0, of_evaluation - evaluates) +
           of_evaluation * (run_.stop.epochs - training.cursor.epoch);
}

void ProgressReport::draw_bar(const Training& training, Progress progress) {
    bar_drawn_ = Clock::now();
    columns_ = terminal_columns();  // it may have become narrower
    const Cursor& cursor = training.cursor;
    const std::int64_t new_images =
        cursor.images - (cursor.epoch == begin_.epoch ? begin_.images : 0);
    progress.epoch = std::min(cursor.epoch, run_.stop.epochs);
    progress.epochs = run_.stop.epochs;
    progress.images_per_second =
        static_cast<double>(new_images) / (seconds_since(run_start_) - done_seconds_);
    progress.loss = training.mean_loss();
    progress.seconds_left = seconds_left(training);
    fmt::print("{}{}", comm::kClearLine, progress_line(progress, columns_));
    std::fflush(stdout);
}

void ProgressReport::on_epoch(const Training& training, const EpochFacts& epoch) {
    if (!is_root_) {
        return;
    }
    if (run_.reports.verbose && epoch.epoch == 1) {
        Session& session = training.session;
        fmt::print("{}",
                   bucket_table(session.reducer().buckets(), session.net(), &epoch.communication));
    }
    if (epoch.stopped) {
        return;
    }
    done_seconds_ = seconds_since(run_start_);
    if (epoch.evaluation.images > 0) {
        evaluation_seconds_ += seconds_since(epoch.begin) - epoch.train_seconds;
        ++evaluations_;
        evaluation_begin_.reset();
    }
    std::vector<std::string> items = {
        fmt::format("epoch {}/{}", epoch.epoch, run_.stop.epochs),
        fmt::format("train loss {:.4f}", epoch.train_loss),
        fmt::format("train accuracy {:.2f} %", 100.0 * epoch.train_accuracy)};
    if (epoch.evaluation.images > 0) {
        add_result(items, training.evaluated, epoch.evaluation);
    }
    items.push_back(fmt::format("{:.2f} s", seconds_since(epoch.begin)));
    if (epoch.images > 0) {  // or it was resumed at its end
        items.push_back(fmt::format("{:.0f} images/s", epoch.images_per_second()));
    }
    if (training.session.communicator().size() > 1) {
        items.push_back(fmt::format("exposed communication {:.1f} %",
                                    100.0 * epoch.communication.exposed / epoch.train_seconds));
    }
    if (epoch.best && !run_.checkpoints.save.empty()) {
        items.emplace_back("saved");
    }
    say(items);
}

void ProgressReport::on_end(const Training& training, Ending ending) {
    if (!is_root_) {
        return;
    }
    const EndingFacts& why = facts(ending);
    const std::vector<SettingValue> values = values_of(run_);
    const SettingValue* const asked = find(values, why.setting);
    const std::string setting =
        asked == nullptr ? "interrupted" : fmt::format("--{} {}", asked->name, asked->value);
    if (asked != nullptr && !why.within_epoch) {
        say({setting + ": reached"});
    }
    if (why.within_epoch) {
        std::vector<std::string> items = {setting + ": all ranks stopped after the same step"};
        if (!run_.checkpoints.save.empty()) {
            items.push_back(fmt::format("--resume {} resumes from here", run_.checkpoints.save));
        }
        say(items, "; ");
    }
    std::vector<std::string> items = {fmt::format("total {:.2f} s", seconds_since(training.begin))};
    if (training.cursor.best_accuracy >= 0.0) {
        items.push_back(fmt::format("best {} accuracy {:.2f} %", training.evaluated.name,
                                    100.0 * training.cursor.best_accuracy));
    }
    if (training.outcome) {
        add_result(items, *training.held_back, *training.outcome);
    }
    say(items, ", ");
}

}  // namespace gyre::train
