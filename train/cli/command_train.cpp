// gyre train: sets everything up on all ranks alike, then trains epoch by epoch.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "comm/reducer.hpp"
#include "kernels/base/clock.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/report.hpp"
#include "train/evaluator.hpp"
#include "train/interrupt.hpp"
#include "train/setup.hpp"
#include "train/sync_check.hpp"
#include "train/trainer.hpp"
#include "train/tune.hpp"

namespace gyre::train {
namespace {

// The largest resident set of any rank, in bytes.
std::int64_t peak_memory_bytes(Communicator& comm) {
    struct rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    std::vector<double> all(static_cast<std::size_t>(comm.size()));
    all[static_cast<std::size_t>(comm.rank())] = static_cast<double>(usage.ru_maxrss) * 1024.0;
    comm.allreduce_sum(all);
    return static_cast<std::int64_t>(*std::max_element(all.begin(), all.end()));
}

void broadcast_parameters(Communicator& comm, Backend& backend, Net& net) {
    constexpr std::int64_t kChunkElems = 1 << 20;
    std::vector<float> chunk;
    for (std::int64_t at = 0; at < net.flat_elems() && comm.size() > 1; at += kChunkElems) {
        chunk.resize(static_cast<std::size_t>(std::min(kChunkElems, net.flat_elems() - at)));
        const std::size_t bytes = chunk.size() * sizeof(float);
        backend.download(chunk.data(), net.parameter_data() + at, bytes);
        comm.broadcast(chunk.data(), bytes, 0);
        backend.upload(net.parameter_data() + at, chunk.data(), bytes);
    }
}

void check_files(const TrainOptions& options) {
    const std::string* files[] = {&options.save, &options.save_last, &options.json};
    for (const std::string** a = std::begin(files); a != std::end(files); ++a) {
        for (const std::string** b = a + 1; b != std::end(files); ++b) {
            if (!(*a)->empty() && std::filesystem::path(**a) == std::filesystem::path(**b)) {
                throw usage_error("--save, --save-last and --json write files: give each its own");
            }
        }
    }
}

// Whether weights can be saved there is better known before the training than after it.
void check_save_path(const char* flag, const std::string& path) {
    std::string extension = std::filesystem::path(path).extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    if (extension == ".pt" || extension == ".pth" || extension == ".pkl") {
        throw usage_error(fmt::format(
            "{} {}: gyre writes safetensors, which torch.load does not read; save to {}, and load "
            "that with safetensors.torch.load_file",
            flag, path, std::filesystem::path(path).replace_extension(".safetensors").string()));
    }
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
        throw input_error(fmt::format(
            "{} {}: that is no file, and stays as it is; give the path of a file", flag, path));
    }
    const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
    if (access(folder.c_str(), W_OK) != 0) {
        throw input_error(
            fmt::format("{} {}: no file can be written there (folder {}); check the path and its "
                        "permissions",
                        flag, path, folder.string()));
    }
}

// Rank 0 alone reads and writes these files, so its flags count; it says where another has one that
// it lacks. Returns whether weights are saved, the same on all ranks.
bool roots_files_count(Communicator& comm, const TrainOptions& options) {
    const std::pair<const char*, const std::string*> files[] = {{"--save", &options.save},
                                                                {"--save-last", &options.save_last},
                                                                {"--init", &options.init},
                                                                {"--json", &options.json}};
    std::array<double, 2 * std::size(files)> given{};  // on rank 0, on any
    for (std::size_t i = 0; i < std::size(files); ++i) {
        const double own = files[i].second->empty() ? 0.0 : 1.0;
        given[i] = comm.is_root() ? own : 0.0;
        given[std::size(files) + i] = own;
    }
    comm.allreduce_sum(given);
    for (std::size_t i = 0; i < std::size(files) && comm.is_root(); ++i) {
        if (given[i] == 0.0 && given[std::size(files) + i] > 0.0) {
            fmt::print(stderr, "gyre: {} counts on rank 0 only, which does not have it: ignored\n",
                       files[i].first);
        }
    }
    return given[0] + given[1] > 0.0;
}

// What each bucket's reduction cost, added up over steps, in seconds.
struct BucketTimes {
    std::vector<Reducer::Times::Of> sums;
    std::int64_t steps = 0;
    double exposed = 0.0;

    void add(const Reducer::Times& times) {
        sums.resize(times.buckets.size());
        for (std::size_t i = 0; i < sums.size(); ++i) {
            sums[i].ready += times.buckets[i].ready;
            sums[i].arrived += times.buckets[i].arrived;
            sums[i].exposed += times.buckets[i].exposed;
        }
        exposed += times.exposed;
        ++steps;
    }
};

// ready and arrived: milliseconds since the begin of the step, a mean over the steps; exposed: how
// long the device waited for the bucket.
std::string bucket_table(const std::vector<Bucket>& buckets, const Net& net, DataType type,
                         const BucketTimes* times = nullptr) {
    const bool timed = times != nullptr && times->steps > 0 && !times->sums.empty();
    std::string table = fmt::format(
        "bucket      first elem       elems       KiB{}  parameters, last layer first\n",
        timed ? "  ready ms  arrived ms  exposed ms" : "");
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        std::string names;
        for (auto p = net.parameters().rbegin(); p != net.parameters().rend(); ++p) {
            if (p->offset_elems < buckets[i].end && p->offset_elems + p->elems > buckets[i].begin) {
                names.append(names.empty() ? "" : " ").append(p->name);
            }
        }
        const bool exact = type == DataType::float32 || buckets[i].begin >= net.tail_offset();
        const std::size_t bytes = static_cast<std::size_t>(buckets[i].elems()) *
                                  bytes_of(exact ? DataType::float32 : type);
        table += fmt::format("{:>6}  {:>14}  {:>10}  {:>8.1f}", i, buckets[i].begin,
                             buckets[i].elems(), static_cast<double>(bytes) / 1024.0);
        if (timed) {
            const double scale = 1e3 / static_cast<double>(times->steps);
            const Reducer::Times::Of& sum = times->sums[i];
            table += fmt::format("  {:>8.2f}  {:>10.2f}  {:>10.2f}", scale * sum.ready,
                                 scale * sum.arrived, scale * sum.exposed);
        }
        table += fmt::format("  {}\n", names.empty() ? "(loss and counts)" : names);
    }
    return table;
}

// Writes the weights into each of the files. gyre eval reads what stands beside them:
// `normalisation` is how pixels were normalised, `measured` the data set's own.
void save_weights(const std::vector<std::string>& paths, const Net& net, const ModelSpec& model,
                  const Normalisation& normalisation, const Normalisation& measured, int classes) {
    const auto list = [](const std::vector<float>& values) {
        std::string text;
        for (const float value : values) {
            text += fmt::format("{}{}", text.empty() ? "" : ",", value);
        }
        return text;
    };
    const Shape& shape = net.input_shape();
    const TensorFile file = {
        net.export_parameters(),
        {{"gyre.model", model.source},
         {"gyre.mean", list(normalisation.mean)},
         {"gyre.std", list(normalisation.stddev)},
         {"gyre.data.mean", list(measured.mean)},
         {"gyre.data.std", list(measured.stddev)},
         {"gyre.shape", fmt::format("{}x{}x{}", shape.channels, shape.height, shape.width)},
         {"gyre.classes", fmt::format("{}", classes)}}};
    for (const std::string& path : paths) {
        write_safetensors(path, file);
    }
}

}  // namespace

ExitCode run_train(Communicator& comm, const TrainOptions& options) {
    const Clock::time_point run_start = Clock::now();
    Dataset data;
    ModelSpec model;
    Normalisation normalisation, measured;
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Net> net;
    std::unique_ptr<Optimizer> optimizer;
    std::unique_ptr<Report> report;
    RunFacts facts;
    Sharding sharding;

    // Every rank sets itself up; nobody goes on before all have succeeded and agree.
    agree(comm, [&] {
        check_files(options);
        backend = make_backend(options, comm);
        model = load_model(options.model);
        data = load_dataset({options.data, options.limit, options.classes});
        normalisation = choose_normalisation(options, data.train);
    });
    // What it then uses is among the facts.
    const bool on_gpu = comm.use_device(*backend) && !backend->host_memory();
    facts = {model.name, data.name, backend->description(), comm.description()};
    facts.train_images = data.train.count;
    facts.test_images = data.test.count;
    facts.classes = data.classes;
    facts.ranks = comm.size();
    facts.global_batch = options.global_batch
                             ? *options.global_batch
                             : std::int64_t{options.batch_size} * options.accumulate * comm.size();
    sharding = {data.train.count, facts.global_batch, comm.rank(), comm.size()};
    facts.batch_size = static_cast<int>(sharding.most_local());
    facts.steps_per_epoch = sharding.steps();
    // Images per evaluation pass and rank.
    const int eval_batch = static_cast<int>(std::min<std::int64_t>(
        options.test_batch_size, rank_share(data.test.count, 0, comm.size()).count));
    // The most images of a pass.
    const int train_batch = static_cast<int>(
        rank_share(rank_share(std::min(facts.global_batch, data.train.count), 0, comm.size()).count,
                   0, options.accumulate)
            .count);

    std::vector<Bucket> buckets;
    agree(comm, [&] {
        const Shape shape{data.train.channels, data.train.height, data.train.width};
        net = std::make_unique<Net>(
            *backend, model, shape, data.classes,
            NetOptions{train_batch, options.evaluate ? eval_batch : 0, options.dropout,
                       sharding.sizes(options.accumulate),
                       options.evaluate ? evaluation_sizes(comm, data.test.count, eval_batch)
                                        : std::vector<int>()});
        optimizer = std::make_unique<Optimizer>(*backend, *net, options);
        if (comm.is_root()) {
            if (options.init.empty()) {
                net->initialise(options.seed);
            } else {
                for (const std::string& remark :
                     net->import_parameters(read_safetensors(options.init).tensors, options.init)) {
                    fmt::print(stderr, "gyre: {}: {}\n", options.init, remark);
                }
            }
        }
        if (comm.is_root() && !options.save.empty()) {
            check_save_path("--save", options.save);
        }
        if (comm.is_root() && !options.save_last.empty()) {
            check_save_path("--save-last", options.save_last);
        }
        if (comm.is_root() && !(options.save.empty() && options.save_last.empty())) {
            measured = options.mean.empty() ? normalisation : measure_normalisation(data.train);
        }
        report = std::make_unique<Report>(options, comm.is_root());
    });
    facts.parameters = net->parameter_count();
    // Passes that a step adds up have no factors of the whole batch.
    const auto factored =
        choose_factored(*net, *backend, comm, train_batch,
                        options.accumulate > 1 ? FactorUse::off : options.factors);
    const auto plan = [&](std::optional<std::int64_t> bucket_kib) {
        // The step's loss and counts must arrive as they are.
        const bool narrow = options.comm_dtype != DataType::float32;
        return plan_buckets(
            net->layer_begins(), net->gradient_elems(),
            bucket_kib ? *bucket_kib * 1024 : auto_bucket_bytes(net->gradient_elems(), on_gpu),
            narrow ? std::optional(net->tail_offset()) : std::nullopt, ranges_of(factored));
    };
    buckets = plan(options.bucket_kib);
    require_same_manifest(comm,
                          {{"the model", hash_text(model.source)},
                           {"the data set", hash_dataset(data)},
                           {"the bucket layout", bucket_table(buckets, *net, options.comm_dtype)}});
    const bool saving = roots_files_count(comm, options);
    broadcast_parameters(comm, *backend, *net);

    DeviceImages train_images(*backend, std::move(data.train), normalisation);
    DeviceImages test_images(*backend, std::move(data.test), normalisation);
    if (options.tune_buckets && comm.size() > 1) {
        buckets = tune_buckets(comm, *backend, *net, train_images, options, sharding, plan,
                               factored, train_batch);
    }
    Reducer reducer(comm, *backend, buckets, net->gradient_data(), options.comm_dtype,
                    net->tail_offset());
    Factors factors(*backend, *net, comm, reducer, factored, train_batch);
    Trainer trainer(*backend, *net, train_images, *optimizer, reducer, sharding,
                    {options.seed, options.shuffle, options.accumulate,
                     choose_graph(options, *backend, reducer)},
                    &factors);
    install_interrupt_handlers();
    report->start(facts);
    if (options.verbose && comm.is_root()) {
        fmt::print("communicator: {}\nCUDA graph: {}\n{}{}{}", facts.communicator,
                   trainer.graph() ? "a step of a whole batch" : "none",
                   bucket_table(buckets, *net, options.comm_dtype), factors.summary(),
                   backend->choices());
    }

    double best_accuracy = -1.0;
    bool stopped = false;
    std::int64_t steps_done = 0;
    for (int epoch = 1; epoch <= options.epochs && !stopped; ++epoch) {
        const Clock::time_point epoch_start = Clock::now();
        EpochFacts result;
        result.epoch = epoch;
        double loss_sum = 0.0;
        BucketTimes times;
        trainer.begin_epoch(static_cast<std::uint32_t>(epoch));
        const auto account = [&](const StepResult& done) {
            stopped = stopped || done.stop;
            loss_sum += done.loss * static_cast<double>(done.images);
            result.images += done.images;
            result.train_correct += done.correct;
            times.add(done.communication);
            if (!done.not_finite.empty()) {
                throw AgreedError(
                    ExitCode::diverged,
                    fmt::format("the gradient of {} became NaN or infinite in epoch {}, step {} "
                                "(the loss there is {}); no layer after it is affected; lower "
                                "--lr or set --max-grad-norm{}",
                                done.not_finite, epoch, done.step + 1, done.loss,
                                options.comm_dtype == DataType::float16
                                    ? "; fp16 ends at 65504, --comm-dtype bf16 does not"
                                    : ""));
            }
            if (!std::isfinite(done.loss)) {
                throw AgreedError(
                    ExitCode::diverged,
                    fmt::format("the loss became {} in epoch {}, step {}; lower --lr, "
                                "and check the data set's values",
                                done.loss, epoch, done.step + 1));
            }
            report->step(epoch, done.step + 1, result.images, done.loss,
                         loss_sum / static_cast<double>(result.images));
        };
        for (std::int64_t step = 0; step < sharding.steps() && !stopped; ++step) {
            if (const auto done = trainer.step(step, interrupt_requested())) {
                account(*done);
            }
            if (options.check_sync > 0 && ++steps_done % options.check_sync == 0) {
                require_same_parameters(comm, *net,
                                        fmt::format("epoch {}, step {}", epoch, step + 1));
            }
        }
        while (const auto done = trainer.next_result()) {
            account(*done);
        }
        result.train_loss = loss_sum / static_cast<double>(result.images);
        result.train_seconds = seconds_since(epoch_start);
        result.exposed_comm_seconds = times.exposed;
        if (options.verbose && epoch == 1 && comm.is_root()) {
            fmt::print("{}", bucket_table(buckets, *net, options.comm_dtype, &times));
        }
        if (!stopped && options.evaluate) {
            result.test = evaluate(comm, *backend, *net, test_images, eval_batch);
            stopped = result.test.stop;
        }
        const bool better = !stopped && (!options.evaluate || result.test.accuracy > best_accuracy);
        if (saving) {
            agree(comm, [&] {
                std::vector<std::string> paths;
                if (better && !options.save.empty()) {
                    paths.push_back(options.save);
                }
                if (!options.save_last.empty()) {
                    paths.push_back(options.save_last);
                }
                if (comm.is_root() && !paths.empty()) {
                    save_weights(paths, *net, model, normalisation, measured, facts.classes);
                }
            });
            result.saved = better && !options.save.empty();
        }
        if (stopped) {
            break;
        }
        if (options.evaluate) {
            best_accuracy = std::max(best_accuracy, result.test.accuracy);
        }
        result.seconds = seconds_since(epoch_start);
        report->epoch(result);
    }
    report->end(seconds_since(run_start), best_accuracy, peak_memory_bytes(comm), stopped);
    return stopped ? ExitCode::interrupted : ExitCode::success;
}

}  // namespace gyre::train
