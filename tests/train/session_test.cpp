// A session as a whole: what it keeps, and that another can resume from it.
#include "train/session.hpp"
#include "kernels/make_backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "comm/launch/local_ranks.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/thread_ranks.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

constexpr int kClasses = 5, kSteps = 10;

// One rank's, of 10 steps an epoch.
struct Trained {
    Trained(bool emulated, const OptimizerSpec& optimizer, GraphUse graph = GraphUse::off)
        : backend(emulated ? make_emulated_backend({}) : make_cpu_backend(1)),
          session(*comm, *backend,
                  {.batch = {.global_batch = 6},
                   .optimizer = optimizer,
                   .device = {.graph = graph, .graph_steps = 1}},
                  {.model = parse_model("conv 3 k3\nrelu\nmaxpool 2\ndropout 0.5\nlinear classes\n",
                                        "small"),
                   .classes = kClasses},
                  random_images(6 * kSteps, {1, 8, 8}, kClasses), {{0.5f}, {0.3f}}) {
        session.initialise();
        session.trainer().begin_epoch(1);
    }
    // Steps [begin, end) of the epoch.
    void train(int begin, int end) {
        const auto account = [&](const std::optional<StepResult>& result) {
            if (result) {
                losses.push_back(result->loss);
            }
            return result.has_value();
        };
        for (int step = begin; step < end; ++step) {
            account(session.trainer().step(step, false));
        }
        while (account(session.trainer().next_result())) {
        }
    }

    const std::unique_ptr<Communicator> comm = make_single_communicator();
    const std::unique_ptr<Backend> backend;
    Session session;
    std::vector<double> losses;
};

std::set<std::string> names_of(const std::vector<HostTensor>& tensors) {
    std::set<std::string> names;
    for (const HostTensor& tensor : tensors) {
        names.insert(tensor.name);
    }
    return names;
}

bool same(const std::vector<HostTensor>& a, const std::vector<HostTensor>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const HostTensor& x, const HostTensor& y) {
                          return x.name == y.name && x.shape == y.shape && x.values == y.values;
                      });
}

const std::vector<OptimizerSpec> kRules = {
    {.momentum = 0.0f},
    {.momentum = 0.9f, .nesterov = true},
    {.rule = UpdateRule::adam},
    {.rule = UpdateRule::adamw, .weight_decay = 0.1f, .max_grad_norm = 0.5f},
    {.rule = UpdateRule::lion, .weight_decay = 0.1f},
    {.rule = UpdateRule::rmsprop},
    {.schedule = {.kind = ScheduleKind::one_cycle, .total_steps = kSteps}},
    {.rule = UpdateRule::adam, .ema = 0.75f},
};

}  // namespace

TEST_CASE("a session goes on from exported weights and optimiser's state, to the last bit") {
    for (const bool emulated : {false, true}) {
        for (const OptimizerSpec& rule : kRules) {
            INFO("rule " << &rule - kRules.data() << (emulated ? ", as a graph" : ""));
            const GraphUse graph = emulated ? GraphUse::on : GraphUse::off;
            Trained whole(emulated, rule, graph), first(emulated, rule, graph),
                second(emulated, rule, graph);
            whole.train(0, kSteps);
            first.train(0, kSteps / 2);
            second.session.net().import_parameters(first.session.net().export_parameters(), "");
            second.session.optimizer().import_state(first.session.optimizer().export_state(), "");
            CHECK(same(second.session.optimizer().export_state(),
                       first.session.optimizer().export_state()));
            second.train(kSteps / 2, kSteps);
            CHECK(whole.losses.size() == kSteps);
            first.losses.insert(first.losses.end(), second.losses.begin(), second.losses.end());
            CHECK(first.losses == whole.losses);
            CHECK(same(second.session.net().export_parameters(),
                       whole.session.net().export_parameters()));
            CHECK(same(second.session.optimizer().export_state(),
                       whole.session.optimizer().export_state()));
            // Without the state it would have gone another way, if there is one.
            Trained forgetful(emulated, rule, graph);
            forgetful.session.net().import_parameters(first.session.net().export_parameters(), "");
            forgetful.train(kSteps / 2, kSteps);
            CHECK((forgetful.losses == second.losses) == (rule.momentum == 0.0f));
        }
    }
}

TEST_CASE("an optimiser's state has PyTorch's names, and no other is taken") {
    const auto state = [](const OptimizerSpec& rule) {
        Trained trained(false, rule);
        trained.train(0, 3);
        return trained.session.optimizer().export_state();
    };
    const std::vector<HostTensor> sgd = state({.momentum = 0.0f}), momentum = state({}),
                                  adam = state({.rule = UpdateRule::adam});
    CHECK(names_of(sgd) == std::set<std::string>{"step", "step_rest"});
    CHECK(names_of(momentum) ==
          std::set<std::string>{"step", "step_rest", "conv1.weight.momentum_buffer",
                                "conv1.bias.momentum_buffer", "fc1.weight.momentum_buffer",
                                "fc1.bias.momentum_buffer"});
    CHECK(names_of(adam).count("conv1.weight.exp_avg") == 1);
    CHECK(names_of(adam).count("fc1.bias.exp_avg_sq") == 1);
    CHECK(adam.size() == 10);
    CHECK(names_of(state({.rule = UpdateRule::lion})).count("fc1.bias.exp_avg") == 1);
    CHECK(names_of(state({.rule = UpdateRule::rmsprop})).count("fc1.bias.square_avg") == 1);
    CHECK(adam.front().shape.empty());
    CHECK(adam.front().values == std::vector<float>{3.0f});
    for (const HostTensor& tensor : adam) {
        if (tensor.name == "conv1.weight.exp_avg") {
            CHECK(tensor.shape == std::vector<std::int64_t>{3, 1, 3, 3});
        }
    }

    Trained trained(false, {.rule = UpdateRule::adam});
    const std::vector<HostTensor> before = trained.session.optimizer().export_state();
    const auto refuse = [&](std::vector<HostTensor> tensors,
                            std::initializer_list<std::string> parts,
                            const std::function<void(std::vector<HostTensor>&)>& change) {
        change(tensors);
        expect_error(ExitCode::bad_input, parts,
                     [&] { trained.session.optimizer().import_state(tensors, "x.safetensors"); });
        CHECK(same(trained.session.optimizer().export_state(), before));
    };
    using Tensors = std::vector<HostTensor>&;
    refuse(momentum, {"x.safetensors", "lacks conv1.weight.exp_avg"}, [](Tensors) {});
    refuse(adam, {"x.safetensors", "lacks step"}, [](Tensors t) { t.erase(t.begin()); });
    refuse(adam, {"conv1.weight.exp_avg_sq", "[3, 9]", "[3, 1, 3, 3]"}, [](Tensors t) {
        t.at(3).shape = {3, 9};
    });
    refuse(adam, {"fc9.weight.exp_avg"}, [](Tensors t) {
        t.push_back({"fc9.weight.exp_avg", {1}, {0.0f}});
    });
    refuse(adam, {"step", "-1"}, [](Tensors t) { t.front().values = {-1.0f}; });
    refuse(adam, {"step", "0.5"}, [](Tensors t) { t.front().values = {0.5f}; });

    Trained plateau(false, {.schedule = {.kind = ScheduleKind::plateau}});
    for (const float count : {-1.0f, 1e30f, std::numeric_limits<float>::quiet_NaN()}) {
        auto counts = plateau.session.optimizer().export_state();
        const auto falls = std::ranges::find(counts, "scheduler.falls", &HostTensor::name);
        REQUIRE(falls != counts.end());
        falls->values = {count};
        expect_error(ExitCode::bad_input, {"x", "scheduler.falls", "expected a count"},
                     [&] { plateau.session.optimizer().import_state(counts, "x"); });
    }
}

TEST_CASE("schedule plateau falls as ReduceLROnPlateau does") {
    const ScheduleSpec spec = {
        .kind = ScheduleKind::plateau, .gamma = 0.5, .min_rate = 0.2, .patience = 2};
    Plateau plateau;
    const auto rates = [&](std::initializer_list<double> losses) {
        std::vector<double> found;
        for (const double loss : losses) {
            plateau.evaluated(spec, loss);
            found.push_back(scheduled_rate(spec, 1.0, 100, plateau.falls));
        }
        return found;
    };
    // A third epoch in a row that is not better by more than a ten-thousandth; then the count
    // begins anew, but not the best.
    CHECK(rates({2.0, 1.0, 1.0, 1.5, 0.99995}) == std::vector<double>{1, 1, 1, 1, 0.5});
    CHECK(rates({1.0, 1.0, 0.9, 0.95, 0.95}) == std::vector<double>{0.5, 0.5, 0.5, 0.5, 0.5});
    CHECK(rates({0.9, 1.0, 1.0, 1.0}) == std::vector<double>{0.25, 0.25, 0.25, 0.2});
    CHECK(rates({1.0, 1.0, 1.0}) == std::vector<double>{0.2, 0.2, 0.2});
    CHECK(scheduled_rate(spec, 0.1, 100, 3) == 0.1);  // never up to min_rate
    const ScheduleSpec warming = {.kind = ScheduleKind::plateau, .warmup_steps = 10};
    CHECK(scheduled_rate(warming, 1.0, 0, 1) == Approx(0.001));
    CHECK(scheduled_rate(warming, 1.0, 10, 1) == Approx(0.1));
}

TEST_CASE("a schedule stays where it ended, and short trainings have one, too") {
    using Kind = ScheduleKind;
    for (const std::int64_t total : {1, 2, 3, 4, 100}) {
        INFO(total << " steps");
        const ScheduleSpec cosine = {.kind = Kind::cosine, .total_steps = total, .min_rate = 0.25};
        const ScheduleSpec cycle = {.kind = Kind::one_cycle, .total_steps = total};
        for (const std::int64_t step : {total, total + 1, 10 * total}) {
            CHECK(scheduled_rate(cosine, 2.0, step) == 0.25);
            CHECK(scheduled_rate(cycle, 2.0, step) == Approx(2.0 / 250'000).epsilon(1e-9));
        }
        for (std::int64_t step = 0; step < total; ++step) {
            const double a = scheduled_rate(cosine, 2.0, step),
                         b = scheduled_rate(cycle, 2.0, step);
            CHECK((a > 0.25 && a <= 2.0));
            CHECK((b > 0.0 && b <= 2.0));
        }
    }
    // Longer than the training: the rate never gets there, and nothing is divided by zero.
    const ScheduleSpec warming = {.kind = Kind::cosine, .warmup_steps = 10, .total_steps = 4};
    CHECK(scheduled_rate(warming, 2.0, 9) == Approx(2.0 * (0.01 + 0.99 * 0.9)));
    CHECK(scheduled_rate(warming, 2.0, 10) == 0.0);
}

namespace {

// A training on tensor cores: fc2 updates itself, as nothing comes between it and its gradient.
struct LargeLayer {
    // Two warm-ups, and a graph of two.
    static constexpr int kSteps = 4;
    LargeLayer(OptimizerSpec optimizer, bool clips, GraphUse graph) {
        if (clips) {  // by nothing, but all norms come first
            optimizer.max_grad_norm = 1e30f;
        }
        GpuOptions options;
        options.tf32 = true;
        const auto backend = make_emulated_backend(options);
        const auto comm = make_single_communicator();
        Session session(*comm, *backend,
                        {.batch = {.global_batch = 3},
                         .optimizer = optimizer,
                         .device = {.graph = graph, .graph_steps = 2}},
                        {.model = parse_model("linear 1920\nrelu\nlinear 1036\nrelu\nlinear 40\n"
                                              "relu\nlinear classes\n",
                                              "large"),
                         .classes = kClasses},
                        random_images(3 * kSteps, {1, 6, 6}, kClasses), {{0.5f}, {0.3f}});
        session.initialise();
        Trainer& trainer = session.trainer();
        trainer.begin_epoch(1);
        const auto account = [&](const std::optional<StepResult>& result) {
            if (result) {
                losses.push_back(result->loss);
                not_finite.push_back(result->not_finite);
            }
            return result.has_value();
        };
        for (int step = 0; step < kSteps; ++step) {
            account(trainer.step(step, false));
        }
        while (account(trainer.next_result())) {
        }
        weights = session.net().export_parameters();
        state = session.optimizer().export_state();
        std::vector<float> gradients(static_cast<std::size_t>(session.net().flat_elems()));
        backend->download(gradients.data(), session.net().gradient_data(),
                          gradients.size() * sizeof(float));
        for (const Parameter& parameter : session.net().parameters()) {
            const auto begin = gradients.begin() + parameter.offset_elems;
            if (std::any_of(begin, begin + parameter.elems, [](float g) { return g != 0.0f; })) {
                written.insert(parameter.name);
            }
        }
    }
    std::vector<double> losses;
    std::vector<std::string> not_finite;
    std::vector<HostTensor> weights, state;
    std::set<std::string> written;  // gradients
};

}  // namespace

TEST_CASE("steps in which a large layer updates itself end where others do, to the last bit",
          "[emulated]") {
    for (const OptimizerSpec& rule : {OptimizerSpec{.rule = UpdateRule::adamw},
                                      {.rule = UpdateRule::adam, .weight_decay = 0.1f},
                                      {.momentum = 0.9f, .nesterov = true},
                                      {.weight_decay = 0.1f, .momentum = 0.0f}}) {
        INFO("rule " << static_cast<int>(rule.rule) << ", momentum " << rule.momentum);
        const LargeLayer at_once(rule, false, GraphUse::on), parts(rule, true, GraphUse::off);
        REQUIRE(at_once.losses.size() == LargeLayer::kSteps);
        CHECK(at_once.losses == parts.losses);
        CHECK(same(at_once.weights, parts.weights));
        CHECK(same(at_once.state, parts.state));
        CHECK(parts.written.count("fc2.weight") == 1);
        CHECK(at_once.written.count("fc2.weight") + at_once.written.count("fc2.bias") == 0);
        CHECK(at_once.written.size() == parts.written.size() - 2);
    }
    // Weights that overflow: the same is reported, for the same steps.
    const OptimizerSpec wild = {.learning_rate = 1e30f};
    const LargeLayer at_once(wild, false, GraphUse::off), parts(wild, true, GraphUse::off);
    CHECK(at_once.not_finite == parts.not_finite);
    CHECK(!at_once.not_finite.back().empty());
}

TEST_CASE("an optimiser leaves alone what a pass says it has updated") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, parse_model("linear 16\nlinear 32\nlinear 16\nlinear classes\n", "four"),
            {1, 4, 4}, kClasses, {});
    const auto ones = [&](float* data) { std::fill_n(data, net.flat_elems(), 1.0f); };
    ones(net.gradient_data());
    const std::vector<Parameter>& all = net.parameters();
    const std::int64_t second = all[2].offset_elems, third = all[4].offset_elems,
                       fourth = all[6].offset_elems, end = net.flat_elems();
    using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;
    for (const Ranges& updated : {Ranges{},
                                  {{0, end}},
                                  {{second, third}},
                                  {{fourth, end}},
                                  {{0, second}},
                                  {{fourth, end}, {second, third}},
                                  {{third, fourth}, {second, third}},
                                  {{fourth, end}, {0, second}},
                                  {{fourth, end}, {second, third}, {0, second}}}) {
        ones(net.parameter_data());
        Optimizer optimizer(*backend, net, {.learning_rate = 0.5f, .momentum = 0.0f});
        StepScalars pinned[1];
        optimizer.next_steps(pinned, 1);
        optimizer.begin_step(&net.stats()->not_finite);
        REQUIRE(optimizer.in_pass() != nullptr);
        for (const auto& [from, to] : updated) {
            optimizer.updated(from, to);
        }
        optimizer.arrived({0, net.gradient_elems()});
        optimizer.end_step();
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < end; ++i) {
            const bool left_alone = std::any_of(
                updated.begin(), updated.end(),
                [&](const auto& range) { return range.first <= i && i < range.second; });
            wrong += net.parameter_data()[i] != (left_alone ? 1.0f : 0.5f);
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("factors are gathered where that is fewer bytes, on GPUs of large layers alone") {
    const auto backend = make_cpu_backend(1);
    const auto chosen = [&](int images, FactorUse use, bool on_gpu, const char* last = "2048") {
        const Net net(
            *backend,
            parse_model(fmt::format("linear 2048\nrelu\nlinear {}\nlinear classes\n", last),
                        "large"),
            {1, 6, 6}, kClasses, {.train_batch = 1});
        std::vector<std::string> names;
        for (const FactoredLayer& layer :
             choose_factored(net, *backend, OneOfTwo(), {.images = images}, use, on_gpu)) {
            names.push_back(net.nodes()[layer.node].name);
        }
        return names;
    };
    using Names = std::vector<std::string>;
    // For fc2, n (2048 + 2048) elements are gathered, n in blocks of 16, or 2048 * 2048 reduced.
    CHECK(chosen(240, FactorUse::automatic, true) == Names{"fc2"});
    CHECK(chosen(241, FactorUse::automatic, true).empty());
    CHECK(chosen(241, FactorUse::on, true) == Names{"fc2"});
    CHECK(chosen(1008, FactorUse::on, true) == Names{"fc2"});
    CHECK(chosen(1009, FactorUse::on, true).empty());
    CHECK(chosen(64, FactorUse::off, true).empty());
    CHECK(chosen(64, FactorUse::automatic, true, "2047").empty());  // less than 4 Mi elements
    CHECK(chosen(64, FactorUse::automatic, false).empty());         // of one host
}

TEST_CASE("CPU ranks are virtual ranks by default, also of several hosts") {
    class Ranks final : public OneOfTwo {
     public:
        Ranks(int of_host, bool in_tree) : of_host_(of_host), in_tree_(in_tree) {}
        int local_size() const override { return of_host_; }
        bool can_sum_in_tree() const override { return in_tree_; }

     private:
        const int of_host_;
        const bool in_tree_;
    };
    const auto cpu = make_cpu_backend(1), gpu = make_emulated_backend({});
    const RunSpec run;
    for (const int of_host : {1, 2}) {
        INFO(of_host << " ranks on this host, of 2");
        CHECK(choose_shards(Ranks(of_host, true), *cpu, run) == 2);
        CHECK(choose_shards(Ranks(of_host, false), *cpu, run) == 0);
        CHECK(choose_shards(Ranks(of_host, true), *gpu, run) == 0);
    }
    CHECK(choose_shards(*make_single_communicator(), *cpu, run) == 0);
    RunSpec accumulates, times;
    accumulates.batch.accumulate = 2;
    times.device.kernels = "auto";
    CHECK(choose_shards(Ranks(1, true), *cpu, accumulates) == 0);
    CHECK(choose_shards(Ranks(1, true), *cpu, times) == 0);
    // More hosts may come to a job of gyre launch's. Said without it, it may not be so of all
    // ranks.
    setenv(comm::kMostRanks, "4", 1);
    CHECK(choose_shards(Ranks(1, true), *cpu, run) == 2);
    setenv(comm::kLaunchFolder, "/tmp/none", 1);
    CHECK(choose_shards(Ranks(1, true), *cpu, run) == 4);
    CHECK(choose_shards(*make_single_communicator(), *cpu, run) == 4);
    unsetenv(comm::kLaunchFolder);
    unsetenv(comm::kMostRanks);
}

TEST_CASE("frozen parameters stay as they are, and the others' updates do not depend on them") {
    struct Case {
        bool emulated;
        int ranks;
        bool shared;
        OptimizerSpec optimizer;
    };
    const auto step = [](const Case& c, const std::string& freeze) {
        std::vector<HostTensor> before, after;
        ThreadRanks job(c.ranks);
        job.run([&](Communicator& comm) {
            const auto backend = c.emulated ? make_emulated_backend({}) : make_cpu_backend(1);
            RunSpec run{.batch = {.global_batch = 12}, .optimizer = c.optimizer};
            run.optimizer.freeze = freeze;
            run.reduction.shard_optimizer = c.shared ? ShardUse::on : ShardUse::off;
            Session session(comm, *backend, run, {.model = load_model("net")},
                            random_images(12, {1, 28, 28}, 10), {{0.5f}, {0.3f}});
            session.initialise();
            const auto start = session.net().export_parameters();
            session.trainer().begin_epoch(1);
            session.trainer().step(0, false);
            session.trainer().next_result();
            if (comm.is_root()) {
                before = start;
                after = session.net().export_parameters();
            }
        });
        return std::pair(before, after);
    };
    const OptimizerSpec adam{.rule = UpdateRule::adam, .weight_decay = 0.1f};
    for (const Case& c : {Case{false, 1, false, adam}, Case{true, 1, false, adam},
                          Case{true, 1, false, {.momentum = 0.9f}},
                          Case{false, 3, false, {.momentum = 0.0f}}, Case{false, 3, true, adam}}) {
        INFO("emulated " << c.emulated << ", " << c.ranks << " ranks, shared " << c.shared);
        const auto free = step(c, "").second;
        // The second leaves nothing to train in the shares of ranks 0 and 1.
        for (const std::string freeze : {"conv?.weight,fc1.*", "conv*,fc1.*,fc2.weight"}) {
            const auto [before, after] = step(c, freeze);
            REQUIRE(after.size() == 8);
            for (std::size_t i = 0; i < after.size(); ++i) {
                const std::string& name = after[i].name;
                INFO(freeze << " " << name);
                const bool frozen = freeze.ends_with("fc1.*")
                                        ? name.starts_with("fc1.") || name == "conv1.weight" ||
                                              name == "conv2.weight"
                                        : name != "fc2.bias";
                CHECK((after[i].values == before[i].values) == frozen);
                CHECK((after[i].values == free[i].values) == !frozen);
            }
        }
    }
    // The norm is that of the gradients that are used.
    const OptimizerSpec clipping{
        .learning_rate = 1.0f, .momentum = 0.0f, .max_grad_norm = 0x1p-10f};
    const Case clipped{false, 1, false, clipping}, shared{false, 3, true, clipping};
    for (const auto& [c, freeze] :
         {std::pair(clipped, "fc*"), std::pair(shared, "conv*,fc1.*,fc2.weight")}) {
        INFO("frozen " << freeze);
        const auto [before, after] = step(c, freeze);
        double squares = 0.0;
        for (std::size_t i = 0; i < after.size(); ++i) {
            for (std::size_t k = 0; k < after[i].values.size(); ++k) {
                const double moved = double{after[i].values[k]} - double{before[i].values[k]};
                squares += moved * moved;
            }
        }
        CHECK(std::sqrt(squares) == Approx(0x1p-10).epsilon(0.01));
    }
    expect_error(ExitCode::usage, {"`freeze`: fc3 matches none", "fc2.bias"},
                 [&] { step(clipped, "conv1.*,fc3"); });
    expect_error(ExitCode::usage, {"`freeze` *", "no parameter is left"},
                 [&] { step(clipped, "*"); });
}

TEST_CASE("a convolution without bias trains as one whose bias is 0 and frozen") {
    struct Case {
        bool emulated;
        int ranks;
        OptimizerSpec optimizer;
    };
    const auto train = [](const Case& c, bool bias, std::vector<HostTensor> start) {
        const std::string end = bias ? "\n" : " nobias\n";
        const ModelSpec model = parse_model("conv 4 k5 s2" + end + "batchnorm\nrelu\nconv 6 k3" +
                                                end + "maxpool 3 s2 p1\nrelu\nlinear classes\n",
                                            "mine");
        std::vector<HostTensor> after;
        ThreadRanks job(c.ranks);
        job.run([&](Communicator& comm) {
            const auto backend = c.emulated ? make_emulated_backend({}) : make_cpu_backend(1);
            RunSpec run{.batch = {.global_batch = 12}, .optimizer = c.optimizer};
            run.optimizer.freeze = bias ? "conv*.bias" : "";
            run.reduction.shard_optimizer = c.ranks > 1 ? ShardUse::on : ShardUse::off;
            Session session(comm, *backend, run, {.model = model},
                            random_images(36, {1, 28, 28}, 10), {{0.5f}, {0.3f}});
            session.initialise();
            if (bias) {
                session.net().import_parameters(start, "start");
            }
            const auto before = session.net().export_parameters();
            session.trainer().begin_epoch(1);
            for (int step = 0; step < 3; ++step) {
                session.trainer().step(step, false);
            }
            while (session.trainer().next_result()) {
            }
            if (comm.is_root()) {
                start = before;
                after = session.net().export_parameters();
            }
        });
        return std::pair(start, after);
    };
    const OptimizerSpec sgd{.weight_decay = 0.1f, .max_grad_norm = 0.5f};
    const OptimizerSpec adam{.rule = UpdateRule::adamw};
    for (const Case& c : {Case{false, 1, sgd}, Case{true, 1, adam}, Case{false, 3, sgd},
                          Case{false, 2, {.momentum = 0.0f}}}) {
        INFO("emulated " << c.emulated << ", " << c.ranks << " ranks");
        auto [start, without] = train(c, false, {});
        REQUIRE(without.size() == 8);
        start.push_back({"conv1.bias", {4}, std::vector<float>(4)});
        start.push_back({"conv2.bias", {6}, std::vector<float>(6)});
        std::map<std::string, std::vector<float>> with;
        for (const HostTensor& tensor : train(c, true, start).second) {
            with[tensor.name] = tensor.values;
        }
        REQUIRE(with.size() == 10);
        CHECK(with.at("conv1.bias") == std::vector<float>(4));
        for (std::size_t i = 0; i < without.size(); ++i) {
            INFO(without[i].name);
            CHECK(without[i].values == with.at(without[i].name));
            CHECK(without[i].values != start[i].values);
        }
    }
}

TEST_CASE("the moving average of the parameters follows them, in shares or not") {
    struct Case {
        bool emulated;
        int ranks;
        bool shared;
        OptimizerSpec optimizer;
    };
    static constexpr float kDecay = 0.75f;
    constexpr int kCount = 4;
    using Values = std::vector<std::vector<float>>;
    // The parameters before the first step and after each, and their average at the end.
    const auto train = [](const Case& c) {
        std::vector<Values> course;
        Values average, after;
        ThreadRanks job(c.ranks);
        job.run([&](Communicator& comm) {
            const auto backend = c.emulated ? make_emulated_backend({}) : make_cpu_backend(1);
            RunSpec run{.batch = {.global_batch = 12}, .optimizer = c.optimizer};
            run.optimizer.ema = kDecay;
            run.reduction.shard_optimizer = c.shared ? ShardUse::on : ShardUse::off;
            Session session(comm, *backend, run, {.model = load_model("net")},
                            random_images(12 * kCount, {1, 28, 28}, 10), {{0.5f}, {0.3f}});
            session.initialise();
            const auto values = [&] {
                Values all;
                for (const HostTensor& tensor : session.net().export_parameters()) {
                    all.push_back(tensor.values);
                }
                return all;
            };
            std::vector<Values> own = {values()};
            session.trainer().begin_epoch(1);
            for (int step = 0; step < kCount; ++step) {
                session.trainer().step(step, false);
                session.trainer().next_result();
                own.push_back(values());
            }
            Values found;
            session.optimizer().with_average([&] { found = values(); });
            if (comm.is_root()) {  // Catch2's checks are for one thread
                course = own;
                average = found;
                after = values();
            }
        });
        CHECK(after == course.back());
        return std::pair(course, average);
    };
    const OptimizerSpec adam{.rule = UpdateRule::adam};
    const OptimizerSpec clipping{.learning_rate = 0.1f, .max_grad_norm = 0.1f};
    OptimizerSpec freezing{.learning_rate = 0.1f};
    freezing.freeze = "conv*";
    std::map<bool, Values> of_three_ranks;
    for (const Case& c : {Case{false, 1, false, adam}, Case{true, 1, false, freezing},
                          Case{true, 1, false, clipping}, Case{false, 3, false, adam},
                          Case{false, 3, true, adam}, Case{false, 3, true, freezing}}) {
        INFO("emulated " << c.emulated << ", " << c.ranks << " ranks, shared " << c.shared);
        const auto [course, average] = train(c);
        REQUIRE(course.size() == kCount + 1);
        if (c.ranks == 3 && c.optimizer.freeze.empty()) {
            of_three_ranks[c.shared] = average;
        }
        double most_off = 0.0, most_apart = 0.0;  // as shares of the tolerance, and of a value
        for (std::size_t i = 0; i < average.size(); ++i) {
            for (std::size_t k = 0; k < average[i].size(); ++k) {
                double expected = double{course[0][i][k]}, largest = std::abs(expected);
                for (int step = 1; step <= kCount; ++step) {
                    const double now = double{course[static_cast<std::size_t>(step)][i][k]};
                    expected += (1.0 - double{kDecay}) * (now - expected);
                    largest = std::max(largest, std::abs(now));
                }
                // Each step rounds the difference, the product and the sum.
                const double tolerance = kCount * 3 * 0x1p-23 * largest;
                const double off = std::abs(double{average[i][k]} - expected);
                most_off = std::max(most_off, tolerance > 0.0 ? off / tolerance : off);
                most_apart = std::max(
                    most_apart, std::abs(double{average[i][k]} - double{course.back()[i][k]}));
            }
        }
        CHECK(most_off <= 1.0);
        CHECK(most_apart > 1e-4);
    }
    CHECK(of_three_ranks.at(true) == of_three_ranks.at(false));
}

TEST_CASE("parameters with a scaled rate learn as if all had that, and the others as if none had") {
    struct Case {
        bool emulated;
        int ranks;
        bool shared;
        OptimizerSpec optimizer;
    };
    const auto step = [](const Case& c, float rate, const std::string& scales,
                         const std::string& decay_scales = "") {
        std::vector<HostTensor> after;
        ThreadRanks job(c.ranks);
        job.run([&](Communicator& comm) {
            const auto backend = c.emulated ? make_emulated_backend({}) : make_cpu_backend(1);
            RunSpec run{.batch = {.global_batch = 12}, .optimizer = c.optimizer};
            run.optimizer.learning_rate = rate;
            run.optimizer.lr_scale = scales;
            run.optimizer.decay_scale = decay_scales;
            run.reduction.shard_optimizer = c.shared ? ShardUse::on : ShardUse::off;
            Session session(comm, *backend, run, {.model = load_model("net")},
                            random_images(12, {1, 28, 28}, 10), {{0.5f}, {0.3f}});
            session.initialise();
            session.trainer().begin_epoch(1);
            session.trainer().step(0, false);
            session.trainer().next_result();
            if (comm.is_root()) {
                after = session.net().export_parameters();
            }
        });
        return after;
    };
    // Powers of two, so that the order of the products does not show.
    constexpr float kRate = 0x1p-6f, kDecay = 0x1p-4f;
    const OptimizerSpec sgd{.weight_decay = kDecay, .momentum = 0.0f};
    const OptimizerSpec clipping{.momentum = 0.9f, .max_grad_norm = 0.5f};
    const OptimizerSpec adam{.rule = UpdateRule::adam, .weight_decay = kDecay};
    const OptimizerSpec adamw{.rule = UpdateRule::adamw, .weight_decay = kDecay};
    const OptimizerSpec lion{.rule = UpdateRule::lion, .weight_decay = kDecay};
    const OptimizerSpec rmsprop{.rule = UpdateRule::rmsprop};
    for (const Case& c :
         {Case{false, 1, false, sgd}, Case{false, 1, false, clipping},
          Case{true, 1, false, clipping}, Case{false, 1, false, adam}, Case{true, 1, false, adamw},
          Case{false, 3, true, adamw}, Case{false, 1, false, lion}, Case{true, 1, false, lion},
          Case{false, 3, false, rmsprop}, Case{true, 1, false, sgd}}) {
        INFO("emulated " << c.emulated << ", " << c.ranks << " ranks, rule "
                         << static_cast<int>(c.optimizer.rule));
        const auto whole = step(c, kRate, ""), half = step(c, kRate / 2, "");
        const auto scaled = step(c, kRate, "*=4,conv*=0.5,fc1.bias=0.5,fc?.weight=1");
        CHECK(same(step(c, kRate, "*=0.5"), half));
        const auto four = step(c, kRate * 4, "");
        REQUIRE(scaled.size() == 8);
        for (std::size_t i = 0; i < scaled.size(); ++i) {
            const std::string& name = scaled[i].name;
            INFO(name);
            const bool halved = name.starts_with("conv") || name == "fc1.bias";
            const auto& expected = halved ? half : name == "fc2.bias" ? four : whole;
            CHECK(scaled[i].values == expected[i].values);
            CHECK(half[i].values != whole[i].values);
        }
        if (c.optimizer.weight_decay) {
            Case other = c;
            other.optimizer.weight_decay = kDecay / 2;
            const auto less = step(other, kRate, "");
            other.optimizer.weight_decay = 0.0f;
            const auto none = step(other, kRate, "");
            const auto mixed = step(c, kRate, "", "*=0,conv*=0.5,fc1.*=1");
            // A rate of 4 times and a decay of a quarter leave what is decayed in a step as it was.
            other.optimizer.weight_decay = kDecay / 4;
            const auto fast = step(other, kRate * 4, "");
            CHECK(same(step(c, kRate, "*=4", "*=0.25"), fast));
            for (std::size_t i = 0; i < mixed.size(); ++i) {
                const std::string& name = mixed[i].name;
                INFO(name);
                const bool halved = name.starts_with("conv");
                CHECK(mixed[i].values == (halved                    ? less
                                          : name.starts_with("fc1") ? whole
                                                                    : none)[i]
                                             .values);
                CHECK(none[i].values != whole[i].values);
            }
        }
    }
    const Case plain{false, 1, false, sgd};
    expect_error(ExitCode::usage, {"`weight-decay-scale`: fc3 matches none", "fc2.bias"},
                 [&] { step(plain, kRate, "", "fc3=2"); });
    expect_error(ExitCode::usage, {"'conv*=-1' must be a pattern and a number, such as"},
                 [&] { step(plain, kRate, "", "conv*=-1"); });
    expect_error(ExitCode::usage, {"`lr-scale`: fc3 matches none", "fc2.bias"},
                 [&] { step(plain, kRate, "conv*=2,fc3=2"); });
    for (const char* bad : {"conv*", "conv*=", "conv*=0", "conv*=-1", "conv*=nan", "conv*=1x"}) {
        expect_error(ExitCode::usage,
                     {std::string("'") + bad + "' must be a pattern and a number above 0"},
                     [&] { step(plain, kRate, bad); });
    }
}

TEST_CASE("class weights: images of classes without weight do not count, automatic ones balance") {
    const auto step = [](bool emulated, const LossSpec& loss, ImageSet images) {
        const auto comm = make_single_communicator();
        const auto backend = emulated ? make_emulated_backend({}) : make_cpu_backend(1);
        const int count = static_cast<int>(images.count);
        Session session(*comm, *backend,
                        {.batch = {.global_batch = count},
                         .loss = loss,
                         .optimizer = {.learning_rate = 0.125f, .momentum = 0.0f}},
                        {.model = load_model("net"), .classes = 4}, std::move(images),
                        {{0.5f}, {0.3f}});
        session.initialise();
        session.trainer().begin_epoch(1);
        session.trainer().step(0, false);
        session.trainer().next_result();
        return session.net().export_parameters();
    };
    // The classes have 8, 4, 2 and 2 images.
    ImageSet images = random_images(16, {1, 28, 28}, 4);
    images.labels = {0, 1, 0, 2, 0, 3, 0, 1, 0, 1, 0, 2, 0, 3, 0, 1};
    for (const bool emulated : {false, true}) {
        INFO("emulated " << emulated);
        const auto plain = step(emulated, {}, images);
        const auto equal = step(emulated, {.class_weights = {5, 5, 5, 5}}, images);
        CHECK(same(step(emulated, {.class_weights = {1, 1, 1, 1}}, images), equal));
        CHECK((emulated || same(equal, plain)));  // a GPU's fused pass has no weights
        const auto balanced = step(emulated, {.balanced = true}, images);
        CHECK(same(step(emulated, {.class_weights = {1, 2, 4, 4}}, images), balanced));
        CHECK(!same(balanced, plain));
        // Other pixels where the weight is 0.
        ImageSet changed = images;
        const std::size_t elems = 28 * 28;
        for (std::size_t i = 0; i < changed.labels.size(); ++i) {
            for (std::size_t k = 0; changed.labels[i] == 3 && k < elems; ++k) {
                changed.pixels.writable()[i * elems + k] ^= 0xffu;
            }
        }
        const LossSpec without{.class_weights = {1, 1, 1, 0}};
        CHECK(same(step(emulated, without, changed), step(emulated, without, images)));
        CHECK(!same(step(emulated, {}, changed), plain));
    }
}
