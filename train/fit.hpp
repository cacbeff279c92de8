// A training from its first epoch to its end: steps, evaluations, what is best, when it stops.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "train/bucket_table.hpp"
#include "train/checkpoint.hpp"
#include "train/evaluator.hpp"
#include "train/kept_net.hpp"
#include "train/rooms.hpp"
#include "train/run_spec.hpp"
#include "train/session.hpp"

namespace gyre::train {

struct EvaluatedSet {
    std::string name;  // in files of metrics, such as test
    const DeviceImages* images;
};

// A training under way, as its observers see it. The caller of fit() fills in everything before the
// cursor; if the training resumes, also the cursor of its checkpoint.
struct Training {
    Session& session;
    const RunSpec& run;
    // Evaluated after each epoch, if run.evaluation is enabled; it decides which epoch is the best.
    EvaluatedSet evaluated;
    // Evaluated once, with the weights of the best epoch, if the training ends with a whole epoch.
    std::optional<EvaluatedSet> held_back = {};
    std::string model = {}, dataset = {};  // names
    int classes = 0;
    Clock::time_point begin = Clock::now();  // seconds are counted from here
    Cursor cursor = {};                      // what comes next
    bool resumed = false;
    // Some rank was asked for a checkpoint since the last pause or epoch.
    bool save_requested = false;
    // If a set is held back: the weights of the best epoch so far, and at the end their result.
    std::optional<KeptNet> best = {};
    std::optional<Evaluation> outcome = {};

    // The number of steps done, over all epochs.
    std::int64_t steps() const { return steps_before(cursor); }
    std::int64_t steps_before(const Cursor& at) const {
        return (at.epoch - 1) * session.sharding().steps() + at.step;
    }
    // The mean over the epoch's images so far, each before its step's update.
    double mean_loss() const { return cursor.loss_sum / static_cast<double>(cursor.images); }
};

struct EpochFacts {
    int epoch = 0;
    bool stopped = false;         // within it: steps or images of the evaluation are missing
    double train_loss = 0.0;      // mean over the images, each before its step's update
    double train_accuracy = 0.0;  // of the same passes, which have dropout
    Evaluation evaluation = {};   // no images if it is off
    bool best = false;            // no earlier epoch was as good; without evaluation, always
    Clock::time_point begin = Clock::now();
    double train_seconds = 0.0;      // of the epoch's steps
    BucketTimes communication = {};  // of the epoch's steps
    std::int64_t images = 0;         // since the epoch began, or resumed
    double images_per_second() const { return static_cast<double>(images) / train_seconds; }
};

// An observer is told of a training's progress. All ranks call the same functions in the same
// order, so each may be collective; if only some ranks may fail in one, it uses agree(). Observers
// are called in their order, and in the reverse one when the training ends: one that keeps a record
// comes before the one that saves, so that no saved epoch lacks its record.
class FitObserver {
 public:
    virtual ~FitObserver() = default;
    virtual void on_start(const Training&) {}
    // Called before step `number` of the training, from 1, is submitted; with graphs of several
    // steps, before the first of them.
    virtual void on_launch(const Training&, std::int64_t /*number*/) {}
    // Called when the result of a step is known, which on GPUs is some steps later.
    virtual void on_step(const Training&, const StepResult&) {}
    // Returns whether the training is to pause when this many of its steps are submitted.
    virtual bool pauses_after(std::int64_t /*steps*/) { return false; }
    // Called before a launch. Returns whether this rank wants a checkpoint: if any does, all pause
    // after a step that is the same for all. Not for collective calls.
    virtual bool wants_save() { return false; }
    // Called if some observer asked for a pause, or a checkpoint was requested. The device has done
    // all steps before the cursor, and none after it.
    virtual void on_pause(const Training&) {}
    // Called within an evaluation, when this rank has done so many of its images. Not for
    // collective calls: ranks differ in their passes.
    virtual void on_evaluation(const Training&, const EvaluatedSet&, std::int64_t /*done*/,
                               std::int64_t /*images*/) {}
    // Called after an epoch's steps and evaluation. The cursor is at the next epoch or, if the
    // training was stopped, at the step where this epoch resumes.
    virtual void on_epoch(const Training&, const EpochFacts&) {}
    // Returns, after an on_pause() or on_epoch(), whether the training is to end there, complete.
    virtual bool ends() { return false; }
    virtual void on_end(const Training&, Ending) {}
};

// Collective. Trains until run.stop says so, a rank is interrupted (train/interrupt.hpp), or all
// epochs are done. Throws AgreedError(diverged) if the loss or a gradient is not finite.
Ending fit(Training& training, const std::vector<FitObserver*>& observers);

}  // namespace gyre::train
