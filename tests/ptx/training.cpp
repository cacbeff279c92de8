#include "tests/ptx/training.hpp"

#include <cmath>
#include <stdexcept>

#include "kernels/make_backend.hpp"
#include "tests/support/thread_ranks.hpp"
#include "train/session.hpp"

namespace gyre::test {
namespace {

constexpr int kClasses = 10, kEvaluated = 2;

void train_rank(Communicator& comm, const model::ModelSpec& model, const Shape& image,
                Precision precision, int images, int steps, int accumulate) {
    GpuOptions options;
    options.tf32 = precision != Precision::fp32;  // as the command line has it
    const auto backend = make_emulated_backend(options);
    const data::Normalisation normalisation{{0.5f}, {0.3f}};
    train::RunSpec run{.net = {.precision = precision},
                       .batch = {.global_batch = images, .accumulate = accumulate},
                       .evaluation = {.batch_size = kEvaluated}};
    if (precision == Precision::fp16) {
        run.optimizer.loss_scaling = LossScaling{};
    }
    train::Session session(comm, *backend, run,
                           {.model = model, .classes = kClasses, .eval_images = {kEvaluated}},
                           train::random_images(images * steps, image, kClasses), normalisation);
    session.initialise();
    session.trainer().begin_epoch(1);
    bool finite = true;
    for (int step = 0; step < steps; ++step) {
        if (const auto done = session.trainer().step(step, false)) {
            finite = finite && std::isfinite(done->loss);
        }
    }
    while (const auto done = session.trainer().next_result()) {
        finite = finite && std::isfinite(done->loss);
    }
    const train::DeviceImages test(*backend, train::random_images(kEvaluated, image, kClasses),
                                   normalisation);
    finite = finite && std::isfinite(session.evaluate(test).loss);
    if (!finite) {
        throw std::runtime_error("a loss is not finite");
    }
}

}  // namespace

void train_emulated(const model::ModelSpec& model, const Shape& image, Precision precision,
                    int images, int steps, int accumulate) {
    ThreadRanks(1).run([&](Communicator& comm) {
        train_rank(comm, model, image, precision, images, steps, accumulate);
    });
}

}  // namespace gyre::test
