// Trainings have the same bits with AVX2, AVX-512 and Neon: the losses, the weights and the
// optimiser's state have the hashes that stand here. SSE4 has other bits.
#include "kernels/choose_cpu_kernels.hpp"
#include "kernels/make_backend.hpp"
#include "tests/support/bits_hash.hpp"
#include "tests/support/catch.hpp"
#include "train/session.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

struct Training {
    const char* model;
    Shape image;
    RunSpec run;
    std::uint64_t hash;
};

constexpr int kSteps = 2, kClasses = 10;

BitsHash train_with(const CpuKernels& kernels, const Training& training) {
    const auto comm = comm::make_single_communicator();
    const auto backend = make_cpu_backend(kernels, 3);
    RunSpec run = training.run;
    run.batch.global_batch = 37;  // several blocks of images, of which the last is not full
    Session session(*comm, *backend, run,
                    {.model = load_model(training.model), .eval_images = {50}},
                    random_images(37 * kSteps, training.image, kClasses), {{0.5f}, {0.3f}});
    session.initialise();
    session.trainer().begin_epoch(1);
    BitsHash hash;
    const auto account = [&](const std::optional<StepResult>& done) {
        if (done) {
            hash.add({{static_cast<float>(done->loss)}});
        }
        return done.has_value();
    };
    for (int step = 0; step < kSteps; ++step) {
        account(session.trainer().step(step, false));
    }
    while (account(session.trainer().next_result())) {
    }
    const DeviceImages test(*backend, random_images(50, training.image, kClasses),
                            {{0.5f}, {0.3f}});
    hash.add({{static_cast<float>(session.evaluate(test).loss)}});
    for (const auto& tensors :
         {session.net().export_parameters(), session.optimizer().export_state()}) {
        for (const HostTensor& tensor : tensors) {
            hash.add(tensor.values);
        }
    }
    return hash;
}

const Training kTrainings[] = {
    {"net",
     {1, 28, 28},
     {.loss = {.label_smoothing = 0.1f},
      .optimizer = {.rule = UpdateRule::adam, .max_grad_norm = 1.0f}},
     0x7a68f1f7d53e85cc},
    {"net", {1, 28, 28}, {.net = {.precision = Precision::bf16}}, 0x87d4cfad0eb81c93},
    {"wide", {1, 6, 6}, {}, 0x5578958469ad7863},
    {"wide", {1, 6, 6}, {.net = {.precision = Precision::bf16}}, 0x74bd31aa7610cc31},
    {"resnet",
     {1, 8, 8},
     {.batch = {.augment = {.crop = 2, .flip = Flip::random}},
      .optimizer = {.schedule = {.kind = ScheduleKind::one_cycle, .total_steps = kSteps}}},
     0x17b6efd20aba2eed},
    {"resnet", {1, 8, 8}, {.net = {.precision = Precision::bf16}}, 0xc93f676f0836235f},
};

}  // namespace

TEST_CASE("trainings have the same bits with AVX2, AVX-512 and Neon") {
    for (const CpuKernels* set : available_cpu_kernels()) {
        if (set->name == std::string("sse4")) {
            continue;
        }
        for (const Training& training : kTrainings) {
            const std::uint64_t hash = train_with(*set, training).value();
            INFO(training.model << " in " << name_of(training.run.net.precision) << " with "
                                << set->title << std::hex << ": 0x" << hash);
            CHECK(hash == training.hash);
        }
    }
}
