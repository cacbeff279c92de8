// What a user sees of a training: lines or a progress bar on standard output, and JSON lines in a
// file. Rank 0 alone reports.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/base/clock.hpp"
#include "train/cli/metrics.hpp"
#include "train/cli/options.hpp"
#include "train/evaluator.hpp"
#include "train/trainer.hpp"

namespace gyre::train {

struct RunFacts {
    std::string model, dataset, device, communicator, precision;
    std::int64_t parameters = 0, train_images = 0, test_images = 0;
    int ranks = 1, batch_size = 0, classes = 0;
    std::int64_t global_batch = 0, steps_per_epoch = 0;
    Cursor begin;  // of a training that goes on
    bool resumed = false;
};

struct EpochFacts {
    int epoch = 0;
    double train_loss = 0.0;      // mean over the images, each before its step's update
    double train_accuracy = 0.0;  // likewise, dropout included
    Evaluation test;              // of the test set; no images where evaluation is off
    double seconds = 0.0, train_seconds = 0.0, exposed_comm_seconds = 0.0;
    std::int64_t images = 0;  // since the training began, or went on
    bool saved = false;
    double images_per_second() const { return static_cast<double>(images) / train_seconds; }
};

// Why a training ended.
enum class Ending { complete, interrupted, time, target };

class Report {
 public:
    // reports: prints and writes, as rank 0 does. Throws Error(bad_input) if the JSON file cannot
    // be written.
    Report(const TrainOptions& options, bool reports);

    void start(const RunFacts& facts);
    // After a step of this epoch.
    void step(int epoch, const StepResult& done, std::int64_t images_done, double mean_loss);
    void epoch(const EpochFacts& facts);
    void end(double seconds, double best_accuracy, std::int64_t peak_memory_bytes, Ending ending);

 private:
    void say(const std::vector<std::string>& items, const std::string& separator = "  ") const;
    void draw_bar(int epoch, std::int64_t images_done, double mean_loss);

    const TrainOptions& options_;
    const bool reports_;
    int columns_;  // of the terminal that is watched; 0: none
    RunFacts facts_;
    MetricsFiles files_;
    Clock::time_point run_start_, bar_drawn_;
    double done_seconds_ = 0.0;  // of finished epochs
};

}  // namespace gyre::train
