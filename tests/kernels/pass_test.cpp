// A whole training pass as one operation of the emulated GPU: its results, and that it takes two
// launches whose results depend only on the number of images.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/emulation/emulator.hpp"
#include "tests/model/bounded_net.hpp"
#include "tests/support/backends.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "train/session.hpp"

using namespace gyre;
using namespace gyre::model;
using namespace gyre::train;
using gyre::test::Bounded;
using gyre::test::BoundedNet;
using gyre::test::check_within;
namespace emulator = simt::emulator;

namespace {

constexpr int kSetImages = 97;

// The images of a data set, some of which form a batch; their values are exact in float32.
struct Images {
    Images(Backend& backend, const Shape& shape_, int classes)
        : shape(shape_),
          set(random_images(kSetImages, shape, classes)),
          pixels(set.pixels),
          labels(set.labels),
          device(backend, ImageSet(set),
                 {std::vector<float>(static_cast<std::size_t>(shape.channels), 0.5f),
                  std::vector<float>(static_cast<std::size_t>(shape.channels), 0.25f)}) {}

    static std::vector<std::int32_t> samples(int n) {
        std::vector<std::int32_t> which;
        for (int i = 0; i < n; ++i) {
            which.push_back((i * 31 + 5) % kSetImages);
        }
        return which;
    }
    // In the form that the tests' reference takes.
    BoundedNet::Images batch(int n, std::uint64_t seed) const {
        BoundedNet::Images images{
            .n = n, .x = {}, .labels = {}, .samples = samples(n), .seed = seed};
        const auto elems = static_cast<std::size_t>(shape.elems());
        for (const std::int32_t sample : images.samples) {
            const auto at = static_cast<std::size_t>(sample);
            for (std::size_t i = 0; i < elems; ++i) {
                images.x.push_back(
                    std::fma(float(pixels[at * elems + i]), 1.0f / (255.0f * 0.25f), -2.0f));
            }
            images.labels.push_back(labels[at]);
        }
        return images;
    }

    const Shape shape;
    const ImageSet set;
    const data::Pixels pixels;
    const std::vector<std::int32_t> labels;
    const DeviceImages device;
};

struct Result {
    std::vector<float> gradients;
    StepStats stats;
};

std::unique_ptr<TrainingPass> fused_pass(Backend& backend, const Net& net) {
    return net.fusable_layers() ? backend.make_pass(*net.fusable_layers()) : nullptr;
}

// Runs a training pass as one operation, or operation by operation.
Result run_pass(Backend& backend, Net& net, const Images& images, int n, bool whole,
                const UpdateArgs* update = nullptr) {
    const DeviceBuffer<std::int32_t> samples(backend, std::max(n, 1));
    const auto indices = Images::samples(n);
    backend.upload(samples.get(), indices.data(), indices.size() * sizeof(std::int32_t));
    const StepProgram program(backend, net, images.device, {}, whole);
    REQUIRE(program.fused() == whole);
    std::int64_t updated = 0;
    const auto add_updated = [&](std::int64_t begin, std::int64_t end) { updated += end - begin; };
    program.run({.batch = {.n = n, .training = true, .samples = samples.get(), .seed = 5},
                 .samples = samples.get(),
                 .scale = 1.0f / static_cast<float>(std::max(n, 1)),
                 .hooks = {.update = update, .updated = add_updated}});
    CHECK(updated == (update == nullptr ? 0 : net.flat_elems()));
    Result result;
    std::vector<float> all(static_cast<std::size_t>(net.gradient_elems()));
    backend.download(all.data(), net.gradient_data(), all.size() * sizeof(float));
    backend.download(&result.stats, net.stats(), sizeof result.stats);
    all.resize(static_cast<std::size_t>(net.flat_elems()));
    result.gradients = all;
    return result;
}

std::vector<float> flat(Backend& backend, const float* from, const Net& net) {
    std::vector<float> values(static_cast<std::size_t>(net.flat_elems()));
    backend.download(values.data(), from, values.size() * sizeof(float));
    return values;
}

struct Case {
    const char* model;
    Shape input;
    int classes;
};
// Every kind of step, by itself and fused, with and without padding; windows that overlap or leave
// elements over; extents that are not multiples of anything.
const Case kCases[] = {
    {"linear classes\n", {1, 3, 5}, 5},
    {"linear 12\nrelu\nlinear classes\n", {2, 4, 4}, 3},
    {"conv 5 k1\nmaxpool 3 s2\nconv 7 k3 p1\nrelu\nlinear classes\n", {2, 9, 11}, 5},
    {"conv 4 k5 p2\nrelu\nconv 6 k3\ndropout2d 0.5\nmaxpool 2\nrelu\nlinear 12\nrelu\n"
     "dropout 0.5\nlinear classes\n",
     {2, 9, 11},
     5},
    {"conv 9 k3 p2\ndropout 0.25\nmaxpool 2\nmaxpool 2 s1\nrelu\nlinear 8\ndropout 0.5\nrelu\n"
     "linear classes\n",
     {1, 7, 6},
     33},
    {"conv 3 k3\nmaxpool 2\ndropout2d 0.5\nconv 5 k1 \nrelu\nlinear classes\n", {3, 10, 9}, 4},
    {"conv 3 k1\nconv 4 k5 p2\nmaxpool 2\nrelu\nlinear classes\n", {1, 13, 21}, 5},
    {"conv 2 k3 p1\nrelu\nconv 5 k3 p2\nmaxpool 2\nconv 3 k1\nmaxpool 2\nlinear classes\n",
     {2, 6, 10},
     6},
    {"conv 9 k1\nrelu\nconv 7 k3 p1\nmaxpool 2\nrelu\nlinear classes\n", {1, 7, 11}, 5},
    {"conv 11 k1\nconv 6 k5\ndropout2d 0.5\nmaxpool 2\nlinear classes\n", {1, 13, 22}, 5},
    {"dropout 0.5\nconv 2 k5 p4\nmaxpool 2 s3\nlinear 9\nlinear classes\n", {1, 4, 9}, 7},
};

}  // namespace

TEST_CASE("a pass as one operation: loss and gradients match double precision", "[pass]") {
    const int n = 2;
    for (const Case& c : kCases) {
        INFO(c.model);
        const ModelSpec model = parse_model(c.model, "mine");
        const Graph graph = build_graph(model, c.input, c.classes, true);
        for (const std::uint64_t schedule : {0, 1, 2}) {
            emulator::set_schedule(schedule);
            const auto backend = make_emulated_backend({});
            const Images images(*backend, c.input, c.classes);
            Net net(*backend, model, c.input, c.classes, {.train_batch = n + 1, .eval_batch = 1});
            // Find weights for which rounding cannot change a choice.
            for (std::uint64_t seed = 1;; ++seed) {
                REQUIRE(seed < 20);
                net.initialise(seed);
                const auto batch = images.batch(n, 5);
                const BoundedNet expected(graph, net.export_parameters(), batch);
                if (expected.undecided > 0) {
                    continue;
                }
                const Result found = run_pass(*backend, net, images, n, true);
                check_within({found.stats.loss}, {expected.loss});
                for (const Parameter& p : net.parameters()) {
                    INFO(p.name << ", schedule " << schedule);
                    const auto begin = found.gradients.begin() + p.offset_elems;
                    check_within({begin, begin + p.elems}, expected.gradients.at(p.name));
                }
                break;
            }
        }
        emulator::set_schedule(0);
    }
}

TEST_CASE("a pass as one operation equals its operations for any number of images", "[pass]") {
    for (const Case& c : kCases) {
        INFO(c.model);
        const auto backend = make_emulated_backend({});
        const Images images(*backend, c.input, c.classes);
        Net net(*backend, parse_model(c.model, "mine"), c.input, c.classes,
                {.train_batch = 67, .eval_batch = 1});
        net.initialise(3);
        for (const int n : {1, 3, 64, 67, 0}) {
            INFO("n = " << n);
            const Result parts = run_pass(*backend, net, images, n, false);
            // Gradients left by the separate operations must be overwritten, except for padding.
            std::vector<float> poison(static_cast<std::size_t>(net.flat_elems()), 0.0f);
            for (const Parameter& p : net.parameters()) {
                std::fill_n(poison.begin() + p.offset_elems, p.elems, NAN);
            }
            backend->upload(net.gradient_data(), poison.data(), poison.size() * sizeof(float));
            const Result whole = run_pass(*backend, net, images, n, true);
            CHECK(whole.stats.loss == Approx(parts.stats.loss).epsilon(1e-5));
            CHECK(whole.stats.correct == parts.stats.correct);
            CHECK(whole.stats.stop == 0.0f);
            double difference = 0.0, size = 0.0;
            for (std::size_t i = 0; i < whole.gradients.size(); ++i) {
                const double d = double{whole.gradients[i]} - double{parts.gradients[i]};
                difference += d * d;
                size += double{parts.gradients[i]} * double{parts.gradients[i]};
            }
            CHECK(std::sqrt(difference) <= 1e-5 * std::sqrt(size));
            CHECK((n == 0) == (size == 0.0));
        }
    }
}

TEST_CASE("a pass that updates gives the optimizer's results, bit for bit", "[pass]") {
    const Case& c = kCases[3];
    const auto backend = make_emulated_backend({});
    const Images images(*backend, c.input, c.classes);
    const auto scalars = [&] {
        const StepScalars values{
            .learning_rate = 0.3f, .adam_step_size = 0.1f, .adam_correction = 1.5f, .shrink = 0.9f};
        DeviceBuffer<StepScalars> device(*backend, 1);
        backend->upload(device.get(), &values, sizeof values);
        return device;
    }();
    const UpdateArgs rules[] = {
        {.formula = Formula::sgd, .weight_decay = 0.1f},
        {.formula = Formula::sgd_momentum, .momentum = 0.7f, .weight_decay = 0.1f},
        {.formula = Formula::sgd_momentum, .momentum = 0.7f, .nesterov = true},
        {.formula = Formula::adam, .weight_decay = 0.1f},
        {.formula = Formula::lion},
        {.formula = Formula::rmsprop, .weight_decay = 0.1f}};
    for (UpdateArgs rule : rules) {
        INFO("formula " << static_cast<int>(rule.formula));
        rule.scalars = scalars.get();
        std::vector<std::vector<float>> results[2];
        for (const bool in_pass : {false, true}) {
            Net net(*backend, parse_model(c.model, "mine"), c.input, c.classes,
                    {.train_batch = 9, .eval_batch = 1});
            net.initialise(3);
            const DeviceBuffer<float> first(*backend, net.flat_elems());
            const DeviceBuffer<float> second(*backend, net.flat_elems());
            rule.states[0] = first.get();
            rule.states[1] = second.get();
            for (int step = 0; step < 3; ++step) {
                run_pass(*backend, net, images, 9, true, in_pass ? &rule : nullptr);
                if (!in_pass) {
                    backend->update(rule, net.flat_elems(), net.parameter_data(),
                                    net.gradient_data());
                }
            }
            results[in_pass] = {
                flat(*backend, net.parameter_data(), net), flat(*backend, net.gradient_data(), net),
                flat(*backend, first.get(), net), flat(*backend, second.get(), net)};
        }
        CHECK(results[0] == results[1]);
    }
}

namespace {

struct Trained {
    std::vector<double> losses;
    std::vector<float> parameters;
    std::vector<std::int64_t> launches;  // per step
    bool has_pass = false;
};

// Trains six steps on one rank, the last one with fewer images.
Trained train_net(Backend& backend, const std::string& model, const OptimizerSpec& optimizer,
                  bool pass, int batch, const Shape& shape = {1, 28, 28}) {
    const auto comm = make_single_communicator();
    Session session(*comm, backend,
                    {.seed = 4,
                     .net = {.pass = pass},
                     .batch = {.global_batch = batch},
                     .optimizer = optimizer,
                     .device = {.graph_steps = 1}},
                    {.model = model == "net" ? load_model(model) : parse_model(model, "mine")},
                    random_images(5 * batch + 3, shape, 10), {{0.5f}, {0.3f}});
    session.initialise();
    Trainer& trainer = session.trainer();
    trainer.begin_epoch(1);
    Trained trained;
    trained.has_pass = session.program().fused();
    const auto take = [&](const std::optional<StepResult>& result) {
        if (result) {
            trained.losses.push_back(result->loss);
        }
        return result.has_value();
    };
    for (std::int64_t step = 0; step < session.sharding().steps(); ++step) {
        backend.synchronize();
        const std::int64_t before = emulator::launch_count();
        take(trainer.step(step, false));
        backend.synchronize();
        trained.launches.push_back(emulator::launch_count() - before);
    }
    while (take(trainer.next_result())) {
    }
    trained.parameters = flat(backend, session.net().parameter_data(), session.net());
    return trained;
}

}  // namespace

TEST_CASE("a step of `net` on one rank is two launches for every update rule", "[pass]") {
    for (const UpdateRule rule : {UpdateRule::sgd, UpdateRule::adam, UpdateRule::adamw}) {
        const auto backend = make_emulated_backend({});
        const Trained whole = train_net(*backend, "net", {.rule = rule}, true, 8);
        CHECK(whole.has_pass);
        REQUIRE(whole.losses.size() == 6);
        CHECK(whole.launches == std::vector<std::int64_t>(6, 2));
        const Trained parts = train_net(*backend, "net", {.rule = rule}, false, 8);
        CHECK(!parts.has_pass);
        CHECK(parts.launches.front() > 20);
        for (std::size_t i = 0; i < 6; ++i) {
            CHECK(whole.losses[i] == Approx(parts.losses[i]).epsilon(1e-3));
        }
    }
    const auto backend = make_emulated_backend({});
    // Clipping needs the norm of all gradients first.
    const Trained clipped = train_net(*backend, "net", {.max_grad_norm = 0.1f}, true, 8);
    CHECK(clipped.launches.front() > 2);
    CHECK(clipped.launches.front() < 8);
}

TEST_CASE("a pass as one operation gives the same bits on every GPU and in every order", "[pass]") {
    const char* const model =
        "conv 6 k3\nmaxpool 2\nrelu\nconv 5 k3\nrelu\nlinear 20\nrelu\ndropout 0.5\nlinear 10\n";
    const auto train = [&](int multiprocessors, std::uint64_t schedule, bool pass) {
        emulator::set_multiprocessors(multiprocessors);
        emulator::set_schedule(schedule);
        const auto backend = make_emulated_backend({});
        emulator::set_multiprocessors(4);
        const Trained trained =
            train_net(*backend, model, {.momentum = 0.9f}, pass, 70, {1, 12, 12});
        emulator::set_schedule(0);
        return trained;
    };
    const Trained one = train(4, 0, true);
    CHECK(one.has_pass);
    for (const int multiprocessors : {1, 132}) {
        for (const std::uint64_t schedule : {0, 7}) {
            const Trained other = train(multiprocessors, schedule, true);
            CHECK(other.parameters == one.parameters);
            CHECK(other.losses == one.losses);
        }
    }
    // So do the separate operations.
    CHECK(train(1, 0, false).parameters == train(132, 0, false).parameters);
}

TEST_CASE("a block of the pass takes several images if there are many", "[pass]") {
    const auto backend = make_emulated_backend({});
    for (const char* const model : {"conv 2 k3\nrelu\nlinear classes\n", "linear classes\n",
                                    "conv 17 k1\nrelu\nlinear classes\n"}) {
        INFO(model);
        const Shape input{1, 5, 8};
        const Images images(*backend, input, 3);
        Net net(*backend, parse_model(model, "mine"), input, 3,
                {.train_batch = 600, .eval_batch = 1});
        net.initialise(3);
        const Result parts = run_pass(*backend, net, images, 600, false);
        const Result whole = run_pass(*backend, net, images, 600, true);
        CHECK(whole.stats.loss == Approx(parts.stats.loss).epsilon(1e-5));
        CHECK(whole.stats.correct == parts.stats.correct);
        for (std::size_t i = 0; i < parts.gradients.size(); ++i) {
            CHECK(std::abs(whole.gradients[i] - parts.gradients[i]) < 1e-5f);
        }
    }
}

TEST_CASE("a pass as one operation propagates NaN, and names the gradient that has it", "[pass]") {
    const auto comm = make_single_communicator();
    const auto backend = make_emulated_backend({});
    for (const char* const name : {"conv1.weight", "conv1.bias", "fc1.weight", "fc2.bias"}) {
        INFO(name);
        Session session(*comm, *backend, {.batch = {.global_batch = 4}},
                        {.model = parse_model("conv 3 k3\nmaxpool 2\nrelu\nlinear 7\nrelu\n"
                                              "linear classes\n",
                                              "mine")},
                        random_images(4, {1, 8, 8}, 10), {{0.5f}, {0.3f}});
        session.initialise();
        REQUIRE(session.program().fused());
        for (const Parameter& p : session.net().parameters()) {
            if (p.name == name) {
                const float nan = std::numeric_limits<float>::quiet_NaN();
                backend->upload(session.net().parameter_data() + p.offset_elems, &nan, sizeof nan);
            }
        }
        session.trainer().begin_epoch(1);
        auto result = session.trainer().step(0, false);
        while (!result) {
            result = session.trainer().next_result();
        }
        CHECK(std::isnan(result->loss));
        CHECK(result->not_finite == "fc2.bias");  // the one closest to the loss
    }
}

TEST_CASE("nets that do not fit in a block or are unsupported run operation by operation",
          "[pass]") {
    const auto has_pass = [](Backend& backend, const ModelSpec& model, const Shape& shape) {
        const Net net(backend, model, shape, 10, {.train_batch = 4, .eval_batch = 1});
        return fused_pass(backend, net) != nullptr;
    };
    const auto of_text = [&](const std::string& text) {
        return has_pass(*make_emulated_backend({}), parse_model(text, "mine"), {1, 12, 12});
    };
    GpuOptions tf32;
    tf32.tf32 = true;
    CHECK(has_pass(*make_emulated_backend({}), load_model("net"), {1, 28, 28}));
    CHECK(!has_pass(*make_emulated_backend({}), load_model("wide"), {1, 28, 28}));
    CHECK(!has_pass(*make_emulated_backend({}), load_model("resnet"), {1, 28, 28}));
    CHECK(!has_pass(*make_emulated_backend(tf32), load_model("net"), {1, 28, 28}));
    CHECK(!has_pass(*make_cpu_backend(1), load_model("net"), {1, 28, 28}));
    CHECK(of_text("conv 3 k3\nlinear classes\n"));
    CHECK(!of_text("conv 3 k3 s2\nlinear classes\n"));
    CHECK(!of_text("conv 3 k2\nlinear classes\n"));
    CHECK(!of_text("conv 3 k3\navgpool 2\nlinear classes\n"));
    CHECK(!of_text("conv 3 k3 p1\nas a\nconv 3 k3 p1\nadd a\nlinear classes\n"));
    CHECK(!of_text("conv 400 k5\nlinear classes\n"));
}

// The plan cannot use all of a block's memory: the kernel's variables and the system take a part.
TEST_CASE("a net that barely fits in a block trains like one that does not", "[pass]") {
    const Shape input{1, 28, 28};
    for (const auto& [first, second, fits] :
         {std::tuple{32, 7, false}, {23, 33, false}, {31, 7, true}}) {
        const std::string text = fmt::format(
            "conv {} k5\nmaxpool 2\nrelu\nconv {} k5\nmaxpool 2\nrelu\nlinear classes\n", first,
            second);
        INFO(text);
        const auto backend = make_emulated_backend({});
        const Images images(*backend, input, 10);
        Net net(*backend, parse_model(text, "mine"), input, 10,
                {.train_batch = 2, .eval_batch = 1});
        net.initialise(3);
        CHECK((fused_pass(*backend, net) != nullptr) == fits);
        const Result parts = run_pass(*backend, net, images, 2, false);
        const Result found = run_pass(*backend, net, images, 2, fits);
        CHECK(found.stats.loss == Approx(parts.stats.loss).epsilon(1e-5));
    }
}
