// From a flag to what it does: every flag of `gyre train` reaches its option, and every option
// changes what it says. The trainings run in this process, their ranks as threads.
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "tests/catch.hpp"
#include "tests/expect_error.hpp"
#include "tests/gyre_process.hpp"
#include "tests/temp_dir.hpp"
#include "tests/thread_ranks.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/flags.hpp"
#include "train/evaluator.hpp"
#include "train/hash.hpp"
#include "train/optimizer.hpp"
#include "train/settings_error.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

// What `gyre train FLAGS` makes of its flags.
struct Parsed {
    explicit Parsed(const std::string& flags) {
        add_train_flags(app, options);
        app.parse(flags);
        for (const ManifestEntry& entry : flag_manifest(app)) {
            manifest[entry.name] = entry.value;
        }
    }
    CLI::App app;
    TrainOptions options;
    std::map<std::string, std::string> manifest;  // what the ranks compare
};

// What goes to the standard output meanwhile.
std::string printed(const std::function<void()>& work) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), &std::fclose);
    REQUIRE(file != nullptr);
    std::fflush(stdout);
    const int kept = dup(STDOUT_FILENO);
    dup2(fileno(file.get()), STDOUT_FILENO);
    std::exception_ptr failure;
    try {
        work();
    } catch (...) {
        failure = std::current_exception();
    }
    std::fflush(stdout);
    dup2(kept, STDOUT_FILENO);
    close(kept);
    if (failure != nullptr) {
        std::rethrow_exception(failure);
    }
    std::rewind(file.get());
    std::string text(1 << 16, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file.get()));
    return text;
}

// A training of a small net on small images.
struct Training {
    static constexpr int kTrainImages = 53, kTestImages = 37, kClasses = 4;

    Training() {
        make_dataset(data(), kTrainImages, kTestImages, 1, 6, 6, kClasses);
        std::ofstream(model()) << "conv 6 k3\nrelu\ndropout 0.5\nlinear 20\nrelu\nlinear classes\n";
    }
    std::string data() const { return (dir.path() / "set").string(); }
    std::string model() const { return (dir.path() / "model").string(); }
    std::string file(const char* name) const { return (dir.path() / name).string(); }

    struct Result {
        std::string output;
        nlohmann::json start, end;
        std::vector<nlohmann::json> epochs;
        std::vector<double> losses;  // of each step
        std::int64_t reductions = 0, gatherings = 0;
    };
    // own: further flags of one rank.
    Result run(int ranks, const std::string& flags,
               const std::function<std::string(int rank)>& own = {},
               const std::function<void(const ThreadRanks::Sum&)>& arrived = {}) const {
        const std::string json = file("log.jsonl");
        ThreadRanks job(ranks);
        job.arrived = arrived;
        Result result;
        result.output = printed([&] {
            job.run([&](Communicator& comm) {
                CLI::App app;
                TrainOptions options;
                add_train_flags(app, options);
                std::string all = flags + " " + (own ? own(comm.rank()) : "");
                for (const auto& [flag, value] : {std::pair{"--model", model()},
                                                  {"--data", data()},
                                                  {"--json", json},
                                                  {"--log-interval", "1"},
                                                  {"--threads", "1"}}) {
                    if (all.find(flag) == all.npos) {
                        all.append(" ").append(flag).append(" ").append(value);
                    }
                }
                app.parse(all);
                if (compare_flags) {
                    require_same_manifest(comm, flag_manifest(app));
                }
                run_train(comm, options);
            });
        });
        result.start = read_events(json, "start").at(0);
        result.end = read_events(json, "end").at(0);
        result.epochs = read_events(json, "epoch");
        for (const auto& event : read_events(json, "step")) {
            result.losses.push_back(event.at("loss"));
        }
        result.reductions = job.reductions;
        result.gatherings = job.gatherings;
        return result;
    }

    const TempDir dir;
    bool compare_flags = true;  // of the ranks, as the program does first
};

}  // namespace

TEST_CASE("every flag of gyre train reaches its option, and the comparison of the ranks") {
    struct Row {
        const char* flag;
        const char* value;
        std::function<bool(const TrainOptions&)> arrived;
        // Whether ranks that differ in it are refused: it decides what is computed, or what is said
        // between the ranks.
        bool compared;
    };
    using O = const TrainOptions&;
    const std::vector<Row> rows = {
        {"--data", "x", [](O o) { return o.data == "x"; }, false},  // its contents are
        {"--classes", "7", [](O o) { return o.classes == 7; }, true},
        {"--mean", "0.25,0.5",
         [](O o) {
             return o.mean == std::vector{0.25f, 0.5f};
         },
         true},
        {"--std", "0.25,0.5",
         [](O o) {
             return o.stddev == std::vector{0.25f, 0.5f};
         },
         true},
        {"--test-batch-size", "7", [](O o) { return o.test_batch_size == 7; }, true},
        {"--device", "emulated", [](O o) { return o.device == "emulated"; }, true},
        {"--no-cuda", "", [](O o) { return o.device == "cpu"; }, true},
        {"--kernels", "auto", [](O o) { return o.kernels == "auto"; }, true},
        {"--kernels-cache", "x", [](O o) { return o.kernels_cache == "x"; }, false},
        {"--deterministic", "", [](O o) { return o.deterministic; }, true},
        {"--tf32", "", [](O o) { return o.tf32; }, true},
        {"--threads", "3", [](O o) { return o.threads == 3; }, false},
        {"--comm", "gloo", [](O o) { return o.launch.comm == "gloo"; }, true},
        {"--init-method", "mpi", [](O o) { return o.launch.init_method == "mpi"; }, false},
        {"--rank", "3", [](O o) { return o.launch.rank == 3; }, false},
        {"--world-size", "7", [](O o) { return o.launch.world_size == 7; }, true},
        {"--job-id", "x", [](O o) { return o.launch.job_id == "x"; }, true},
        {"--init-timeout", "7", [](O o) { return o.launch.init_timeout == 7.0; }, false},
        {"--share-gpu", "", [](O o) { return o.launch.share_gpu; }, true},
        {"--nccl-register", "", [](O o) { return o.launch.nccl_register; }, true},
        {"--timeout", "7", [](O o) { return o.timeout == 7.0; }, true},
        {"--flight-record", "x", [](O o) { return o.flight_record == "x"; }, false},
        {"--model", "x", [](O o) { return o.model == "x"; }, true},
        {"--epochs", "3", [](O o) { return o.epochs == 3; }, true},
        {"--batch-size", "7", [](O o) { return o.batch_size == 7; }, true},
        {"--global-batch", "7", [](O o) { return o.global_batch == 7; }, true},
        {"--accumulate", "7", [](O o) { return o.accumulate == 7; }, true},
        {"--limit", "7", [](O o) { return o.limit == 7; }, true},
        {"--seed", "7", [](O o) { return o.seed == 7; }, true},
        {"--optimizer", "adamw", [](O o) { return o.optimizer.rule == UpdateRule::adamw; }, true},
        {"--lr", "0.25", [](O o) { return o.optimizer.learning_rate == 0.25f; }, true},
        {"--lr-schedule", "cosine",
         [](O o) { return o.optimizer.schedule.kind == ScheduleKind::cosine; }, true},
        {"--lr-step-size", "7", [](O o) { return o.lr_step_size == 7; }, true},
        {"--lr-gamma", "0.25", [](O o) { return o.optimizer.schedule.gamma == 0.25; }, true},
        {"--lr-min", "0.25", [](O o) { return o.optimizer.schedule.min_rate == 0.25; }, true},
        {"--warmup-steps", "7", [](O o) { return o.optimizer.schedule.warmup_steps == 7; }, true},
        {"--warmup-epochs", "7", [](O o) { return o.warmup_epochs == 7; }, true},
        {"--momentum", "0.25", [](O o) { return o.optimizer.momentum == 0.25f; }, true},
        {"--weight-decay", "0.25", [](O o) { return o.optimizer.weight_decay == 0.25f; }, true},
        {"--nesterov", "", [](O o) { return o.optimizer.nesterov; }, true},
        {"--betas", "0.25,0.5",
         [](O o) {
             return o.optimizer.betas == std::array{0.25f, 0.5f};
         },
         true},
        {"--eps", "0.25", [](O o) { return o.optimizer.epsilon == 0.25f; }, true},
        {"--max-grad-norm", "0.25", [](O o) { return o.optimizer.max_grad_norm == 0.25f; }, true},
        {"--no-shuffle", "", [](O o) { return !o.shuffle; }, true},
        {"--weight-init", "kaiming-normal",
         [](O o) { return o.init_weights == WeightInit::kaiming_normal; }, true},
        {"--no-dropout", "", [](O o) { return !o.dropout; }, true},
        {"--no-eval", "", [](O o) { return !o.evaluate; }, true},
        {"--bucket-kib", "7", [](O o) { return o.reduction.bucket_bytes == 7 * 1024; }, true},
        {"--tune-buckets", "", [](O o) { return o.tune_buckets; }, true},
        {"--factors", "on", [](O o) { return o.reduction.factors == FactorUse::on; }, true},
        {"--comm-dtype", "bf16", [](O o) { return o.reduction.type == DataType::bfloat16; }, true},
        {"--graph", "off", [](O o) { return o.graph == GraphUse::off; }, true},
        {"--check-sync", "7", [](O o) { return o.check_sync == 7; }, true},
        {"--log-interval", "7", [](O o) { return o.log_interval == 7; }, true},
        {"--save", "x", [](O o) { return o.save == "x"; }, false},
        {"--init", "x", [](O o) { return o.init == "x"; }, false},
        {"--json", "x", [](O o) { return o.json == "x"; }, false},
        {"--save-last", "x", [](O o) { return o.save_last == "x"; }, false},
        {"--verbose", "", [](O o) { return o.verbose; }, false},
        {"--quiet", "", [](O o) { return o.quiet; }, false},
    };
    const Parsed none("");
    std::set<std::string> without_row;
    for (const CLI::Option* option : none.app.get_options()) {
        without_row.insert(option->get_name());
    }
    without_row.erase("--help");
    for (const Row& row : rows) {
        INFO(row.flag << " " << row.value);
        const Parsed given(std::string(row.flag) + " " + row.value);
        CHECK(row.arrived(given.options));
        CHECK(!row.arrived(none.options));  // or it would show nothing
        CHECK((given.manifest != none.manifest) == row.compared);
        CHECK(given.manifest.size() == none.manifest.size());
        CHECK(without_row.erase(row.flag) == 1);
    }
    for (const std::string& flag : without_row) {
        INFO("this flag needs a row in the table above: " << flag);
        CHECK(flag.empty());
    }
}

TEST_CASE("every flag of an optimiser changes its rule as PyTorch's argument does") {
    // What the flags should come to, written down once more.
    struct Rule {
        double lr = 0.01, momentum = 0.5, weight_decay = 0.0;
        bool nesterov = false;
        std::optional<double> max_norm = {};
        bool adam = false, decoupled = false;
        double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;
    };
    const auto sgd = [](auto change) {
        Rule rule;
        change(rule);
        return rule;
    };
    const auto adam = [](auto change) {
        Rule rule;
        rule.adam = true;
        rule.lr = 0.001;
        change(rule);
        return rule;
    };
    const auto adamw = [&](auto change) {
        Rule rule = adam([](Rule&) {});
        rule.decoupled = true;
        rule.weight_decay = 0.01;
        change(rule);
        return rule;
    };
    const std::vector<std::pair<std::string, Rule>> rules = {
        {"", sgd([](Rule&) {})},
        {"--lr 0.25", sgd([](Rule& r) { r.lr = 0.25; })},
        {"--momentum 0", sgd([](Rule& r) { r.momentum = 0; })},
        {"--momentum 0 --weight-decay 0.5",
         sgd([](Rule& r) { r.momentum = 0, r.weight_decay = 0.5; })},
        {"--momentum 0.875", sgd([](Rule& r) { r.momentum = 0.875; })},
        {"--momentum 0.875 --nesterov",
         sgd([](Rule& r) { r.momentum = 0.875, r.nesterov = true; })},
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
    };
    constexpr int kSteps = 3;
    std::vector<std::vector<double>> all;
    for (const bool emulated : {false, true}) {
        const auto backend = emulated ? make_emulated_backend({}) : make_cpu_backend(1);
        for (const auto& [flags, rule] : rules) {
            INFO(flags << (emulated ? " (emulated)" : ""));
            Net net(*backend, parse_model("linear 5\nlinear classes\n", "two"), {1, 3, 3}, 2,
                    {1, 0, true});
            const auto elems = static_cast<std::size_t>(net.flat_elems());
            // Between -1 and 1, and in the padding, too: the optimiser does not know it.
            const auto value = [](int which, std::size_t i) {
                return static_cast<float>(std::sin(1.0 + 7.0 * which + static_cast<double>(i * i)));
            };
            std::vector<float> start(elems);
            for (std::size_t i = 0; i < elems; ++i) {
                start[i] = value(0, i);
            }
            backend->upload(net.parameter_data(), start.data(), elems * sizeof(float));
            const Parsed parsed(flags);
            Optimizer optimizer(*backend, net, parsed.options.optimizer);
            const DeviceBuffer<std::int32_t> word(*backend, 1);
            const PinnedBuffer<StepScalars> scalars(*backend, kSteps);

            std::vector<double> p(start.begin(), start.end()), m(elems), v(elems);
            for (int step = 1; step <= kSteps; ++step) {
                std::vector<float> gradients(elems + Net::kTailElems);
                double norm = 0.0;
                for (std::size_t i = 0; i < elems; ++i) {
                    gradients[i] = value(step, i);
                    norm += double{gradients[i]} * double{gradients[i]};
                }
                norm = std::sqrt(norm);
                REQUIRE(norm > 2.0);
                backend->upload(net.gradient_data(), gradients.data(),
                                gradients.size() * sizeof(float));
                optimizer.next_step(scalars.get()[step - 1]);
                optimizer.begin_step(word.get());
                // As buckets arrive: the first with the tail.
                optimizer.arrived(net.flat_elems(), net.gradient_elems());
                optimizer.arrived(48, net.flat_elems());
                optimizer.arrived(0, 48);
                optimizer.end_step();

                const double scale = rule.max_norm ? *rule.max_norm / (norm + 1e-6) : 1.0;
                for (std::size_t i = 0; i < elems; ++i) {
                    const double g = scale * double{gradients[i]};
                    if (!rule.adam) {
                        const double d = g + rule.weight_decay * p[i];
                        m[i] = rule.momentum * m[i] + d;
                        p[i] -= rule.lr * (rule.nesterov ? d + rule.momentum * m[i] : m[i]);
                        continue;
                    }
                    if (rule.decoupled) {
                        p[i] *= 1.0 - rule.lr * rule.weight_decay;
                    }
                    const double d = g + (rule.decoupled ? 0.0 : rule.weight_decay * p[i]);
                    m[i] = rule.beta1 * m[i] + (1 - rule.beta1) * d;
                    v[i] = rule.beta2 * v[i] + (1 - rule.beta2) * d * d;
                    p[i] -= rule.lr / (1 - std::pow(rule.beta1, step)) * m[i] /
                            (std::sqrt(v[i] / (1 - std::pow(rule.beta2, step))) + rule.epsilon);
                }
            }
            std::vector<float> found(elems);
            backend->download(found.data(), net.parameter_data(), elems * sizeof(float));
            double worst = 0.0;
            for (std::size_t i = 0; i < elems; ++i) {
                const double error = std::abs(double{found[i]} - p[i]);
                worst = error <= worst ? worst : error;
            }
            // Values up to 2, and a few roundings a step.
            CHECK(worst <= kSteps * 16 * 0x1p-24);
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
            INFO(rules[j].first << " and " << rules[i].first << ": " << apart);
            alike += apart == 0.0;
            CHECK((apart == 0.0 || apart > 8 * kSteps * 16 * 0x1p-24));
        }
    }
    CHECK(alike == 2);
}

TEST_CASE("every flag of a training changes what it says") {
    const Training training;
    const auto plain = training.run(1, "--epochs 2 --batch-size 10");
    CHECK(plain.start.at("train_images") == 53);
    CHECK(plain.start.at("test_images") == 37);
    CHECK(plain.start.at("classes") == 4);
    CHECK(plain.start.at("batch_size") == 10);
    CHECK(plain.start.at("global_batch") == 10);
    CHECK(plain.start.at("steps_per_epoch") == 6);
    CHECK(plain.epochs.size() == 2);
    CHECK(plain.losses.size() == 12);
    CHECK(plain.start.at("device").get<std::string>().find("1 thread") != std::string::npos);
    CHECK(training.run(1, "--epochs 2 --batch-size 10").losses == plain.losses);

    SECTION("what is trained on, and how much at a time") {
        const auto first = [&](const std::string& flags, int ranks = 1) {
            return training.run(ranks, "--epochs 1 " + flags).start;
        };
        CHECK(first("--limit 23").at("train_images") == 23);
        CHECK(first("--limit 23 --batch-size 10").at("steps_per_epoch") == 3);
        CHECK(first("--classes 9").at("classes") == 9);
        CHECK(first("--batch-size 5", 3).at("global_batch") == 15);
        CHECK(first("--batch-size 5 --accumulate 2", 3).at("global_batch") == 30);
        CHECK(first("--global-batch 20", 3).at("global_batch") == 20);
        CHECK(first("--global-batch 20", 3).at("batch_size") == 7);
        CHECK(first("").at("global_batch") == 64);
    }
    SECTION("the losses") {
        // Each of these flags changes something that the loss shows, at the latest in epoch 2.
        for (const char* flags :
             {"--seed 2", "--lr 0.02", "--momentum 0.6", "--weight-decay 0.5", "--nesterov",
              "--max-grad-norm 0.01", "--optimizer adam", "--optimizer adamw", "--no-shuffle",
              "--no-dropout", "--mean 0.1 --std 0.5", "--accumulate 2", "--limit 50",
              "--warmup-steps 3", "--warmup-epochs 1", "--lr-schedule cosine",
              "--lr-schedule cosine --lr-min 0.005", "--lr-schedule one-cycle",
              "--lr-schedule step --lr-step-size 1"}) {
            INFO(flags);
            const auto other = training.run(1, std::string("--epochs 2 --batch-size 10 ") + flags);
            CHECK(other.epochs.at(1).at("train_loss") != plain.epochs.at(1).at("train_loss"));
        }
    }
    SECTION("order and dropout") {
        // At rate 0 an epoch differs from another in these alone.
        const auto losses = [&](const std::string& flags) {
            return training.run(1, "--lr 0 --epochs 2 --batch-size 10 " + flags).losses;
        };
        const auto epochs_are_alike = [&](const std::string& flags) {
            const std::vector<double> all = losses(flags);
            REQUIRE(all.size() == 12);
            return std::equal(all.begin(), all.begin() + 6, all.begin() + 6);
        };
        CHECK(epochs_are_alike("--no-shuffle --no-dropout"));
        CHECK(!epochs_are_alike("--no-dropout"));
        CHECK(!epochs_are_alike("--no-shuffle"));
        // Both follow the seed, also where the weights do not.
        const std::string weights = training.file("weights");
        training.run(1, "--epochs 1 --save " + weights);
        for (const std::string flags : {"--no-dropout", "--no-shuffle"}) {
            INFO(flags);
            const std::string all = flags + " --init " + weights;
            CHECK(losses(all + " --seed 3") != losses(all + " --seed 4"));
            CHECK(losses(all + " --seed 3") == losses(all + " --seed 3"));
        }
    }
    SECTION("the report") {
        CHECK(training.run(1, "--epochs 3 --batch-size 10").epochs.size() == 3);
        CHECK(training.run(1, "--epochs 1 --batch-size 10 --log-interval 4").losses.size() == 2);
        const auto quick = training.run(1, "--epochs 1 --no-eval");
        CHECK(!quick.epochs.at(0).contains("test_loss"));
        CHECK(plain.epochs.at(0).contains("test_loss"));
        CHECK(training.run(1, "--epochs 1 -v").output.find("communicator: ") != std::string::npos);
        CHECK(plain.output.find("communicator: ") == std::string::npos);
        CHECK(training.run(1, "--epochs 1 --device emulated --limit 9")
                  .start.at("device")
                  .get<std::string>()
                  .find("emulated") != std::string::npos);
        CHECK(training.run(1, "--epochs 1 --threads 3")
                  .start.at("device")
                  .get<std::string>()
                  .find("3 threads") != std::string::npos);
    }
    SECTION("the loss of an epoch is the mean over its images") {
        // 53 = 5 * 10 + 3: the last step counts less.
        double sum = 0.0;
        for (std::size_t step = 0; step < 6; ++step) {
            sum += plain.losses.at(step) * (step < 5 ? 10 : 3);
        }
        CHECK(plain.epochs.at(0).at("train_loss").get<double>() == Approx(sum / 53).epsilon(1e-12));
    }
    SECTION("what the ranks exchange") {
        // 6 steps of one message, or of more.
        const auto messages = [&](const std::string& flags) {
            return training.run(2, "--epochs 1 --no-eval --global-batch 10 " + flags);
        };
        CHECK(messages("--bucket-kib 64").reductions == 6);
        CHECK(messages("--bucket-kib 1").reductions > 6);
        CHECK(messages("--bucket-kib 64 --accumulate 3").reductions == 6);
        CHECK(messages("--bucket-kib 64").gatherings == 0);
        std::ofstream(training.file("wide")) << "linear 60\nrelu\nlinear classes\n";
        const auto wide = [&](const std::string& flags) {
            return training.run(2, "--epochs 1 --no-eval --global-batch 10 --model " +
                                       training.file("wide") + flags);
        };
        CHECK(wide(" --factors on").gatherings == 6 * 2);
        CHECK(wide(" --factors off").gatherings == 0);
        for (const auto& [flag, type] : {std::pair{"fp32", DataType::float32},
                                         {"bf16", DataType::bfloat16},
                                         {"fp16", DataType::float16}}) {
            std::set<DataType> types;
            training.run(2, std::string("--epochs 1 --no-eval --comm-dtype ") + flag, {},
                         [&](const ThreadRanks::Sum& sum) {
                             if (sum.rank == 0) {
                                 types.insert(sum.type);
                             }
                         });
            // The loss and the counts travel as they are.
            CHECK(types == std::set{type, DataType::float32});
        }
    }
}

TEST_CASE("settings that an optimiser cannot have are refused, in the names of who set them") {
    const auto backend = make_cpu_backend(1);
    Net net(*backend, parse_model("linear classes\n", "one"), {1, 3, 3}, 2, {1, 0, true});
    const Training training;
    const auto refuse = [&](const OptimizerSpec& spec, const std::string& what,
                            const std::string& flags, const std::string& said) {
        INFO(flags);
        std::string found;
        try {
            Optimizer(*backend, net, spec);
        } catch (const SettingsError& error) {
            found = error.what();
            CHECK(error.code() == ExitCode::usage);
        }
        CHECK(found == what);
        expect_error(ExitCode::usage, {said}, [&] { training.run(1, flags); });
    };
    const std::string nesterov = "nesterov needs rule sgd and momentum greater than 0",
                      momentum = "momentum must be at least 0 and less than 1",
                      nesterov_flag =
                          "--nesterov needs --optimizer sgd and --momentum greater than 0",
                      momentum_flag = "--momentum must be at least 0 and less than 1";
    using Kind = ScheduleKind;
    refuse({.schedule = {.kind = Kind::step}},
           "schedule step needs step_size, after which the rate falls", "--lr-schedule step",
           "--lr-schedule step needs --lr-step-size, after which the rate falls");
    refuse({.schedule = {.gamma = 0.5}}, "step_size and gamma are for schedule step",
           "--lr-gamma 0.5", "--lr-step-size and --lr-gamma are for --lr-schedule step");
    refuse({.schedule = {.kind = Kind::one_cycle, .total_steps = 9, .min_rate = 0.5}},
           "min_rate is for schedule cosine", "--lr-schedule one-cycle --lr-min 0.5",
           "--lr-min is for --lr-schedule cosine");
    refuse({.schedule = {.kind = Kind::one_cycle, .warmup_steps = 1, .total_steps = 9}},
           "schedule one-cycle has its own warm-up: it goes without warmup_steps",
           "--lr-schedule one-cycle --warmup-epochs 1",
           "it goes without --warmup-steps and --warmup-epochs");
    refuse({.momentum = 0.0f, .nesterov = true}, nesterov, "--nesterov --momentum 0",
           nesterov_flag);
    refuse({.rule = UpdateRule::adam, .nesterov = true}, nesterov, "--nesterov --optimizer adam",
           nesterov_flag);
    refuse({.momentum = 1.0f}, momentum, "--momentum 1", momentum_flag);
    refuse({.momentum = std::nanf("")}, momentum, "--momentum 1.5", momentum_flag);
}

TEST_CASE("an evaluation counts every image once, whatever the ranks and the size of its passes") {
    const Training training;
    const std::string weights = training.file("weights");
    const auto trained = training.run(1, "--epochs 1 --batch-size 10 --lr 0.005 --save " + weights);
    const double loss = trained.epochs.at(0).at("test_loss");
    const double accuracy = trained.epochs.at(0).at("test_accuracy");
    REQUIRE((accuracy > 0.2 && accuracy < 1.0));  // the images do not all count alike
    for (const int ranks : {1, 2, 3}) {
        for (const int batch : {1, 5, 16, 17, 36, 37, 1000}) {
            INFO(ranks << " ranks, passes of " << batch);
            const std::string flag = " --test-batch-size " + std::to_string(batch);
            // At rate 0 the weights stay.
            const auto result =
                training.run(ranks, "--epochs 1 --lr 0 --init " + weights + flag).epochs.at(0);
            CHECK(result.at("test_accuracy") == accuracy);
            CHECK(result.at("test_loss").get<double>() == Approx(loss).epsilon(1e-6));
            // gyre eval says the counts.
            ThreadRanks job(ranks);
            const std::string output = printed([&] {
                job.run([&](Communicator& comm) {
                    CLI::App app;
                    EvalOptions options;
                    add_eval_flags(app, options);
                    app.parse("--threads 1 --data " + training.data() + " --weights " + weights +
                              flag);
                    run_eval(comm, options);
                });
            });
            char counts[64];
            std::snprintf(counts, sizeof counts, "(%.0f/%d)", accuracy * Training::kTestImages,
                          Training::kTestImages);
            INFO(output);
            CHECK(output.find(counts) != std::string::npos);
        }
    }
}

TEST_CASE("all ranks start from rank 0's weights, wherever it has them from") {
    const Training training;
    // Without ReLU: no rounding can flip a choice.
    std::ofstream(training.file("smooth")) << "conv 6 k3\ndropout 0.5\nlinear 20\nlinear classes\n";
    const std::string model = " --model " + training.file("smooth") + " ";
    const std::string weights = training.file("weights");
    training.run(1, model + "--epochs 2 --lr 0.1 --save " + weights);
    const std::string flags = model + "--epochs 1 --global-batch 10 --check-sync 1 ";
    const auto fresh = training.run(1, flags);
    const auto resumed = training.run(1, flags + "--init " + weights);
    REQUIRE(resumed.losses != fresh.losses);
    const auto close = [](const std::vector<double>& a, const std::vector<double>& b) {
        REQUIRE(a.size() == b.size());
        for (std::size_t i = 0; i < a.size(); ++i) {
            CHECK(a[i] == Approx(b[i]).epsilon(1e-5));
        }
    };
    close(training.run(3, flags).losses, fresh.losses);
    close(training.run(3, flags + "--init " + weights).losses, resumed.losses);
    // The same seed hides a rank that drew its own.
    for (const int has_them : {0, 1}) {
        const auto result = training.run(3, flags, [&](int rank) {
            return rank == has_them ? "--init " + weights : std::string();
        });
        close(result.losses, has_them == 0 ? resumed.losses : fresh.losses);
    }
}

TEST_CASE("ranks that would train something else are refused") {
    Training training;
    std::ofstream(training.file("other"))
        << "conv 6 k3\nrelu\ndropout 0.25\nlinear 20\nrelu\nlinear classes\n";
    const auto refuse = [&](const std::string& what, const std::string& flags) {
        INFO(flags);
        expect_error(ExitCode::communication, {what + " differs", "rank 1"}, [&] {
            training.run(2, "--epochs 1",
                         [&](int rank) { return rank == 1 ? flags : std::string(); });
        });
    };
    refuse("flag --seed", "--seed 2");
    refuse("flag --lr", "--lr 0.5");
    refuse("flag --no-dropout", "--no-dropout");
    // What equal flags may lead to.
    training.compare_flags = false;
    refuse("the model", "--no-eval --model " + training.file("other"));
    refuse("the bucket layout", "--bucket-kib 1");
}

TEST_CASE("--check-sync finds ranks that have drifted apart at its next comparison") {
    const Training training;
    // 6 steps an epoch, one reduction each; the fifth arrives spoilt on rank 1.
    const auto run = [&](const std::string& flag) {
        training.run(2, "--epochs 2 --global-batch 10 --bucket-kib 64 " + flag, {},
                     [](const ThreadRanks::Sum& sum) {
                         if (sum.rank == 1 && sum.number == 4) {
                             static_cast<float*>(sum.data)[0] += 1.0f;
                         }
                     });
    };
    run("");  // nobody looks
    for (const auto& [interval, when] : {std::pair{1, "epoch 1, step 5"},
                                         {2, "epoch 1, step 6"},
                                         {4, "epoch 2, step 2"},
                                         {12, "epoch 2, step 6"}}) {
        INFO(interval);
        expect_error(ExitCode::communication, {when, "conv1.weight", "on rank 1"},
                     [&] { run("--check-sync " + std::to_string(interval)); });
    }
    run("--check-sync 13");
}

TEST_CASE("--save keeps the weights of the best epoch") {
    const Training training;
    const auto backend = make_cpu_backend(1);
    const Net net(*backend, load_model(training.model()), {1, 6, 6}, Training::kClasses,
                  {1, 0, true});
    const auto bias = static_cast<std::size_t>(net.parameters().back().offset_elems);
    const std::string weights = training.file("weights");
    // From the third epoch on, of 6 steps each, every image is taken for the first class.
    const auto result =
        training.run(2, "--epochs 4 --global-batch 10 --lr 0.05 --bucket-kib 64 --save " + weights,
                     {}, [&](const ThreadRanks::Sum& sum) {
                         if (sum.number >= 12) {
                             static_cast<float*>(sum.data)[bias] = -1e6f;
                         }
                     });
    const auto accuracy = [&](std::size_t epoch) {
        return result.epochs.at(epoch).at("test_accuracy").get<double>();
    };
    const double best = std::max(accuracy(0), accuracy(1));
    REQUIRE(accuracy(2) < best);
    REQUIRE(accuracy(3) < best);
    CHECK(result.end.at("best_test_accuracy") == best);
    const auto kept = training.run(1, "--epochs 1 --lr 0 --init " + weights);
    CHECK(kept.epochs.at(0).at("test_accuracy") == best);
}

TEST_CASE("images reach the net as (pixel / 255 - mean) / std") {
    for (const bool emulated : {false, true}) {
        const auto backend = emulated ? make_emulated_backend({}) : make_cpu_backend(1);
        ImageSet set;
        set.count = 2;
        set.channels = 2;
        set.height = 1;
        set.width = 3;
        set.pixels = {0, 255, 51, 0, 255, 102, 1, 2, 3, 4, 5, 6};
        set.labels = {3, 1};
        const std::vector<std::uint8_t> pixels = set.pixels;
        const Normalisation normalisation{{0.25f, 0.5f}, {0.5f, 0.125f}};
        const DeviceImages images(*backend, std::move(set), normalisation);
        const Shape shape{2, 1, 3};
        const DeviceBuffer<float> x(*backend, backend->activation_elems(shape, 2));
        const DeviceBuffer<std::int32_t> labels(*backend, 2);
        images.gather(images.samples(0), 2, x.get(), labels.get());
        std::vector<float> found(12);
        std::vector<std::int32_t> found_labels(2);
        backend->export_activation(shape, 2, x.get(), found.data());
        backend->download(found_labels.data(), labels.get(), labels.bytes());
        CHECK(found_labels == std::vector<std::int32_t>{3, 1});
        for (std::size_t i = 0; i < pixels.size(); ++i) {
            const std::size_t channel = i / 3 % 2;
            const double expected = (pixels[i] / 255.0 - double{normalisation.mean[channel]}) /
                                    double{normalisation.stddev[channel]};
            // Values up to 4, and three roundings.
            CHECK(std::abs(double{found[i]} - expected) <= 4 * 3 * 0x1p-24);
        }
    }
}

TEST_CASE("the hash of a data set depends on all that training depends on") {
    Dataset set;
    for (ImageSet* images : {&set.train, &set.test}) {
        images->count = 2;
        images->channels = 1;
        images->height = 3;
        images->width = 4;
        images->pixels.resize(24);
        images->labels.resize(2);
    }
    std::set<std::string> hashes = {hash_dataset(set)};
    std::size_t changes = 1;
    const auto changed = [&](auto change) {
        Dataset other = set;
        change(other);
        hashes.insert(hash_dataset(other));
        ++changes;
    };
    for (ImageSet Dataset::*part : {&Dataset::train, &Dataset::test}) {
        for (std::size_t i = 0; i < 24; ++i) {
            changed([&](Dataset& d) { (d.*part).pixels[i] = 1; });
        }
        for (std::size_t i = 0; i < 2; ++i) {
            changed([&](Dataset& d) { (d.*part).labels[i] = 1; });
        }
        changed([&](Dataset& d) { std::swap((d.*part).height, (d.*part).width); });
    }
    CHECK(hashes.size() == changes);
}

TEST_CASE("--tune-buckets takes the buckets that were fastest") {
    const Training training;
    std::ofstream(training.file("wide")) << "linear 600\nrelu\nlinear classes\n";
    // Every reduction costs a millisecond more, so the fewest are the fastest.
    const auto result = training.run(
        2, "--epochs 1 --limit 20 --no-eval --tune-buckets -v --model " + training.file("wide"), {},
        [](const ThreadRanks::Sum&) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
    INFO(result.output);
    CHECK(count_of(result.output, "--tune-buckets:") > 1);
    const auto taken = result.output.find("(taken)");
    REQUIRE(taken != std::string::npos);
    const auto line = result.output.rfind('\n', taken) + 1;
    CHECK(result.output.substr(line, taken - line).find(" 1 bucket ") != std::string::npos);
}

TEST_CASE("--tune-buckets leaves no trace in the training, whatever it ran into") {
    const Training training;
    // One step, which is fine; 26 of them diverge. Clipped, also the padding between the parameters
    // becomes NaN.
    for (const char* rule : {"", " --max-grad-norm 1"}) {
        const std::string flags = std::string("--epochs 1 --limit 20 --global-batch 20 --lr 1e30") +
                                  " --momentum 0.9 --bucket-kib 64 --no-eval" + rule;
        INFO(flags);
        const auto expected = training.run(2, flags);
        REQUIRE(expected.losses.size() == 1);
        std::string tuned = flags;
        tuned.replace(tuned.find("--bucket-kib 64"), 15, "--tune-buckets");
        const auto found = training.run(2, tuned);
        CHECK(found.output.find("(taken)") != std::string::npos);
        CHECK(found.losses == expected.losses);
    }
    // And over more steps than tuning takes, with what an optimiser keeps.
    for (const char* rule : {"--momentum 0.9", "--optimizer adam"}) {
        const std::string flags = std::string("--epochs 6 --global-batch 10 --no-eval ") + rule;
        const auto expected = training.run(2, flags + " --bucket-kib 64");
        CHECK(expected.losses.size() == 36);
        CHECK(training.run(2, flags + " --tune-buckets").losses == expected.losses);
    }
    // Nor in the statistics that an evaluation takes, which are no parameters.
    std::ofstream(training.file("normed")) << "conv 6 k3\nbatchnorm\nrelu\nlinear classes\n";
    const std::string flags = "--epochs 1 --global-batch 10 --model " + training.file("normed");
    const auto expected = training.run(2, flags + " --bucket-kib 64");
    const auto found = training.run(2, flags + " --tune-buckets");
    CHECK(found.losses == expected.losses);
    CHECK(found.epochs.at(0).at("test_loss") == expected.epochs.at(0).at("test_loss"));
}
