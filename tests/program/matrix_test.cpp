// One result for a net and an update rule: the same bytes on any number of ranks, over MPI, and
// over Gloo as `gyre launch` begins them.
#include <fstream>
#include <string>

#include "comm/launch/rendezvous.hpp"
#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/losses.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

constexpr int kShards = 8;

// As the built-in nets of these names, with fewer channels, so that 8 ranks have room.
struct SmallNet {
    const char* name;
    const char* text;
};
constexpr SmallNet kNets[] = {
    {"net",
     "conv 10 k5\nmaxpool 2\nrelu\nconv 20 k5\ndropout2d 0.5\nmaxpool 2\nrelu\nlinear 50\nrelu\n"
     "dropout 0.5\nlinear classes\n"},
    {"wide",
     "conv 8 k3 p1\nrelu\nconv 16 k3 p1\nrelu\nmaxpool 2\nlinear 128\nrelu\ndropout 0.5\n"
     "linear classes\n"},
    {"resnet",
     "conv 4 k3 p1\nbatchnorm\nrelu\nconv 8 k3 p1\nbatchnorm\nrelu\nmaxpool 2\nas a\nconv 8 k3 p1\n"
     "batchnorm\nrelu\nconv 8 k3 p1\nbatchnorm\nrelu\nadd a\nconv 16 k3 p1\nbatchnorm\nrelu\n"
     "maxpool 2\nmaxpool 2\nlinear classes\n"},
};
constexpr const char* kRules[] = {
    "--optimizer sgd --momentum 0.9 --max-grad-norm 0.5",
    "--optimizer adam --shard-optimizer on --max-grad-norm 0.5",
};

// Under a sanitizer, which makes all of it slow, the odd ones.
#if defined(GYRE_SANITIZED)
constexpr int kRanks[] = {3};
#else
constexpr int kRanks[] = {2, 3, 4, 5, 7, 8};
#endif

}  // namespace

TEST_CASE("a net and a rule have one result, on any number of ranks, over MPI and Gloo") {
    const TempDir dir;
    make_dataset(dir.path() / "set", 44, 20, 1, 28, 28, 10);  // the last step has 12 images
    const auto trained = [&](const std::string& start, const std::string& flags) {
        std::filesystem::remove_all(dir.file("run"));
        const Outcome outcome =
            run_shell(start + " train --data " + dir.file("set") +
                      " --threads 1 --epochs 1 --seed 3 --global-batch 16 "
                      "--shards " +
                      std::to_string(kShards) + " --model " + dir.file("model") + " --save " +
                      dir.file("run") + " " + flags);
        INFO(start << ", " << flags << '\n' << outcome.output);
        REQUIRE(outcome.exit_code == 0);
        return file_bytes(dir.file("run") + "/last.safetensors");
    };
    for (const SmallNet& net : kNets) {
        std::ofstream(dir.file("model")) << net.text;
        for (const std::string rule : kRules) {
            const std::string one = trained(gyre_binary(), rule);
            REQUIRE(one.size() > 10'000);
            for (const int ranks : kRanks) {
                INFO(net.name << ", " << rule << ", " << ranks << " ranks");
                CHECK(trained(gyre_command(ranks, ""), rule + " --comm mpi") == one);
                if (comm::gloo_available()) {
                    const std::string launch =
                        gyre_binary() + " launch -n " + std::to_string(ranks) + " --";
                    CHECK(trained(launch, rule) == one);
                }
            }
        }
    }
}
