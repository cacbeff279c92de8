// Measures how much of the communication gyre's own step hides behind computation.
//
//   mpirun -np N build/bench-overlap --model net,wide --batch 64 --steps 20
//
// Three parts are timed in turn, so that a drifting machine shifts all of them alike:
//   step     the training step
//   compute  the same without communication: every rank trains by itself
//   comm     the reductions of all buckets, and the gathering of factors, without computation
//   ideal    max(compute, comm)
//   exposed  time that the step waited for communication; hidden: 1 - exposed / comm
//   overlap  (compute + comm - step) / comm: the part of the communication that is hidden. At best
//            it is min(1, compute / comm), which needs gradients that are final at once; the last
//            bucket has nothing to hide behind. Time that communication takes from the computation
//            counts as lost: CPU ranks run TCP and the sums themselves, and with factors they
//            compute more.
// Times are medians over the steps, of the slowest rank in each. Images are random, with a fixed
// seed; the device is the CPU.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "bench/on_ranks.hpp"
#include "kernels/make_backend.hpp"
#include "train/session.hpp"
#include "train/threads.hpp"

namespace {

using namespace gyre;
using namespace gyre::train;

constexpr int kWarmUps = 3, kClasses = 10;

struct Options {
    std::vector<std::string> models = {"net", "wide"};
    int batch_size = 64, steps = 20, threads = 0;
    std::optional<std::int64_t> bucket_kib;
    UpdateRule optimizer = UpdateRule::adam;
    FactorUse factors = FactorUse::automatic;
};

// Returns the largest of all ranks' values.
double largest(Communicator& comm, double value) {
    std::vector<double> all(static_cast<std::size_t>(comm.size()));
    all[static_cast<std::size_t>(comm.rank())] = value;
    comm.allreduce_sum(all);
    return *std::max_element(all.begin(), all.end());
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void measure(Communicator& comm, const std::string& model, const Options& options) {
    const auto alone = make_single_communicator();
    std::unique_ptr<Backend> backend;
    RunSpec spec = {.optimizer = {.rule = options.optimizer},
                    .reduction = {.factors = options.factors}};
    TrainingTask task = {.classes = kClasses};
    agree(comm, [&] {
        backend = make_cpu_backend(choose_threads(options.threads, comm));
        task.model = load_model(model);
    });
    if (options.bucket_kib) {
        spec.reduction.bucket_bytes = *options.bucket_kib * 1024;
    }
    // One session communicates; the other computes as much and has no peers.
    const auto make_session = [&](Communicator& with) {
        const int batch = options.batch_size * with.size();
        spec.batch.global_batch = batch;
        auto session = std::make_unique<Session>(with, *backend, spec, task,
                                                 random_images(batch, {1, 28, 28}, kClasses),
                                                 Normalisation{{0.5f}, {0.3f}});
        session->initialise();
        session->trainer().begin_epoch(1);
        return session;
    };
    const auto together = make_session(comm), lone = make_session(*alone);
    Reducer& reducer = together->reducer();

    double waited = 0.0;
    const std::function<void()> parts[] = {
        [&] { waited = together->trainer().step(0, false)->communication.exposed; },
        [&] { lone->trainer().step(0, false); },
        [&] {
            reducer.begin_step();
            together->factors().gather_alone(true);
            reducer.ready(0);
            reducer.finish_step([](const Bucket&) {});
            reducer.synchronize_step();
            together->factors().gather_alone(false);
        },
    };
    std::vector<double> series[std::size(parts)], waits;
    for (int step = -kWarmUps; step < options.steps; ++step) {
        for (std::size_t part = 0; part < std::size(parts); ++part) {
            if (part == 2) {
                // Gradients that are summed but never recomputed would eventually overflow.
                const Net& net = together->net();
                backend->fill_zero(net.gradient_data(),
                                   static_cast<std::size_t>(net.gradient_elems()) * sizeof(float));
            }
            comm.barrier();
            const auto start = std::chrono::steady_clock::now();
            parts[part]();
            const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
            const double slowest = largest(comm, taken.count());
            const double longest = part == 0 ? largest(comm, waited) : 0.0;
            if (step >= 0) {
                series[part].push_back(slowest);
            }
            if (step >= 0 && part == 0) {
                waits.push_back(longest);
            }
        }
    }
    if (comm.is_root()) {
        const double step = median(series[0]), compute = median(series[1]),
                     communication = median(series[2]), exposed = median(waits);
        fmt::print(
            "{:<8} {:>6} {:>8} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.1f} "
            "{:>10.1f} {:>10.1f}\n",
            model, options.batch_size, reducer.buckets().size(), 1e3 * step, 1e3 * compute,
            1e3 * communication, 1e3 * std::max(compute, communication), 1e3 * exposed,
            100.0 * (1.0 - exposed / communication),
            100.0 * (compute + communication - step) / communication,
            100.0 * std::min(1.0, compute / communication));
        std::fflush(stdout);
    }
}

int run(Communicator& comm, int argc, char** argv) {
    CLI::App app("bench-overlap: measures how much communication is hidden behind computation");
    Options options;
    app.add_option("--model", options.models, "Nets: built-in (net, wide) or model files")
        ->delimiter(',')
        ->default_str("net,wide");
    app.add_option("--batch,--batch-size", options.batch_size, "Images per rank and step")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    app.add_option("--bucket-kib", options.bucket_kib,
                   "Size of a gradient bucket in KiB; absent: auto")
        ->check(CLI::Range(1, 1 << 30));
    app.add_option("--steps", options.steps, "Timed steps")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    app.add_option("--threads", options.threads,
                   "Threads per rank; 0: the rank's share of the processors")
        ->check(CLI::Range(0, 1024))
        ->capture_default_str();
    std::map<std::string, UpdateRule> rules;
    for (const UpdateRuleFacts& rule : kUpdateRules) {
        rules.emplace(rule.name, static_cast<UpdateRule>(rules.size()));
    }
    app.add_option("--optimizer", options.optimizer, "sgd, adam, adamw, lion or rmsprop")
        ->default_str("adam")
        ->transform(CLI::Transformer(rules));
    LaunchSpec launch;
    bench::add_launch_flags(app, launch);
    app.add_option("--factors", options.factors, "auto, on or off, as for gyre train")
        ->default_str("auto")
        ->transform(CLI::Transformer(kFactorUses));
    if (!bench::parse_on_ranks(comm, app, argc, argv)) {
        return 0;
    }
    if (comm.is_root()) {
        fmt::print("# {} ranks, {}; median of {} steps, slowest rank; {}\n", comm.size(),
                   comm.description(), options.steps, facts(options.optimizer).name);
        fmt::print("{:<8} {:>6} {:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}\n",
                   "net", "batch", "buckets", "step ms", "compute ms", "comm ms", "ideal ms",
                   "exposed ms", "hidden %", "overlap %", "ideal %");
    }
    for (const std::string& model : options.models) {
        measure(comm, model, options);
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    return bench::on_ranks("bench-overlap", bench::launch_options(argc, argv),
                           [&](Communicator& comm) { return run(comm, argc, argv); });
}
