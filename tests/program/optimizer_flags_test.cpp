// The flags of an optimiser: the rule they make is PyTorch's, and what it cannot have is refused.
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/make_backend.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "train/cli/setup.hpp"
#include "train/optimizer.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

// The values that the flags should come to, written down once more.
struct Rule {
    double lr = 0.01, momentum = 0.5, weight_decay = 0.0;
    bool nesterov = false;
    std::optional<double> max_norm = {};
    Formula formula = Formula::sgd;
    bool decoupled = false;
    double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;
};

template <class Change>
Rule sgd(Change change) {
    Rule rule;
    change(rule);
    return rule;
}

template <class Change>
Rule adam(Change change) {
    Rule rule;
    rule.formula = Formula::adam;
    rule.lr = 0.001;
    change(rule);
    return rule;
}

template <class Change>
Rule adamw(Change change) {
    Rule rule = adam([](Rule&) {});
    rule.decoupled = true;
    rule.weight_decay = 0.01;
    change(rule);
    return rule;
}

template <class Change>
Rule lion(Change change) {
    Rule rule = {.lr = 0.0001, .formula = Formula::lion, .decoupled = true, .beta2 = 0.99};
    change(rule);
    return rule;
}

// beta2: alpha
template <class Change>
Rule rmsprop(Change change) {
    Rule rule = {.formula = Formula::rmsprop, .beta2 = 0.99};
    change(rule);
    return rule;
}

const std::vector<std::pair<std::string, Rule>> kRules = {
    {"", sgd([](Rule&) {})},
    {"--lr 0.25", sgd([](Rule& r) { r.lr = 0.25; })},
    {"--momentum 0", sgd([](Rule& r) { r.momentum = 0; })},
    {"--momentum 0 --weight-decay 0.5", sgd([](Rule& r) { r.momentum = 0, r.weight_decay = 0.5; })},
    {"--momentum 0.875", sgd([](Rule& r) { r.momentum = 0.875; })},
    {"--momentum 0.875 --nesterov", sgd([](Rule& r) { r.momentum = 0.875, r.nesterov = true; })},
    {"--weight-decay 0.5", sgd([](Rule& r) { r.weight_decay = 0.5; })},
    {"--nesterov --weight-decay 0.5",
     sgd([](Rule& r) { r.nesterov = true, r.weight_decay = 0.5; })},
    {"--max-grad-norm 0.5", sgd([](Rule& r) { r.max_norm = 0.5; })},
    {"--max-grad-norm 1000", sgd([](Rule&) {})},
    {"--optimizer adam", adam([](Rule&) {})},
    {"--optimizer adam --lr 0.25", adam([](Rule& r) { r.lr = 0.25; })},
    {"--optimizer adam --betas 0.5,0.75", adam([](Rule& r) { r.beta1 = 0.5, r.beta2 = 0.75; })},
    {"--optimizer adam --eps 0.5", adam([](Rule& r) { r.epsilon = 0.5; })},
    {"--optimizer adam --weight-decay 0.5", adam([](Rule& r) { r.weight_decay = 0.5; })},
    // eps 1, as otherwise Adam does not depend on the gradients' size.
    {"--optimizer adam --max-grad-norm 0.5 --eps 1",
     adam([](Rule& r) { r.max_norm = 0.5, r.epsilon = 1; })},
    {"--optimizer adamw", adamw([](Rule&) {})},
    {"--optimizer adamw --lr 0.25", adamw([](Rule& r) { r.lr = 0.25; })},
    {"--optimizer adamw --weight-decay 0", adam([](Rule&) {})},
    {"--optimizer adamw --lr 0.25 --weight-decay 0.5",
     adamw([](Rule& r) { r.lr = 0.25, r.weight_decay = 0.5; })},
    {"--optimizer adamw --betas 0.5,0.75 --eps 0.5",
     adamw([](Rule& r) { r.beta1 = 0.5, r.beta2 = 0.75, r.epsilon = 0.5; })},
    {"--optimizer adamw --max-grad-norm 0.5 --eps 1",
     adamw([](Rule& r) { r.max_norm = 0.5, r.epsilon = 1; })},
    {"--optimizer lion", lion([](Rule&) {})},
    {"--optimizer lion --lr 0.25", lion([](Rule& r) { r.lr = 0.25; })},
    {"--optimizer lion --betas 0.5,0.75 --lr 0.25",
     lion([](Rule& r) { r.beta1 = 0.5, r.beta2 = 0.75, r.lr = 0.25; })},
    {"--optimizer lion --weight-decay 0.5 --lr 0.25",
     lion([](Rule& r) { r.weight_decay = 0.5, r.lr = 0.25; })},
    {"--optimizer rmsprop", rmsprop([](Rule&) {})},
    {"--optimizer rmsprop --lr 0.0625", rmsprop([](Rule& r) { r.lr = 0.0625; })},
    {"--optimizer rmsprop --alpha 0.5", rmsprop([](Rule& r) { r.beta2 = 0.5; })},
    {"--optimizer rmsprop --eps 0.5", rmsprop([](Rule& r) { r.epsilon = 0.5; })},
    {"--optimizer rmsprop --weight-decay 0.5", rmsprop([](Rule& r) { r.weight_decay = 0.5; })},
};

constexpr int kSteps = 3;

// Between -1 and 1, and in the padding, too: the optimiser does not know it.
float value(int which, std::size_t i) {
    return static_cast<float>(std::sin(1.0 + 7.0 * which + static_cast<double>(i * i)));
}

// Parameters and moments of a rule, in double precision.
struct Reference {
    std::vector<double> p, m, v;

    // norm: of the gradients; step: from 1.
    void update(const Rule& rule, const std::vector<float>& gradients, double norm, int step) {
        const double scale = rule.max_norm ? *rule.max_norm / (norm + 1e-6) : 1.0;
        for (std::size_t i = 0; i < p.size(); ++i) {
            const double g = scale * double{gradients[i]};
            if (rule.formula == Formula::sgd) {
                const double d = g + rule.weight_decay * p[i];
                m[i] = rule.momentum * m[i] + d;
                p[i] -= rule.lr * (rule.nesterov ? d + rule.momentum * m[i] : m[i]);
                continue;
            }
            if (rule.decoupled) {
                p[i] *= 1.0 - rule.lr * rule.weight_decay;
            }
            const double d = g + (rule.decoupled ? 0.0 : rule.weight_decay * p[i]);
            if (rule.formula == Formula::lion) {
                const double c = rule.beta1 * m[i] + (1 - rule.beta1) * d;
                p[i] -= c > 0 ? rule.lr : c < 0 ? -rule.lr : 0.0;
                m[i] = rule.beta2 * m[i] + (1 - rule.beta2) * d;
                continue;
            }
            if (rule.formula == Formula::rmsprop) {
                v[i] = rule.beta2 * v[i] + (1 - rule.beta2) * d * d;
                p[i] -= rule.lr * d / (std::sqrt(v[i]) + rule.epsilon);
                continue;
            }
            m[i] = rule.beta1 * m[i] + (1 - rule.beta1) * d;
            v[i] = rule.beta2 * v[i] + (1 - rule.beta2) * d * d;
            p[i] -= rule.lr / (1 - std::pow(rule.beta1, step)) * m[i] /
                    (std::sqrt(v[i] / (1 - std::pow(rule.beta2, step))) + rule.epsilon);
        }
    }
};

// Takes some steps of the optimiser that the flags say, which must be the rule's; where the rule
// then stands.
std::vector<double> follow(Backend& backend, const std::string& flags, const Rule& rule) {
    Net net(backend, parse_model("linear 5\nlinear classes\n", "two"), {1, 3, 3}, 2, {1, 0});
    const auto elems = static_cast<std::size_t>(net.flat_elems());
    std::vector<float> start(elems);
    for (std::size_t i = 0; i < elems; ++i) {
        start[i] = value(0, i);
    }
    backend.upload(net.parameter_data(), start.data(), elems * sizeof(float));
    const Parsed parsed(flags);
    Optimizer optimizer(backend, net, parsed.options.optimizer);
    const DeviceBuffer<std::int32_t> word(backend, 1);
    const PinnedBuffer<StepScalars> scalars(backend, kSteps);

    Reference reference{
        {start.begin(), start.end()}, std::vector<double>(elems), std::vector<double>(elems)};
    for (int step = 1; step <= kSteps; ++step) {
        std::vector<float> gradients(elems + Net::kStatsElems);
        double norm = 0.0;
        for (std::size_t i = 0; i < elems; ++i) {
            gradients[i] = value(step, i);
            norm += double{gradients[i]} * double{gradients[i]};
        }
        norm = std::sqrt(norm);
        REQUIRE(norm > 2.0);
        backend.upload(net.gradient_data(), gradients.data(), gradients.size() * sizeof(float));
        optimizer.next_steps(scalars.get() + step - 1, 1);
        optimizer.begin_step(word.get());
        // As buckets arrive: the first with the StepStats.
        optimizer.arrived({net.flat_elems(), net.gradient_elems()});
        optimizer.arrived({48, net.flat_elems()});
        optimizer.arrived({0, 48});
        optimizer.end_step();
        if (rule.max_norm) {
            StepStats stats;
            backend.download(&stats, net.stats(), sizeof stats);
            CHECK(stats.gradient_norm == Approx(norm).epsilon(1e-7));
        }

        reference.update(rule, gradients, norm, step);
    }
    std::vector<float> found(elems);
    backend.download(found.data(), net.parameter_data(), elems * sizeof(float));
    double worst = 0.0;
    for (std::size_t i = 0; i < elems; ++i) {
        const double error = std::abs(double{found[i]} - reference.p[i]);
        worst = error <= worst ? worst : error;
    }
    // Values up to 2, and a few roundings a step.
    CHECK(worst <= kSteps * 16 * 0x1p-24);
    return reference.p;
}

}  // namespace

TEST_CASE("every flag of an optimiser changes its rule as PyTorch's argument does") {
    std::vector<std::vector<double>> all;
    for (const bool emulated : {false, true}) {
        const auto backend = emulated ? make_emulated_backend({}) : make_cpu_backend(1);
        for (const auto& [flags, rule] : kRules) {
            INFO(flags << (emulated ? " (emulated)" : ""));
            const std::vector<double> p = follow(*backend, flags, rule);
            if (!emulated) {
                all.push_back(p);
            }
        }
    }
    // The rules tell the flags apart: no two come to the same, but for the two that should.
    int alike = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            double apart = 0.0;
            for (std::size_t k = 0; k < all[i].size(); ++k) {
                apart = std::max(apart, std::abs(all[i][k] - all[j][k]));
            }
            INFO(kRules[j].first << " and " << kRules[i].first << ": " << apart);
            alike += apart == 0.0;
            CHECK((apart == 0.0 || apart > 8 * kSteps * 16 * 0x1p-24));
        }
    }
    CHECK(alike == 2);
}

TEST_CASE("settings that an optimiser cannot have are refused, in the names of who set them") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, parse_model("linear classes\n", "one"), {1, 3, 3}, 2, {1, 0});
    const Training training;
    const auto refuse = [&](const OptimizerSpec& spec, const std::string& what,
                            const std::string& flags, const std::string& said) {
        INFO(flags);
        std::string found;
        try {
            Optimizer(*backend, net, spec);
        } catch (const Error& error) {
            found = error.what();
            CHECK(error.code() == ExitCode::usage);
        }
        CHECK(found == what);
        CHECK_THAT(with_flag_names(found), Catch::Contains(said));
        expect_error(ExitCode::usage, {found}, [&] { training.run(1, flags); });
    };
    const std::string nesterov = "`nesterov` needs `rule` sgd and `momentum` greater than 0",
                      momentum = "`momentum` must be at least 0 and less than 1",
                      nesterov_flag =
                          "--nesterov needs --optimizer sgd and --momentum greater than 0",
                      momentum_flag = "--momentum must be at least 0 and less than 1";
    using Kind = ScheduleKind;
    refuse({.schedule = {.kind = Kind::step}},
           "`schedule` step needs `step_size`, after which the rate falls", "--lr-schedule step",
           "--lr-schedule step needs --lr-step-size, after which the rate falls");
    refuse({.schedule = {.gamma = 0.5}}, "`gamma` is for `schedule` step and plateau",
           "--lr-gamma 0.5", "--lr-gamma is for --lr-schedule step and plateau");
    refuse({.schedule = {.kind = Kind::plateau, .step_size = 2}},
           "`step_size` is for `schedule` step", "--lr-schedule plateau --lr-step-size 2",
           "--lr-step-size is for --lr-schedule step");
    refuse({.schedule = {.patience = 2}}, "`lr-patience` is for `schedule` plateau",
           "--lr-patience 2", "--lr-patience is for --lr-schedule plateau");
    refuse({.schedule = {.kind = Kind::one_cycle, .total_steps = 9, .min_rate = 0.5}},
           "`min_rate` is for `schedule` cosine and plateau",
           "--lr-schedule one-cycle --lr-min 0.5",
           "--lr-min is for --lr-schedule cosine and plateau");
    refuse({.schedule = {.kind = Kind::one_cycle, .warmup_steps = 1, .total_steps = 9}},
           "`schedule` one-cycle has its own warm-up: it goes without `warmup_steps`",
           "--lr-schedule one-cycle --warmup-epochs 1",
           "it goes without --warmup-steps and --warmup-epochs");
    refuse({.momentum = 0.0f, .nesterov = true}, nesterov, "--nesterov --momentum 0",
           nesterov_flag);
    refuse({.rule = UpdateRule::adam, .nesterov = true}, nesterov, "--nesterov --optimizer adam",
           nesterov_flag);
    refuse({.momentum = 1.0f}, momentum, "--momentum 1", momentum_flag);
    refuse({.momentum = std::nanf("")}, momentum, "--momentum 1.5", momentum_flag);
}

TEST_CASE("the count of steps is exact beyond what a float32 holds, and old states have one") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, parse_model("linear classes\n", "one"), {1, 3, 3}, 2, {1, 0});
    const PinnedBuffer<StepScalars> scalars(*backend, 1);
    const OptimizerSpec spec = {.rule = UpdateRule::adam};
    Optimizer first(*backend, net, spec);
    const auto given = [&](float step, std::optional<float> rest) {
        std::vector<HostTensor> state = first.export_state();
        REQUIRE(state.at(0).name == "step");
        REQUIRE(state.at(1).name == "step_rest");
        state[0].values = {step};
        state[1].values = {rest.value_or(0.0f)};
        if (!rest) {
            state.erase(state.begin() + 1);
        }
        return state;
    };
    // The two tensors' sum, after so many more steps and so many files between them.
    const auto after = [&](const std::vector<HostTensor>& state, int steps) {
        std::vector<HostTensor> now = state;
        for (int i = 0; i <= steps; ++i) {
            Optimizer optimizer(*backend, net, spec);
            optimizer.import_state(now, "here");
            if (i > 0) {
                optimizer.next_steps(scalars.get(), 1);
            }
            now = optimizer.export_state();
        }
        return double{now.at(0).values.at(0)} + double{now.at(1).values.at(0)};
    };
    CHECK(after(given(7.0f, std::nullopt), 2) == 9.0);
    CHECK(after(given(0x1p24f, std::nullopt), 3) == 0x1p24 + 3);
    CHECK(after(given(0x1p24f, 1.0f), 0) == 0x1p24 + 1);
    CHECK(after(given(0x1p30f, -31.0f), 40) == 0x1p30 + 9);
    for (const auto& [step, rest] : {std::pair{7.0f, 1.0f},
                                     {0x1p24f, 0.5f},
                                     {0x1p24f, 9.0f},
                                     {0x1p60f, 0.0f},
                                     {0.5f, 0.0f},
                                     {-1.0f, 0.0f}}) {
        INFO(step << " and " << rest);
        expect_error(ExitCode::bad_input, {"a number of steps"},
                     [&] { after(given(step, rest), 0); });
    }
}
