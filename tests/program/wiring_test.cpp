// From a setting to what it does: what a training says, evaluates, keeps, compares between its
// ranks, and feeds the net with. The trainings run in this process, their ranks as threads.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <set>
#include <thread>

#include "kernels/make_backend.hpp"
#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"
#include "train/evaluator.hpp"
#include "train/hash.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

// The sections of "every flag of a training changes what it says".

void check_amounts(const Training& training) {
    const auto first = [&](const std::string& flags, int ranks = 1) {
        return training.run(ranks, "--epochs 1 " + flags).start;
    };
    CHECK(first("--limit 23").at("train_images") == 23);
    const auto settings = first("--limit 23 --no-shuffle").at("settings");
    CHECK(settings.at("limit") == "23");
    CHECK(settings.at("no-shuffle") == "true");
    CHECK(!settings.contains("seed"));  // it has its default
    CHECK(first("--limit 23 --batch-size 10").at("steps_per_epoch") == 3);
    CHECK(first("--classes 9").at("classes") == 9);
    CHECK(first("--batch-size 5", 3).at("global_batch") == 15);
    CHECK(first("--batch-size 5 --accumulate 2", 3).at("global_batch") == 30);
    CHECK(first("--global-batch 20", 3).at("global_batch") == 20);
    CHECK(first("--global-batch 20", 3).at("batch_size") == 7);
    CHECK(first("").at("global_batch") == 64);
}

void check_losses(const Training& training, const Training::Result& plain) {
    // Each of these flags changes something that the loss shows, at the latest in epoch 2.
    for (const char* flags : {"--seed 2",
                              "--lr 0.02",
                              "--momentum 0.6",
                              "--weight-decay 0.5",
                              "--weight-decay 0.5 --weight-decay-scale conv*=0.5",
                              "--nesterov",
                              "--max-grad-norm 0.01",
                              "--optimizer adam",
                              "--optimizer adamw",
                              "--no-shuffle",
                              "--no-dropout",
                              "--mean 0.1 --std 0.5",
                              "--accumulate 2",
                              "--limit 50",
                              "--warmup-steps 3",
                              "--warmup-epochs 1",
                              "--lr-schedule cosine",
                              "--lr-schedule cosine --lr-min 0.005",
                              "--lr-schedule one-cycle",
                              "--lr-schedule step --lr-step-size 1",
                              "--augment hflip",
                              "--augment altflip",
                              "--weight-init dirac",
                              "--init-scale fc*=0.5",
                              "--whiten conv1",
                              "--augment shift1",
                              "--augment crop1",
                              "--augment cutout2",
                              "--augment randomresizedcrop50",
                              "--augment randomerasing100",
                              "--augment mixup1",
                              "--augment cutmix1",
                              "--augment rotate30"}) {
        INFO(flags);
        const auto other = training.run(1, std::string("--epochs 2 --batch-size 10 ") + flags);
        CHECK(other.epochs.at(1).at("train_loss") != plain.epochs.at(1).at("train_loss"));
    }
}

void check_order_and_dropout(const Training& training) {
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
    CHECK(!epochs_are_alike("--no-shuffle --no-dropout --augment shift1"));
    // Test images stay as they are; for the passes of a step, too, an image has one draw.
    const auto augmented = [&](const std::string& flags) {
        return training.run(1, "--lr 0 --epochs 1 --no-dropout --global-batch 10 " + flags);
    };
    const auto twice = augmented("--augment crop2,hflip"), plain = augmented("");
    CHECK(twice.epochs.at(0).at("test_loss") == plain.epochs.at(0).at("test_loss"));
    CHECK(twice.epochs.at(0).at("train_loss") != plain.epochs.at(0).at("train_loss"));
    const auto mirrored = augmented("--tta hflip");
    CHECK(mirrored.epochs.at(0).at("test_loss") != plain.epochs.at(0).at("test_loss"));
    CHECK(mirrored.epochs.at(0).at("train_loss") == plain.epochs.at(0).at("train_loss"));
    const auto parts = augmented("--augment crop2,hflip --accumulate 2");
    CHECK(std::abs(parts.losses.at(0) - twice.losses.at(0)) < 1e-5);
    // On a GPU a small net's whole pass would gather images as they are.
    const auto emulated = augmented(
        "--augment randomresizedcrop9,crop2,hflip --limit 20 --no-eval --device emulated");
    const auto on_cpu = augmented("--augment randomresizedcrop9,crop2,hflip --limit 20 --no-eval");
    for (const std::size_t step : {0, 1}) {
        CHECK(std::abs(emulated.losses.at(step) - on_cpu.losses.at(step)) < 1e-5);
        CHECK(std::abs(emulated.losses.at(step) - plain.losses.at(step)) > 1e-4);
    }
    // Both follow the seed, also where the weights do not.
    const std::string run = training.file("run"), weights = run + "/best.safetensors";
    training.run(1, "--epochs 1 --save " + run);
    for (const std::string flags : {"--no-dropout", "--no-shuffle"}) {
        INFO(flags);
        const std::string all = flags + " --init " + weights;
        CHECK(losses(all + " --seed 3") != losses(all + " --seed 4"));
        CHECK(losses(all + " --seed 3") == losses(all + " --seed 3"));
    }
}

void check_report(const Training& training, const Training::Result& plain) {
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

void check_messages(const Training& training) {
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
        return training.run(
            2, "--epochs 1 --no-eval --global-batch 10 --model " + training.file("wide") + flags);
    };
    CHECK(wide(" --factors on --virtual-ranks 0").gatherings == 6 * 2);
    CHECK(wide(" --factors off").gatherings == 0);
    CHECK(wide(" --factors off --shard-optimizer off").gatherings == 0);
    // The model's 20 KiB in one bucket: its parameters, and what was not finite.
    std::ofstream(training.file("wide")) << "linear 100\nrelu\nlinear classes\n";
    CHECK(wide(" --factors off --shard-optimizer on").gatherings == 6 * 2);
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

}  // namespace

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
        check_amounts(training);
    }
    SECTION("the losses") {
        check_losses(training, plain);
    }
    SECTION("order and dropout") {
        check_order_and_dropout(training);
    }
    SECTION("the report") {
        check_report(training, plain);
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
        check_messages(training);
    }
}

TEST_CASE("an evaluation counts every image once, whatever the ranks and the size of its passes") {
    const Training training;
    const std::string run = training.file("run"), weights = run + "/best.safetensors";
    const auto trained = training.run(1, "--epochs 1 --batch-size 10 --lr 0.005 --save " + run);
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
                    add_flags(app, eval_flags(options));
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
    const std::string run = training.file("run"), weights = run + "/best.safetensors";
    training.run(1, model + "--epochs 2 --lr 0.1 --save " + run);
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
    // Differences that equal flags may lead to.
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

TEST_CASE("--whiten gives a first convolution whitening filters, which --freeze keeps") {
    const Training training;
    const std::string run = training.file("run");
    training.run(2, "--epochs 1 --whiten conv1 --freeze conv1.weight --save " + run);
    const TensorFile saved = read_safetensors(run + "/last.safetensors");
    const auto found = std::ranges::find(saved.tensors, "conv1.weight", &HostTensor::name);
    REQUIRE(found != saved.tensors.end());
    const std::vector<float>& filters = found->values;
    REQUIRE(filters.size() == 6 * 9);
    for (std::size_t i = 0; i < 3 * 9; ++i) {
        CHECK(filters[i] != 0.0f);
        CHECK(filters[i] == -filters[3 * 9 + i]);
    }
    const auto refuse = [&](const std::string& layer, const std::string& why) {
        expect_error(ExitCode::usage, {"`whiten` " + layer, why},
                     [&] { training.run(2, "--epochs 1 --whiten " + layer); });
    };
    refuse("fc1", "no such convolution that reads the images, with 1 channel");
    refuse("conv2", "no such convolution");
    // Of as many channels as the images have, but not over the images.
    std::ofstream(training.model()) << "conv 1 k3\nconv 6 k3\nlinear classes\n";
    refuse("conv2", "no such convolution");
    std::ofstream(training.model()) << "conv 19 k3\nlinear classes\n";
    refuse("conv1", "18 whitening filters, but the convolution has 19");
    std::ofstream(training.model()) << "conv 2 k7 p1\nlinear classes\n";
    refuse("conv1", "larger than the images");
}

TEST_CASE("--init-scale scales what parameters begin as") {
    const Training training;
    const std::string run = training.file("run");
    const auto begun = [&](const std::string& flags) {
        training.run(2, "--epochs 1 --freeze conv1.* --overwrite --save " + run + " " + flags);
        const TensorFile saved = read_safetensors(run + "/last.safetensors");
        const auto values = [&](const char* name) {
            const auto found = std::ranges::find(saved.tensors, name, &HostTensor::name);
            REQUIRE(found != saved.tensors.end());
            return found->values;
        };
        return std::pair{values("conv1.weight"), values("conv1.bias")};
    };
    const auto [weight, bias] = begun("");
    const auto [half, zeros] = begun("--init-scale conv1.*=0,*.weight=0.5");
    CHECK(std::ranges::count(zeros, 0.0f) == static_cast<std::ptrdiff_t>(bias.size()));
    REQUIRE(half.size() == weight.size());
    for (std::size_t i = 0; i < weight.size(); ++i) {
        CHECK(weight[i] != 0.0f);
        CHECK(half[i] == 0.5f * weight[i]);
    }
    expect_error(ExitCode::usage, {"`init-scale`: fc9* matches none", "conv1.weight"},
                 [&] { training.run(2, "--epochs 1 --init-scale fc9*=1"); });
    expect_error(ExitCode::usage, {"`init-scale` fc1", "must be a pattern and a number"},
                 [&] { training.run(2, "--epochs 1 --init-scale fc1"); });
}

TEST_CASE("--save keeps the weights of the best epoch") {
    const Training training;
    const auto backend = make_cpu_backend(1);
    const Net net(*backend, load_model(training.model()), {1, 6, 6}, Training::kClasses, {1, 0});
    const auto bias = static_cast<std::size_t>(net.parameters().back().offset_elems);
    const std::string run = training.file("run"), weights = run + "/best.safetensors";
    // From the third epoch on, of 6 steps each, every image is taken for the first class.
    const auto result =
        training.run(2, "--epochs 4 --global-batch 10 --lr 0.05 --bucket-kib 64 --save " + run, {},
                     [&](const ThreadRanks::Sum& sum) {
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
        set.pixels = std::vector<std::uint8_t>{0, 255, 51, 0, 255, 102, 1, 2, 3, 4, 5, 6};
        set.labels = {3, 1};
        const Pixels pixels = set.pixels;
        const Normalisation normalisation{{0.25f, 0.5f}, {0.5f, 0.125f}};
        const DeviceImages images(*backend, std::move(set), normalisation);
        const Shape shape{2, 1, 3};
        const DeviceBuffer<float> x(*backend, backend->activation_elems(shape, 2));
        const DeviceBuffer<std::int32_t> labels(*backend, 2);
        DeviceBuffer<std::int32_t> samples(*backend, 2);
        const std::int32_t both[] = {0, 1};
        backend->upload(samples.get(), both, sizeof both);
        images.gather(samples.get(), 2, x.get(), labels.get());
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
    // Each reduction takes 10 ms more, as much as a step's noise on a busy machine: six take 60 ms.
    const auto result = training.run(
        2, "--epochs 1 --limit 20 --no-eval --tune-buckets -v --model " + training.file("wide"), {},
        [](const ThreadRanks::Sum&) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        });
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
