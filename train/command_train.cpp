// gyre train: sets everything up on all ranks alike, then trains epoch by epoch.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "comm/reducer.hpp"
#include "kernels/clock.hpp"
#include "train/commands.hpp"
#include "train/evaluator.hpp"
#include "train/interrupt.hpp"
#include "train/report.hpp"
#include "train/setup.hpp"
#include "train/sync_check.hpp"
#include "train/trainer.hpp"

namespace gyre {
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

void check_options(const TrainOptions& options) {
    if (options.nesterov && (options.optimizer != "sgd" || options.momentum == 0.0f)) {
        throw usage_error("--nesterov needs --optimizer sgd and --momentum greater than 0");
    }
    if (options.optimizer == "sgd" && options.momentum >= 1.0f) {
        throw usage_error("--momentum must be less than 1");
    }
}

// Whether --save can work is better known before the training than after it.
void check_save_path(const std::string& save) {
    const std::filesystem::path folder = std::filesystem::absolute(save).parent_path();
    if (access(folder.c_str(), W_OK) != 0 || std::filesystem::is_directory(save)) {
        throw input_error(
            fmt::format("--save {}: no file can be written there (folder {}); check "
                        "the path and its permissions",
                        save, folder.string()));
    }
}

std::string bucket_table(const std::vector<Bucket>& buckets, const Net& net) {
    std::string table =
        "bucket      first elem       elems       KiB  parameters, last layer first\n";
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        std::string names;
        for (auto p = net.parameters().rbegin(); p != net.parameters().rend(); ++p) {
            if (p->offset_elems >= buckets[i].begin && p->offset_elems < buckets[i].end) {
                names.append(names.empty() ? "" : " ").append(p->name);
            }
        }
        table += fmt::format("{:>6}  {:>14}  {:>10}  {:>8.1f}  {}\n", i, buckets[i].begin,
                             buckets[i].elems(), static_cast<double>(buckets[i].bytes()) / 1024.0,
                             names);
    }
    return table;
}

// Rank 0's weights file: the best by test accuracy, or the latest where nothing is evaluated.
void save_weights(const Net& net, const TrainOptions& options, const ModelSpec& model,
                  const Normalisation& normalisation, int classes) {
    const auto list = [](const std::vector<float>& values) {
        std::string text;
        for (const float value : values) {
            text += fmt::format("{}{}", text.empty() ? "" : ",", value);
        }
        return text;
    };
    write_safetensors(options.save, {net.export_parameters(),
                                     {{"gyre.model", model.source},
                                      {"gyre.mean", list(normalisation.mean)},
                                      {"gyre.std", list(normalisation.stddev)},
                                      {"gyre.classes", fmt::format("{}", classes)}}});
}

}  // namespace

ExitCode run_train(Communicator& comm, const TrainOptions& options,
                   const std::vector<ManifestEntry>& flags) {
    const Clock::time_point run_start = Clock::now();
    Dataset data;
    ModelSpec model;
    Normalisation normalisation;
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Net> net;
    std::unique_ptr<Optimizer> optimizer;
    std::unique_ptr<Report> report;
    RunFacts facts;
    Sharding sharding;

    // Every rank sets itself up; nobody goes on before all have succeeded and agree.
    agree(comm, [&] {
        check_options(options);
        backend = make_backend(options, comm);
        model = load_model(options.model);
        data = load_dataset({options.data, options.limit, options.classes});
        normalisation = choose_normalisation(options, data.train);
    });
    facts = {model.name, data.name, backend->description(), comm.description()};
    facts.train_images = data.train.count;
    facts.test_images = data.test.count;
    facts.classes = data.classes;
    facts.ranks = comm.size();
    facts.global_batch = options.global_batch ? *options.global_batch
                                              : std::int64_t{options.batch_size} * comm.size();
    sharding = {data.train.count, facts.global_batch, comm.rank(), comm.size()};
    facts.batch_size = static_cast<int>(sharding.most_local());
    facts.steps_per_epoch = sharding.steps();
    // Images per evaluation pass and rank.
    const int eval_batch = static_cast<int>(std::min<std::int64_t>(
        options.test_batch_size, rank_share(data.test.count, 0, comm.size()).count));
    // The largest share a rank can get of any step.
    const int train_batch = static_cast<int>(
        rank_share(std::min(facts.global_batch, data.train.count), 0, comm.size()).count);

    std::vector<Bucket> buckets;
    agree(comm, [&] {
        const Shape shape{data.train.channels, data.train.height, data.train.width};
        net = std::make_unique<Net>(
            *backend, model, shape, data.classes,
            NetOptions{train_batch, options.evaluate ? eval_batch : 0, options.dropout});
        optimizer = std::make_unique<Optimizer>(*backend, *net, options);
        if (comm.is_root()) {
            if (options.init.empty()) {
                net->initialise(options.seed);
            } else {
                net->import_parameters(read_safetensors(options.init).tensors, options.init);
            }
        }
        if (comm.is_root() && !options.save.empty()) {
            check_save_path(options.save);
        }
        report = std::make_unique<Report>(options, !comm.is_root());
    });
    facts.parameters = net->parameter_count();
    buckets =
        plan_buckets(net->layer_begins(), net->gradient_elems(),
                     options.bucket_kib ? std::optional(*options.bucket_kib * 1024) : std::nullopt);
    std::vector<ManifestEntry> manifest = {{"the version of gyre", version_text()},
                                           {"the model", hash_text(model.source)},
                                           {"the data set", hash_dataset(data)},
                                           {"the bucket layout", bucket_table(buckets, *net)}};
    manifest.insert(manifest.end(), flags.begin(), flags.end());
    require_same_manifest(comm, manifest);
    broadcast_parameters(comm, *backend, *net);

    DeviceImages train_images(*backend, std::move(data.train), normalisation);
    DeviceImages test_images(*backend, std::move(data.test), normalisation);
    Reducer reducer(comm, *backend, buckets, net->gradient_data());
    Trainer trainer(*backend, *net, train_images, *optimizer, reducer, sharding,
                    {options.seed, options.shuffle});
    install_interrupt_handlers();
    report->start(facts);
    if (options.verbose && comm.is_root()) {
        fmt::print("communicator: {}\n{}{}", facts.communicator, bucket_table(buckets, *net),
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
        trainer.begin_epoch(static_cast<std::uint32_t>(epoch));
        const auto account = [&](const StepResult& done) {
            stopped = stopped || done.stop;
            loss_sum += done.loss * static_cast<double>(done.images);
            result.images += done.images;
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
        result.exposed_comm_seconds = trainer.exposed_seconds();
        if (!stopped && options.evaluate) {
            result.test = evaluate(comm, *backend, *net, test_images, eval_batch);
            stopped = result.test.stop;
        }
        if (stopped) {
            break;
        }
        const bool better = !options.evaluate || result.test.accuracy > best_accuracy;
        if (options.evaluate) {
            best_accuracy = std::max(best_accuracy, result.test.accuracy);
        }
        if (better && !options.save.empty()) {
            agree(comm, [&] {
                if (comm.is_root()) {
                    save_weights(*net, options, model, normalisation, facts.classes);
                }
            });
            result.saved = true;
        }
        result.seconds = seconds_since(epoch_start);
        report->epoch(result);
    }
    report->end(seconds_since(run_start), best_accuracy, peak_memory_bytes(comm), stopped);
    return stopped ? ExitCode::interrupted : ExitCode::success;
}

}  // namespace gyre
