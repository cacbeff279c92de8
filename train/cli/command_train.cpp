// gyre train: makes a training from its flags, on all ranks alike, and runs it.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/resize.hpp"
#include "train/audit.hpp"
#include "train/checkpoint_files.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/progress_report.hpp"
#include "train/cli/setup.hpp"
#include "train/cli/training_setup.hpp"
#include "train/fit.hpp"
#include "train/interrupt.hpp"
#include "train/metrics.hpp"
#include "train/receipt.hpp"
#include "train/sync_check.hpp"
#include "train/trace.hpp"
#include "train/tune.hpp"

namespace gyre::train {

ExitCode run_train(Communicator& comm, const RunSpec& given, const Repetition* repetition) {
    const Clock::time_point begin = Clock::now();
    const bool is_root = comm.is_root();
    RunSpec options = given;
    WeightFacts facts;
    Identity identity;
    Dataset data;
    std::unique_ptr<Backend> backend;
    std::unique_ptr<CheckpointFiles> checkpoints;
    // Every rank sets itself up; nobody continues before all have succeeded and agree.
    agree(comm, [&] {
        check_together(options);
        options.checkpoints.resume = resolve_resume(options.checkpoints, is_root);
        checkpoints = std::make_unique<CheckpointFiles>(options, facts, identity, is_root);
        backend = make_backend(options, comm);
        tell_of_idle_gpus(comm, *backend, options.reports.quiet);
        tell_of_slow_precision(comm, *backend, options);
        facts.model = load_model(options.net.model);
        data = load_dataset(options.data, tell_of_data(comm, options.reports.quiet));
        facts.classes = data.classes;
        facts.class_names = data.class_names;
        facts.resize = options.data.resize ? resize_text(*options.data.resize) : "";
        facts.normalisation = choose_normalisation(options.data, data.train);
        if (checkpoints->writes()) {
            facts.measured =
                options.data.mean.empty() ? facts.normalisation : measure_normalisation(data.train);
        }
    });
    const RootFiles files = root_files(comm, options);
    if (options.batch.automatic_shards && options.batch.shards == 0) {
        options.batch.shards = files.resumes ? checkpoints->virtual_ranks(comm)
                                             : choose_shards(comm, *backend, options);
        options.batch.automatic_shards = false;
    }
    identity = identity_of(options, facts.model, data, *backend, comm);
    if (repetition != nullptr) {
        agree(comm, [&] {
            require_same(repetition->receipt.identity, identity, repetition->place,
                         "on which its bits depend");
        });
    }
    const std::vector<std::int64_t> eval_images = evaluated_images(options, data);
    const bool holds_out = eval_images.size() > 1;
    Session session(comm, *backend, options,
                    {.model = facts.model, .classes = data.classes, .eval_images = eval_images},
                    std::move(data.train), facts.normalisation);
    checkpoints->set_saves(files.saves);
    std::unique_ptr<FitObserver> metrics;
    std::unique_ptr<Trace> trace;
    ProgressReport progress(options, is_root);
    SyncCheck sync_check(options.reports.check_sync);
    agree(comm, [&] {
        if (is_root) {
            tell_of_ignored(options);
        }
        metrics = std::make_unique<MetricsFiles>(options, is_root);
        if (files.traces) {
            trace = std::make_unique<Trace>(options.reports, is_root);
        }
    });
    if (!files.resumes) {
        for (const std::string& remark : session.initialise()) {
            fmt::print(stderr, "gyre: {}\n", remark);
        }
    }
    const DeviceImages test(*backend, std::move(data.test), facts.normalisation);
    std::optional<DeviceImages> validation;
    if (holds_out) {
        validation.emplace(*backend, std::move(data.validation), facts.normalisation);
    }
    if (options.reduction.tune_buckets && comm.size() > 1) {
        const std::vector<BucketTrial> trials = tune_buckets(session);
        if (is_root && !options.reports.quiet) {
            print_trials(trials);
        }
    }
    Training training{.session = session,
                      .run = options,
                      .evaluated = {"test", &test},
                      .model = facts.model.name,
                      .dataset = data.name,
                      .classes = data.classes,
                      .begin = begin,
                      .resumed = files.resumes};
    if (holds_out) {
        training.held_back = std::exchange(training.evaluated, {"val", &*validation});
    }
    if (files.resumes) {
        if (training.held_back) {
            training.best = checkpoints->best(session);
        }
        training.cursor = checkpoints->resume(session);
    }
    // Metrics come before checkpoints: of an epoch that is in the metrics and not in a checkpoint,
    // as a kill may leave it, the line is removed at the resume. The reverse would lose the line.
    std::vector<FitObserver*> observers = {metrics.get(), &progress, checkpoints.get()};
    if (trace != nullptr) {
        observers.insert(observers.end() - 1, trace.get());
    }
    if (options.reports.check_sync > 0) {
        observers.insert(observers.begin(), &sync_check);
    }
    Audit audit(options.reports.audit, options.reports.audit_warns);
    if (options.reports.audit > 0) {
        observers.insert(observers.begin(), &audit);
    }
    ReceiptWriter receipt(options, identity, is_root);
    if (files.saves) {
        observers.insert(observers.end() - 1, &receipt);
    }
    if (repetition != nullptr) {
        observers.insert(observers.begin(), repetition->observers.begin(),
                         repetition->observers.end());
    }
    install_interrupt_handlers();
    const Ending ending = fit(training, observers);
    if (is_root && trace != nullptr && !trace->has_begun()) {
        tell_of_empty_trace(options.reports);
    }
    return ending == Ending::interrupted ? ExitCode::interrupted : ExitCode::success;
}

}  // namespace gyre::train
