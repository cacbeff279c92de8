// Trains a small net on two ranks with gyre as a library, and saves it:
//     mpirun -np 2 two_ranks fashion-mnist checkpoints
// Each rank is a process; `gyre eval --weights checkpoints/best.safetensors` reads what it saves.
#include <cstdio>
#include <exception>
#include <utility>

#include "comm/communicator.hpp"
#include "data/dataset.hpp"
#include "kernels/make_backend.hpp"
#include "train/checkpoint_files.hpp"
#include "train/fit.hpp"
#include "train/settings.hpp"

using namespace gyre;

// Prints a line after each epoch.
struct Lines final : train::FitObserver {
    void on_epoch(const train::Training& training, const train::EpochFacts& epoch) override {
        if (training.session.communicator().is_root()) {
            std::printf("epoch %d: train loss %.3f, test accuracy %.2f %%\n", epoch.epoch,
                        epoch.train_loss, 100.0 * epoch.evaluation.accuracy);
        }
    }
};

int main(int argc, char** argv) try {
    train::RunSpec run;
    run.data.path = argc > 1 ? argv[1] : "fashion-mnist";
    run.checkpoints.save = argc > 2 ? argv[2] : "";
    run.checkpoints.overwrite = true;
    run.data.limit = 6000;  // training images
    run.stop.epochs = 2;
    run.optimizer.rule = train::UpdateRule::adam;

    const auto comm = comm::make_communicator();  // of the ranks that mpirun has started
    const auto backend = make_cpu_backend(1);
    data::Dataset data = data::load_dataset(run.data);
    train::WeightFacts facts{
        .model = model::parse_model("conv 8 k3\nrelu\nmaxpool 2\nlinear classes\n", "mine"),
        .normalisation = data::measure_normalisation(data.train),
        .classes = data.classes};

    train::Session session(
        *comm, *backend, run,
        {.model = facts.model, .classes = data.classes, .eval_images = {data.test.count}},
        std::move(data.train), facts.normalisation);
    session.initialise();
    const train::DeviceImages test(*backend, std::move(data.test), facts.normalisation);

    const train::Identity identity{train::values_to_resume(run), {}};
    train::CheckpointFiles checkpoints(run, facts, identity, comm->is_root());
    Lines lines;
    train::Training training{.session = session, .run = run, .evaluated = {"test", &test}};
    train::fit(training, {&lines, &checkpoints});
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "two_ranks: %s\n", error.what());
    return 1;
}
