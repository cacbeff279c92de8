// Trainings end with the same bits with AVX2, AVX-512 and Neon, whichever this machine has: the
// weights and the optimizer's states have the hashes that stand here. SSE4 has other bits.
#include "kernels/choose_cpu_kernels.hpp"
#include "model/safetensors.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "train/hash.hpp"

using namespace gyre::test;

TEST_CASE("a training has the same bits with AVX2, AVX-512 and Neon", "[losses]") {
    if (gyre::chosen_cpu_kernels().name == std::string("sse4")) {
        return;
    }
    const struct {
        const char *flags, *hash;
    } kTrainings[] = {
        {"--model net --optimizer adam --max-grad-norm 1 --label-smoothing 0.1", ""},
        {"--model resnet --lr-schedule one-cycle --augment crop2,hflip", ""},
    };
    const TempDir dir;
    make_dataset(dir.path() / "set", 200, 10, 1, 28, 28, 10);
    for (const auto& [flags, hash] : kTrainings) {
        const auto run = dir.path() / "run";
        const Outcome outcome = run_gyre(
            0, std::string("train --device cpu --epochs 2 --batch-size 37 --no-eval ") + "--data " +
                   (dir.path() / "set").string() + " --save " + run.string() + " " + flags);
        INFO(outcome.output);
        REQUIRE(outcome.exit_code == 0);
        gyre::model::TensorFile file = gyre::model::read_safetensors(run / "last.safetensors");
        file.metadata.clear();
        CHECK(gyre::train::hash_tensors(file) == hash);
        std::filesystem::remove_all(run);
    }
}
