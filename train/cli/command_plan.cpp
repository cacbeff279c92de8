// gyre plan: what a step will take on many ranks, from compute times measured here or given.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "kernels/make_backend.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/setup.hpp"
#include "train/metrics.hpp"
#include "train/plan.hpp"
#include "train/session.hpp"

namespace gyre::train {
namespace {

double median(std::vector<double> values) {
    const auto middle = values.begin() + std::ptrdiff_t(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

// A step of one rank, in seconds: forward, ready[0], ..., backward, update. The device is waited
// for where a time is taken.
std::vector<double> timed_step(Session& session, const std::int32_t* samples,
                               StepScalars& scalars) {
    Backend& backend = session.backend();
    Net& net = session.net();
    Optimizer& optimizer = session.optimizer();
    std::size_t layer = net.layer_begins().size();
    std::vector<double> times(layer + 3);
    const auto finished_after = [&](Clock::time_point start) {
        backend.synchronize();
        return seconds_since(start);
    };
    Batch pass;
    pass.n = static_cast<int>(session.images().count());
    pass.samples = samples;
    pass.training = true;

    backend.synchronize();
    const Clock::time_point start = Clock::now();
    session.images().gather(pass.samples, pass.n, net.input(), net.labels());
    net.forward(pass);
    net.loss(pass, 1.0f / static_cast<float>(pass.n));
    times.front() = finished_after(start);
    const Clock::time_point backward = Clock::now();
    const auto ready = [&](std::int64_t begin) {
        while (layer > 0 && net.layer_begins()[layer - 1] >= begin) {
            times[layer--] = finished_after(backward);
        }
    };
    net.backward(pass, {.ready = ready});
    times[times.size() - 2] = finished_after(backward);
    const Clock::time_point update = Clock::now();
    optimizer.next_steps(&scalars, 1);
    optimizer.begin_step(&net.stats()->not_finite);  // as every step does
    optimizer.arrived({0, net.flat_elems()});
    optimizer.end_step();
    times.back() = finished_after(update);
    return times;
}

// Medians over steps on random images, and the mean over the ranks, which measure at the same time
// as they would compute.
ComputeTimes measure_compute(Communicator& comm, Session& session) {
    constexpr int kWarmUps = 2, kLeastSteps = 7;
    constexpr double kLeastSeconds = 1.0;
    session.initialise();
    const PinnedBuffer<StepScalars> scalars(session.backend(), 1);
    const auto order = epoch_order(session.images().count(), 1, 1, false);
    const DeviceBuffer<std::int32_t> samples(session.backend(), session.images().count());
    session.backend().upload(samples.get(), order.data(), samples.bytes());
    const std::size_t layers = session.net().layer_begins().size();
    std::vector<std::vector<double>> series(layers + 3);
    // All ranks take the same number of steps, as rank 0's clock has it.
    double spent = 0.0;
    for (int step = -kWarmUps; step < kLeastSteps || spent < kLeastSeconds; ++step) {
        comm.barrier();
        const Clock::time_point start = Clock::now();
        const std::vector<double> times = timed_step(session, samples.get(), *scalars.get());
        double step_seconds = seconds_since(start);
        comm.broadcast(&step_seconds, sizeof step_seconds, 0);
        if (step >= 0) {
            spent += step_seconds;
            for (std::size_t i = 0; i < times.size(); ++i) {
                series[i].push_back(times[i]);
            }
        }
    }
    std::vector<double> means;
    for (const std::vector<double>& values : series) {
        means.push_back(median(values) / comm.size());
    }
    comm.allreduce_sum(means);
    return {means.front(), means[layers + 1], means.back(),
            std::vector<double>(means.begin() + 1, means.begin() + 1 + std::ptrdiff_t(layers))};
}

// Operations of one direction of each layer with parameters, in the order of the net.
std::vector<double> forward_flop(const ModelSpec& model, const PlanOptions& options) {
    std::vector<double> flop;
    for (const Node& node : build_graph(model, options.image, *options.data.classes, false).nodes) {
        if (!node.parameters.empty()) {
            flop.push_back(2.0 * static_cast<double>(node.parameters.front().elems) *
                           static_cast<double>(node.out.plane_elems()));
        }
    }
    return flop;
}

std::string plan_json(const PlanOptions& options, const ComputeTimes& compute,
                      const std::vector<StepPlan>& plans) {
    nlohmann::ordered_json json = {{"model", options.net.model},
                                   {"batch_size", options.batch.batch_size},
                                   {"bytes_per_second", options.link.bytes_per_second},
                                   {"latency_seconds", options.link.latency_seconds},
                                   {"compute",
                                    {{"forward", compute.forward},
                                     {"backward", compute.backward},
                                     {"update", compute.update},
                                     {"measured", options.compute_ms.empty()}}}};
    for (const StepPlan& plan : plans) {
        nlohmann::ordered_json buckets;
        for (const PlannedBucket& bucket : plan.buckets) {
            buckets.push_back({{"bytes", bucket.bytes},
                               {"ready", bucket.ready},
                               {"start", bucket.start},
                               {"end", bucket.end}});
        }
        json["plans"].push_back({{"ranks", plan.ranks},
                                 {"step_seconds", plan.step()},
                                 {"communication_seconds", plan.communication},
                                 {"exposed_seconds", plan.exposed},
                                 {"efficiency", plan.efficiency()},
                                 {"overlap", plan.overlap()},
                                 {"buckets", buckets}});
    }
    return json.dump(1);
}

void print(const std::string& source, const PlanOptions& options, const ComputeTimes& compute,
           const std::vector<StepPlan>& plans) {
    const auto ms = [](double seconds) { return 1e3 * seconds; };
    fmt::print("{}, {} images a rank of {}x{}x{}; {}\n", options.net.model,
               options.batch.batch_size, options.image.channels, options.image.height,
               options.image.width, source);
    fmt::print("forward {:.3f} ms, backward {:.3f} ms, update {:.3f} ms: {:.3f} ms a step\n",
               ms(compute.forward), ms(compute.backward), ms(compute.update), ms(compute.total()));
    fmt::print("link: {:.4g} GB/s each way, {:.4g} us\n\n", options.link.bytes_per_second / 1e9,
               options.link.latency_seconds * 1e6);
    const std::string reduced =
        fmt::format("reduced by, on {} ranks, ms", fmt::join(options.ranks, " / "));
    fmt::print("{:>6} {:>11} {:>10}  {}\n", "bucket", "KiB", "ready ms", reduced);
    for (std::size_t i = 0; i < plans.front().buckets.size(); ++i) {
        const PlannedBucket& bucket = plans.front().buckets[i];
        std::vector<std::string> ends;
        for (const StepPlan& plan : plans) {
            ends.push_back(fmt::format("{:.3f}", ms(plan.buckets[i].end)));
        }
        fmt::print("{:>6} {:>11.1f} {:>10.3f}  {}\n", i, static_cast<double>(bucket.bytes) / 1024.0,
                   ms(bucket.ready), fmt::join(ends, " / "));
    }
    fmt::print("\n{:>7} {:>11} {:>16} {:>11} {:>9} {:>12} {:>13}\n", "ranks", "step ms",
               "communication ms", "exposed ms", "hidden %", "efficiency %", "images/s");
    for (const StepPlan& plan : plans) {
        fmt::print("{:>7} {:>11.3f} {:>16.3f} {:>11.3f} {:>9.1f} {:>12.1f} {:>13.0f}\n", plan.ranks,
                   ms(plan.step()), ms(plan.communication), ms(plan.exposed),
                   100.0 * plan.overlap(), 100.0 * plan.efficiency(),
                   static_cast<double>(plan.ranks) * options.batch.batch_size / plan.step());
    }
}

}  // namespace

ExitCode run_plan(Communicator& comm, const PlanOptions& options) {
    const bool measured = options.compute_ms.empty();
    ModelSpec model;
    // Each rank measures alone: what it would compute does not depend on the others.
    const auto alone = make_single_communicator();
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Session> session;
    agree(comm, [&] {
        backend = measured ? make_backend(options, comm) : make_cpu_backend(1);
        model = load_model(options.net.model);
        const auto channels = static_cast<std::size_t>(options.image.channels);
        const int batch = measured ? options.batch.batch_size : 1;
        RunSpec run{.net = options.net};
        run.batch.global_batch = batch;
        run.optimizer.rule = options.optimizer.rule;
        session = std::make_unique<Session>(
            *alone, *backend, run, TrainingTask{.model = model, .classes = *options.data.classes},
            random_images(batch, options.image, *options.data.classes),
            Normalisation{std::vector<float>(channels, 0.5f), std::vector<float>(channels, 0.3f)});
    });
    const Net& net = session->net();
    ComputeTimes compute;
    std::string source;
    if (measured) {
        compute = measure_compute(comm, *session);
        source = fmt::format("measured here, {} rank{}, {}, on {}", comm.size(),
                             comm.size() == 1 ? "" : "s at once",
                             facts(options.optimizer.rule).name, backend->description());
    } else {
        const std::vector<double>& given = options.compute_ms;
        compute = {given[0] / 1e3, given[1] / 1e3, given.size() > 2 ? given[2] / 1e3 : 0.0, {}};
        compute.ready = ready_by_flop(forward_flop(model, options), compute.backward);
        source = "compute times as given, the backward pass divided by operations";
    }
    const auto buckets = plan_buckets(net.layer_begins(), net.gradient_elems(),
                                      options.reduction.bucket_bytes.value_or(auto_bucket_bytes(
                                          net.gradient_elems(), !backend->host_memory())));
    std::vector<StepPlan> plans;
    for (const int ranks : options.ranks) {
        plans.push_back(plan_step(ranks, compute, buckets, net.layer_begins(), options.algorithm,
                                  options.link));
    }
    agree(comm, [&] {
        if (!comm.is_root()) {
            return;
        }
        print(source, options, compute, plans);
        if (!options.json.empty()) {
            std::ofstream file = open_lines("--json", options.json);
            if (!(file << plan_json(options, compute, plans) << std::endl)) {
                throw input_error(
                    fmt::format("--json {}: writing failed; is the disk full?", options.json));
            }
        }
    });
    return ExitCode::success;
}

}  // namespace gyre::train
