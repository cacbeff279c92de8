#include "train/cli/training_setup.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "data/sampler.hpp"
#include "kernels/choose_cpu_kernels.hpp"
#include "kernels/make_backend.hpp"
#include "train/hash.hpp"
#include "train/settings.hpp"

namespace gyre::train {

void check_together(const RunSpec& options) {
    const CheckpointSpec& checkpoints = options.checkpoints;
    const std::vector<SettingValue> values = values_of(options);
    for (const EndingFacts& ending : kEndings) {
        const SettingValue* const asked = find(values, ending.setting);
        if (asked != nullptr && asked->given && !ending.within_epoch &&
            !options.evaluation.enabled) {
            throw usage_error(
                fmt::format("--{} needs the evaluation that --no-eval leaves out", asked->name));
        }
    }
    if (options.optimizer.schedule.kind == ScheduleKind::plateau && !options.evaluation.enabled) {
        throw usage_error("--lr-schedule plateau needs the evaluation that --no-eval leaves out");
    }
    if (checkpoints.save.empty() && (checkpoints.keep > 0 || checkpoints.receipt_every > 0 ||
                                     checkpoints.every != SaveEvery{})) {
        throw usage_error(
            "--keep, --save-every and --receipt-every say how --save does it: give that, too");
    }
    if (const char* const refusal = refusal_of_shards(options);
        refusal != nullptr && options.batch.shards > 0) {
        throw usage_error(refusal);
    }
}

void tell_of_ignored(const RunSpec& options) {
    // Settings that only some rules have, with these.
    std::map<std::string, std::vector<std::string>> users;
    for (const UpdateRuleFacts& rule : kUpdateRules) {
        for (const std::string_view name : rule.settings) {
            users[std::string(name)].push_back(rule.name);
        }
    }
    const std::vector<SettingValue> values = values_of(options);
    for (const auto& [name, rules] : users) {
        if (std::ranges::count(rules, facts(options.optimizer.rule).name) == 0 &&
            find(values, name)->given) {
            fmt::print(stderr, "gyre: --{} is for --optimizer {}, which is not given: ignored\n",
                       name, fmt::join(rules, ", "));
        }
    }
    const std::tuple<bool, const char*, const char*> ignored[] = {
        {options.checkpoints.overwrite && options.checkpoints.save.empty(), "--overwrite",
         "--save"},
        {options.net.finetune && options.net.init.empty(), "--finetune", "--init"},
        {options.reports.trace_steps != TraceSteps{} && options.reports.trace.empty(),
         "--trace-steps", "--trace"}};
    for (const auto& [is, flag, needed] : ignored) {
        if (is) {
            fmt::print(stderr, "gyre: {} is for {}, which is not given: ignored\n", flag, needed);
        }
    }
}

void tell_of_idle_gpus(const Communicator& comm, const Backend& backend, bool quiet) {
    const int gpus = backend.host_memory() ? 0 : cuda_device_count();
    if (comm.size() == 1 && gpus > 1 && !quiet) {
        fmt::print(stderr,
                   "gyre: this host has {} GPUs, of which one rank uses one; "
                   "`gyre launch --gpus -- train ...` uses all\n",
                   gpus);
    }
}

void tell_of_slow_precision(const Communicator& comm, const Backend& backend,
                            const RunSpec& options) {
    const Precision precision = options.net.precision;
    const bool fast = precision == Precision::fp32 || !backend.host_memory() ||
                      (precision == Precision::bf16 && chosen_cpu_kernels().has_bf16_products());
    if (comm.is_root() && !fast && !options.reports.quiet) {
        fmt::print(stderr, "gyre: --precision {}: {}, so that fp32 is faster here\n",
                   name_of(precision),
                   precision == Precision::bf16 ? "its products need AMX to be fast"
                                                : "it is widened to fp32 for each operation");
    }
}

RootFiles root_files(Communicator& comm, const RunSpec& options) {
    std::vector<std::string> names;
    std::vector<double> given;  // [names], on any rank; then the same on rank 0
    for (const SettingValue& setting : values_of(options)) {
        if (setting.scope == Scope::rank_0) {
            names.push_back(setting.name);
            given.push_back(setting.given ? 1.0 : 0.0);
        }
    }
    for (std::size_t i = 0; i < names.size(); ++i) {
        given.push_back(comm.is_root() ? given[i] : 0.0);
    }
    comm.allreduce_sum(given);
    std::set<std::string> counts;
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (given[names.size() + i] > 0.0) {
            counts.insert(names[i]);
        } else if (given[i] > 0.0 && comm.is_root()) {
            fmt::print(stderr,
                       "gyre: --{} counts on rank 0 only, which does not have it: ignored\n",
                       names[i]);
        }
    }
    return {.saves = counts.contains("save"),
            .resumes = counts.contains("resume"),
            .traces = counts.contains("trace")};
}

Identity identity_of(const RunSpec& options, const ModelSpec& model, const Dataset& data,
                     const Backend& backend, Communicator& comm) {
    const DeviceIdentity device = backend.device_identity();
    const std::int64_t batch = global_batch(options.batch, comm.size());
    Values facts = {{"model", hash_text(model.source)},
                    {"data_set", hash_dataset(data)},
                    {"global_batch", fmt::format("{}", batch)},
                    {"device", backend.host_memory() ? "CPU"
                               : device.emulated     ? "emulated GPU"
                                                     : "GPU"}};
    // Without shards, sums over the ranks are rounded as their number and the library have it.
    if (options.batch.shards == 0) {
        facts["ranks"] = fmt::format("{}", comm.size());
    }
    if (options.batch.shards == 0 && comm.size() > 1) {
        const std::string library = comm.description();
        facts["communicator"] = library.substr(0, library.find(','));
    }
    const ScheduleSpec schedule =
        resolved_optimizer(options, Sharding{data.train.count, batch}.steps()).schedule;
    if (schedule.kind == ScheduleKind::cosine || schedule.kind == ScheduleKind::one_cycle) {
        facts["schedule_steps"] = fmt::format("{}", schedule.total_steps);
    }
    require_same_manifest(comm, {{kFacts.at("model"), facts.at("model")},
                                 {kFacts.at("data_set"), facts.at("data_set")}});
    return {values_to_resume(options), std::move(facts)};
}

std::vector<std::int64_t> evaluated_images(const RunSpec& options, const Dataset& data) {
    if (!options.evaluation.enabled) {
        return {};
    }
    return data.validation.count > 0 ? std::vector{data.test.count, data.validation.count}
                                     : std::vector{data.test.count};
}

void tell_of_empty_trace(const ReportSpec& reports) {
    fmt::print(stderr,
               "gyre: --trace {}: the training ended before step {}: nothing was recorded; give "
               "--trace-steps\n",
               reports.trace, reports.trace_steps.first);
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

}  // namespace gyre::train
