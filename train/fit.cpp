#include "train/fit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "train/interrupt.hpp"

namespace gyre::train {
namespace {

void require_finite(const StepResult& done, int epoch, const RunSpec& run) {
    if (!done.not_finite.empty()) {
        throw AgreedError(
            ExitCode::diverged,
            fmt::format("the gradient of {} became NaN or infinite in epoch {}, step {} (the loss "
                        "there is {}); no layer after it is affected; lower `lr` or set "
                        "`max-grad-norm`{}",
                        done.not_finite, epoch, done.step + 1, done.loss,
                        run.reduction.type == DataType::float16
                            ? "; fp16 ends at 65504, `comm-dtype` bf16 does not"
                        : run.net.precision == Precision::fp16
                            ? "; fp16 ends at 65504, `precision` bf16 does not"
                            : ""));
    }
    if (!std::isfinite(done.loss)) {
        throw AgreedError(ExitCode::diverged,
                          fmt::format("the loss became {} in epoch {}, step {}; lower `lr`, and "
                                      "check the data set's values",
                                      done.loss, epoch, done.step + 1));
    }
}

class Fit {
 public:
    Fit(Training& training, const std::vector<FitObserver*>& observers)
        : training_(training),
          observers_(observers),
          session_(training.session),
          stop_(training.run.stop),
          cursor_(training.cursor) {}

    Ending run() {
        for (FitObserver* observer : observers_) {
            observer->on_start(training_);
        }
        while (!stopped_ && cursor_.epoch <= stop_.epochs && !target_reached() &&
               !out_of_patience()) {
            train_epoch();
        }
        const Ending ending = why();
        if (training_.held_back && !facts(ending).within_epoch) {
            evaluate_held_back();
        }
        for (auto observer = observers_.rbegin(); observer != observers_.rend(); ++observer) {
            (*observer)->on_end(training_, ending);
        }
        return ending;
    }

 private:
    // The accuracy is a sum over all ranks, so all of them agree.
    bool target_reached() const {
        return stop_.target_accuracy && 100.0 * cursor_.best_accuracy >= *stop_.target_accuracy;
    }
    bool out_of_patience() const {
        return stop_.patience && training_.run.evaluation.enabled &&
               cursor_.epoch - 1 - cursor_.best_epoch >= *stop_.patience;
    }
    // Rank 0's clock counts; the others hear of it with the step's sums.
    bool time_is_up() const {
        return session_.communicator().is_root() && stop_.max_seconds &&
               seconds_since(training_.begin) >= *stop_.max_seconds;
    }
    Ending why() const {
        if (ended_) {
            return Ending::complete;
        }
        if (!stopped_) {
            return target_reached()    ? Ending::target
                   : out_of_patience() ? Ending::patience
                                       : Ending::complete;
        }
        double interrupts = interrupt_requested() ? 1.0 : 0.0;
        session_.communicator().allreduce_sum({&interrupts, 1});
        return interrupts > 0.0 ? Ending::interrupted : Ending::time;
    }

    void train_epoch() {
        EpochFacts epoch{.epoch = cursor_.epoch};
        train_steps(epoch);
        epoch.train_loss = training_.mean_loss();
        epoch.train_accuracy =
            static_cast<double>(cursor_.correct) / static_cast<double>(cursor_.images);
        epoch.train_seconds = seconds_since(epoch.begin);
        const bool evaluates = training_.run.evaluation.enabled;
        if (!stopped_ && evaluates) {
            evaluate(epoch);
        }
        epoch.stopped = stopped_;
        if (!stopped_) {
            epoch.best = !evaluates || epoch.evaluation.accuracy > cursor_.best_accuracy;
            const bool better = evaluates && epoch.best;
            cursor_ = {.epoch = epoch.epoch + 1,
                       .best_accuracy = better ? epoch.evaluation.accuracy : cursor_.best_accuracy,
                       .best_epoch = better ? epoch.epoch : cursor_.best_epoch};
            if (training_.held_back && epoch.best) {
                session_.optimizer().with_average(
                    [&] { training_.best.emplace(session_.backend(), session_.net()); });
            }
        }
        for (FitObserver* observer : observers_) {
            observer->on_epoch(training_, epoch);
        }
        look_for_end();
        training_.save_requested = false;
    }

    void train_steps(EpochFacts& epoch) {
        Trainer& trainer = session_.trainer();
        const std::int64_t steps = session_.sharding().steps();
        const std::int64_t before = (epoch.epoch - 1) * steps;
        bool pauses = false;
        trainer.begin_epoch(static_cast<std::uint32_t>(epoch.epoch), cursor_.step);
        for (std::int64_t step = cursor_.step; step < steps && !stopped_; ++step) {
            const bool launches = trainer.at_launch();
            for (FitObserver* observer : observers_) {
                if (launches) {
                    observer->on_launch(training_, before + step + 1);
                }
            }
            const bool saves = launches && wants_save();
            if (const auto done =
                    trainer.step(step, interrupt_requested() || time_is_up(), saves)) {
                account(*done, epoch);
            }
            for (FitObserver* observer : observers_) {
                pauses = observer->pauses_after(before + step + 1) || pauses;
            }
            if ((pauses || training_.save_requested) && trainer.at_launch()) {
                pause(epoch);
                pauses = false;
            }
        }
        finish_steps(epoch);
    }

    bool wants_save() const {
        bool wants = take_save_request();
        for (FitObserver* observer : observers_) {
            wants = observer->wants_save() || wants;
        }
        return wants;
    }

    void pause(EpochFacts& epoch) {
        finish_steps(epoch);
        for (FitObserver* observer : observers_) {
            observer->on_pause(training_);
        }
        look_for_end();
        training_.save_requested = false;
    }

    void look_for_end() {
        for (FitObserver* observer : observers_) {
            ended_ = observer->ends() || ended_;
        }
        stopped_ = stopped_ || ended_;
    }

    void finish_steps(EpochFacts& epoch) {
        while (const auto done = session_.trainer().next_result()) {
            account(*done, epoch);
        }
        cursor_.step = session_.trainer().next_step();
    }

    void account(const StepResult& done, EpochFacts& epoch) {
        stopped_ = stopped_ || done.stop;
        training_.save_requested = training_.save_requested || done.save;
        cursor_.loss_sum += done.loss * static_cast<double>(done.images);
        cursor_.images += done.images;
        cursor_.correct += done.correct;
        epoch.images += done.images;
        epoch.communication.add(done.communication);
        require_finite(done, epoch.epoch, training_.run);
        for (FitObserver* observer : observers_) {
            observer->on_step(training_, done);
        }
    }

    void evaluate(EpochFacts& epoch) {
        const EvaluatedSet& set = training_.evaluated;
        session_.optimizer().with_average(
            [&] { epoch.evaluation = session_.evaluate(*set.images, tell_of(set)); });
        stopped_ = epoch.evaluation.stop;
        if (!stopped_ && !std::isfinite(epoch.evaluation.loss)) {
            throw AgreedError(
                ExitCode::diverged,
                fmt::format("the loss on the {} images is {} after epoch {}; lower `lr`, and "
                            "check the data set's values",
                            set.name, epoch.evaluation.loss, epoch.epoch));
        }
        if (!stopped_ && training_.run.optimizer.schedule.kind == ScheduleKind::plateau) {
            double loss = epoch.evaluation.loss;  // which a library may round for each rank
            session_.communicator().broadcast(&loss, sizeof loss, 0);
            session_.optimizer().evaluated(loss);
        }
    }

    TellDone tell_of(const EvaluatedSet& set) {
        return [this, &set](std::int64_t done, std::int64_t images) {
            for (FitObserver* observer : observers_) {
                observer->on_evaluation(training_, set, done, images);
            }
        };
    }

    void evaluate_held_back() {
        session_.optimizer().with_average([&] {
            KeptNet last(session_.backend(), session_.net());
            if (training_.best) {
                training_.best->put_back();
            }
            const Evaluation found =
                session_.evaluate(*training_.held_back->images, tell_of(*training_.held_back));
            if (!found.stop) {
                training_.outcome = found;
            }
            last.put_back();
        });
    }

    Training& training_;
    const std::vector<FitObserver*>& observers_;
    Session& session_;
    const StopSpec& stop_;
    Cursor& cursor_;
    bool stopped_ = false;  // within an epoch, or ended_
    bool ended_ = false;    // as an observer wanted
};

}  // namespace

Ending fit(Training& training, const std::vector<FitObserver*>& observers) {
    return Fit(training, observers).run();
}

}  // namespace gyre::train
