// gyre train: sets everything up on all ranks alike, then trains epoch by epoch.
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>

#include "kernels/base/clock.hpp"
#include "train/bucket_table.hpp"
#include "train/cli/checkpoint_files.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/flag_values.hpp"
#include "train/cli/report.hpp"
#include "train/cli/setup.hpp"
#include "train/hash.hpp"
#include "train/interrupt.hpp"
#include "train/session.hpp"
#include "train/sync_check.hpp"
#include "train/tune.hpp"

namespace gyre::train {
namespace {

constexpr const char* kTheModel = "the model";
constexpr const char* kTheDataSet = "the data set";

// The largest resident set of any rank, in bytes.
std::int64_t peak_memory_bytes(Communicator& comm) {
    struct rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    std::vector<double> all(static_cast<std::size_t>(comm.size()));
    all[static_cast<std::size_t>(comm.rank())] = static_cast<double>(usage.ru_maxrss) * 1024.0;
    comm.allreduce_sum(all);
    return static_cast<std::int64_t>(*std::max_element(all.begin(), all.end()));
}

void print_trials(const std::vector<BucketTrial>& trials) {
    for (const BucketTrial& trial : trials) {
        std::int64_t largest = 0;
        for (const Bucket& bucket : trial.buckets) {
            largest = std::max(largest, bucket.bytes());
        }
        fmt::print("--tune-buckets: {:>3} bucket{}, largest {:>8.1f} KiB: {:>9.3f} ms a step{}\n",
                   trial.buckets.size(), trial.buckets.size() == 1 ? " " : "s",
                   static_cast<double>(largest) / 1024.0, 1e3 * trial.seconds,
                   trial.taken                 ? "  (taken)"
                   : &trial == &trials.front() ? "  (auto)"
                                               : "");
    }
    std::fflush(stdout);
}

// Throws AgreedError where a step has gone wrong, on all ranks alike.
void require_finite(const StepResult& done, int epoch, const TrainOptions& options) {
    if (!done.not_finite.empty()) {
        throw AgreedError(
            ExitCode::diverged,
            fmt::format("the gradient of {} became NaN or infinite in epoch {}, step {} (the loss "
                        "there is {}); no layer after it is affected; lower --lr or set "
                        "--max-grad-norm{}",
                        done.not_finite, epoch, done.step + 1, done.loss,
                        options.reduction.type == DataType::float16
                            ? "; fp16 ends at 65504, --comm-dtype bf16 does not"
                        : options.precision == Precision::fp16
                            ? "; fp16 ends at 65504, --precision bf16 does not"
                            : ""));
    }
    if (!std::isfinite(done.loss)) {
        throw AgreedError(ExitCode::diverged,
                          fmt::format("the loss became {} in epoch {}, step {}; lower --lr, and "
                                      "check the data set's values",
                                      done.loss, epoch, done.step + 1));
    }
}

class TrainCommand {
 public:
    // Collective: every rank sets itself up; nobody goes on before all have succeeded and agree.
    TrainCommand(Communicator& comm, const TrainOptions& options);
    ExitCode run();

 private:
    Dataset load();
    SessionSpec session_spec(const Dataset& data) const;
    int graph_steps() const;
    // What a training must have again to be the same.
    Settings settings(const Dataset& data) const;
    void start_weights();
    // Trains for an epoch and evaluates it; sets stopped_ where it was interrupted.
    EpochFacts train_epoch(int epoch);
    void train_steps(EpochFacts& epoch);
    // Of --max-seconds, by rank 0's clock: the others hear of it with the step's sums.
    bool time_is_up() const {
        return comm_.is_root() && options_.max_seconds &&
               seconds_since(start_) >= *options_.max_seconds;
    }
    // Collective. Why the training has ended, the same on all ranks.
    Ending ending(bool target_reached);
    void account(const StepResult& done, EpochFacts& epoch);
    // All that is submitted, so that the device is where cursor_ says.
    void finish_steps(EpochFacts& epoch);
    void save(bool last, bool best);
    void open_trace();
    void write_trace();

    Communicator& comm_;
    const TrainOptions& options_;
    const Clock::time_point start_ = Clock::now();
    std::unique_ptr<CheckpointFiles> files_;
    std::unique_ptr<Backend> backend_;
    WeightFacts weight_facts_;
    SessionSpec spec_;
    RunFacts facts_;
    std::unique_ptr<Session> session_;
    std::unique_ptr<DeviceImages> test_images_;
    std::unique_ptr<Report> report_;
    std::unique_ptr<Trace> trace_;  // where rank 0 wants one
    std::ofstream trace_file_;

    Settings settings_;
    Cursor cursor_;
    bool stopped_ = false;
    bool save_asked_ = false;
    BucketTimes times_;  // of the epoch
};

Dataset TrainCommand::load() {
    Dataset data;
    agree(comm_, [&] {
        if (options_.target_accuracy && !options_.evaluate) {
            throw usage_error("--target-accuracy needs the evaluation that --no-eval leaves out");
        }
        files_ = std::make_unique<CheckpointFiles>(options_, comm_.is_root());
        backend_ = make_backend(options_, comm_);
        if (const int gpus = backend_->host_memory() ? 0 : cuda_device_count();
            comm_.size() == 1 && gpus > 1 && !options_.quiet) {
            fmt::print(stderr,
                       "gyre: this host has {} GPUs, of which one rank uses one; "
                       "`gyre launch --gpus -- train ...` uses all\n",
                       gpus);
        }
        WeightFacts& facts = weight_facts_;
        facts.model = load_model(options_.model);
        data = load_dataset({options_.data, options_.limit, options_.classes, options_.resize,
                             tell_of_data(comm_, options_.quiet)});
        facts.classes = data.classes;
        facts.class_names = data.class_names;
        spec_ = session_spec(data);
        check(spec_.optimizer);
        facts.normalisation = choose_normalisation(options_, data.train);
        if (files_->writes()) {
            facts.measured =
                options_.mean.empty() ? facts.normalisation : measure_normalisation(data.train);
        }
    });
    settings_ = settings(data);
    require_same_manifest(
        comm_, {{kTheModel, settings_[kTheModel]}, {kTheDataSet, settings_[kTheDataSet]}});
    return data;
}

int TrainCommand::graph_steps() const {
    if (options_.check_sync > 0 && options_.graph_steps.value_or(1) > 1) {
        throw usage_error(
            "`check-sync` compares parameters between steps: leave `graph-steps` at 1");
    }
    constexpr int kStepsOnGpu = 8;
    const bool gpu = backend_->can_capture() && !backend_->device_identity().emulated;
    return options_.graph_steps.value_or(gpu && options_.check_sync == 0 ? kStepsOnGpu : 1);
}

SessionSpec TrainCommand::session_spec(const Dataset& data) const {
    if (options_.shards > 0 && options_.kernels == "auto") {
        throw usage_error(
            "`kernels` auto chooses by what is fast at the moment, and bits follow; "
            "with `shards` say ours or cudnn");
    }
    const std::int64_t parts =
        options_.shards > 0 ? options_.shards : std::int64_t{options_.accumulate} * comm_.size();
    const std::int64_t batches = options_.batch_size * parts;
    const std::int64_t global_batch = options_.global_batch.value_or(batches);
    const std::int64_t epoch_steps = Sharding{data.train.count, global_batch}.steps();
    OptimizerSpec optimizer = options_.optimizer;
    optimizer.schedule.total_steps = options_.epochs * epoch_steps;
    if (options_.lr_step_size) {
        optimizer.schedule.step_size = *options_.lr_step_size * epoch_steps;
    }
    if (options_.precision == Precision::fp16) {
        optimizer.loss_scaling.emplace();
    }
    if (options_.warmup_epochs) {
        optimizer.schedule.warmup_steps = *options_.warmup_epochs * epoch_steps;
    }
    return {.model = weight_facts_.model,
            .classes = data.classes,
            .global_batch = global_batch,
            .accumulate = options_.accumulate,
            .shards = options_.shards,
            .seed = options_.seed,
            .init = options_.init_weights,
            .shuffle = options_.shuffle,
            .dropout = options_.dropout,
            .augment = options_.augment,
            .type = type_of(options_.precision),
            .label_smoothing = options_.label_smoothing,
            .eval_images = options_.evaluate ? data.test.count : 0,
            .eval_batch = options_.test_batch_size,
            .optimizer = optimizer,
            .reduction = options_.reduction,
            .shard_optimizer = options_.shard_optimizer,
            .graph = options_.graph,
            .graph_steps = graph_steps()};
}

Settings TrainCommand::settings(const Dataset& data) const {
    const DeviceIdentity device = backend_->device_identity();
    Settings all = options_.flags;
    all[kTheModel] = hash_text(weight_facts_.model.source);
    all[kTheDataSet] = hash_dataset(data);
    all["the global batch"] = fmt::format("{}", spec_.global_batch);
    all["the device"] = backend_->host_memory() ? "CPU" : device.emulated ? "emulated GPU" : "GPU";
    // Without shards sums over the ranks are rounded as their number and the library have it.
    if (options_.shards == 0) {
        all["the number of ranks"] = fmt::format("{}", comm_.size());
    }
    if (options_.shards == 0 && comm_.size() > 1) {
        const std::string library = comm_.description();
        all["the communicator"] = library.substr(0, library.find(','));
    }
    const ScheduleSpec& schedule = spec_.optimizer.schedule;
    if (schedule.kind == ScheduleKind::cosine || schedule.kind == ScheduleKind::one_cycle) {
        all["the steps of --lr-schedule"] = fmt::format("{}", schedule.total_steps);
    }
    return all;
}

// Rank 0's, which is to be refused before the training rather than after it.
void TrainCommand::open_trace() {
    if (comm_.is_root() && !options_.trace.empty()) {
        trace_file_.open(options_.trace, std::ios::binary | std::ios::trunc);
        if (!trace_file_) {
            throw input_error(
                fmt::format("--trace {}: the file cannot be written: {}; check the path",
                            options_.trace, std::strerror(errno)));
        }
    }
}

void TrainCommand::write_trace() {
    if (trace_ == nullptr) {
        return;
    }
    const std::string text = trace_->gather();
    agree(comm_, [&] {
        if (!comm_.is_root()) {
            return;
        }
        if (text.empty()) {
            fmt::print(stderr,
                       "gyre: --trace {}: the training ended before step {}: nothing was recorded; "
                       "give --trace-steps\n",
                       options_.trace, options_.trace_steps.first);
        }
        if (!(trace_file_ << text << std::flush)) {
            throw input_error(fmt::format("--trace {}: writing it failed: {}; is the disk full?",
                                          options_.trace, std::strerror(errno)));
        }
    });
}

void TrainCommand::start_weights() {
    files_->meet(comm_);
    agree(comm_, [&] {
        if (comm_.is_root() && options_.init.empty()) {
            session_->net().initialise(options_.seed);
        } else if (comm_.is_root()) {
            const TensorFile file = read_weights(options_.init);
            for (const std::string& remark :
                 session_->net().import_parameters(file.tensors, options_.init)) {
                fmt::print(stderr, "gyre: {}: {}\n", options_.init, remark);
            }
        }
        report_ = std::make_unique<Report>(options_, comm_.is_root());
        open_trace();
    });
    session_->share_parameters();
}

TrainCommand::TrainCommand(Communicator& comm, const TrainOptions& options)
    : comm_(comm), options_(options) {
    Dataset data = load();
    facts_.model = weight_facts_.model.name;
    facts_.dataset = data.name;
    facts_.train_images = data.train.count;
    facts_.test_images = data.test.count;
    facts_.classes = data.classes;
    facts_.ranks = comm.size();
    session_ = std::make_unique<Session>(comm, *backend_, spec_, std::move(data.train),
                                         weight_facts_.normalisation);
    facts_.device = backend_->description();
    facts_.communicator = comm.description();
    facts_.precision = word_for(options.precision, kPrecisions);
    facts_.parameters = session_->net().parameter_count();
    facts_.global_batch = spec_.global_batch;
    facts_.batch_size = static_cast<int>(session_->sharding().most_local());
    facts_.steps_per_epoch = session_->sharding().steps();
    start_weights();
    test_images_ = std::make_unique<DeviceImages>(*backend_, std::move(data.test),
                                                  weight_facts_.normalisation);
    if (options.tune_buckets && comm.size() > 1) {
        const std::vector<BucketTrial> trials = tune_buckets(*session_);
        if (comm.is_root() && !options.quiet) {
            print_trials(trials);
        }
    }
    if (files_->traces()) {
        trace_ = std::make_unique<Trace>(*session_, options.trace_steps);
    }
    if (files_->resumes()) {
        cursor_ = files_->resume(*session_, settings_);
        session_->share_parameters();
        facts_.begin = cursor_;
        facts_.resumed = true;
    }
}

void TrainCommand::account(const StepResult& done, EpochFacts& epoch) {
    stopped_ = stopped_ || done.stop;
    save_asked_ = save_asked_ || done.save;
    cursor_.loss_sum += done.loss * static_cast<double>(done.images);
    cursor_.images += done.images;
    cursor_.correct += done.correct;
    epoch.images += done.images;
    times_.add(done.communication);
    require_finite(done, epoch.epoch, options_);
    report_->step(epoch.epoch, done, cursor_.images,
                  cursor_.loss_sum / static_cast<double>(cursor_.images));
}

void TrainCommand::finish_steps(EpochFacts& epoch) {
    Trainer& trainer = session_->trainer();
    while (const auto done = trainer.next_result()) {
        account(*done, epoch);
    }
    cursor_.step = trainer.next_step();
}

void TrainCommand::save(bool last, bool best) {
    const std::int64_t step = (cursor_.epoch - 1) * session_->sharding().steps() + cursor_.step;
    files_->save(*session_, weight_facts_, settings_, cursor_, step, last, best);
    save_asked_ = false;
}

void TrainCommand::train_steps(EpochFacts& epoch) {
    Trainer& trainer = session_->trainer();
    const std::int64_t steps = session_->sharding().steps();
    const std::int64_t before = (epoch.epoch - 1) * steps;
    bool due = false;
    trainer.begin_epoch(static_cast<std::uint32_t>(epoch.epoch), cursor_.step);
    for (std::int64_t step = cursor_.step; step < steps && !stopped_; ++step) {
        if (trace_ != nullptr && trainer.at_launch()) {
            trace_->before_step(before + step + 1);
        }
        const bool asks = trainer.at_launch() && take_save_request();
        if (const auto done = trainer.step(step, interrupt_requested() || time_is_up(), asks)) {
            account(*done, epoch);
        }
        if (options_.check_sync > 0 && (before + step + 1) % options_.check_sync == 0) {
            require_same_parameters(comm_, session_->net(),
                                    fmt::format("epoch {}, step {}", epoch.epoch, step + 1));
        }
        due = due || files_->due_after_steps(before + step + 1);
        if ((due || save_asked_) && trainer.at_launch()) {
            finish_steps(epoch);
            save(true, false);
            due = false;
        }
    }
    finish_steps(epoch);
}

EpochFacts TrainCommand::train_epoch(int number) {
    const Clock::time_point start = Clock::now();
    EpochFacts epoch;
    epoch.epoch = number;
    times_ = {};
    train_steps(epoch);
    epoch.train_loss = cursor_.loss_sum / static_cast<double>(cursor_.images);
    epoch.train_accuracy =
        static_cast<double>(cursor_.correct) / static_cast<double>(cursor_.images);
    epoch.train_seconds = seconds_since(start);
    epoch.exposed_comm_seconds = times_.exposed;
    if (options_.verbose && number == 1 && comm_.is_root()) {
        fmt::print("{}", bucket_table(session_->reducer().buckets(), session_->net(),
                                      options_.reduction.type, &times_));
    }
    if (!stopped_ && options_.evaluate) {
        epoch.test = session_->evaluate(*test_images_);
        stopped_ = epoch.test.stop;
    }
    if (stopped_) {
        save(true, false);
    } else {
        epoch.saved = !options_.evaluate || epoch.test.accuracy > cursor_.best_accuracy;
        cursor_ = {.epoch = number + 1,
                   .best_accuracy = options_.evaluate
                                        ? std::max(cursor_.best_accuracy, epoch.test.accuracy)
                                        : cursor_.best_accuracy};
        save(files_->due_after_epochs(number) || save_asked_, epoch.saved);
        epoch.saved = epoch.saved && files_->saves();
    }
    epoch.seconds = seconds_since(start);
    return epoch;
}

std::string graph_text(const Trainer& trainer) {
    if (!trainer.graph()) {
        return "none";
    }
    return trainer.graph_steps() == 1
               ? "a step of a whole batch"
               : fmt::format("{} steps of a whole batch each", trainer.graph_steps());
}

Ending TrainCommand::ending(bool target_reached) {
    if (!stopped_) {
        return target_reached ? Ending::target : Ending::complete;
    }
    double interrupts = interrupt_requested() ? 1.0 : 0.0;
    comm_.allreduce_sum({&interrupts, 1});
    return interrupts > 0.0 ? Ending::interrupted : Ending::time;
}

ExitCode TrainCommand::run() {
    install_interrupt_handlers();
    report_->start(facts_);
    if (options_.verbose && comm_.is_root()) {
        fmt::print(
            "{}communicator: {}\nCUDA graph: {}\n{}{}{}", session_->net().description(),
            facts_.communicator, graph_text(session_->trainer()),
            bucket_table(session_->reducer().buckets(), session_->net(), options_.reduction.type),
            session_->factors().summary(), backend_->choices());
    }
    if (cursor_.epoch > options_.epochs && comm_.is_root()) {
        fmt::print(stderr, "gyre: --resume {}: all {} epochs are done; --epochs asks for more\n",
                   options_.resume, cursor_.epoch - 1);
    }
    // By sums over all ranks.
    const auto reached = [&] {
        return options_.target_accuracy &&
               100.0 * cursor_.best_accuracy >= *options_.target_accuracy;
    };
    for (int number = cursor_.epoch; number <= options_.epochs && !stopped_ && !reached();
         ++number) {
        const EpochFacts epoch = train_epoch(number);
        if (!stopped_) {
            report_->epoch(epoch);
        }
    }
    files_->finish(comm_);
    write_trace();
    const Ending why = ending(reached());
    report_->end(seconds_since(start_), cursor_.best_accuracy, peak_memory_bytes(comm_), why);
    return why == Ending::interrupted ? ExitCode::interrupted : ExitCode::success;
}

}  // namespace

ExitCode run_train(Communicator& comm, const TrainOptions& options) {
    return TrainCommand(comm, options).run();
}

}  // namespace gyre::train
