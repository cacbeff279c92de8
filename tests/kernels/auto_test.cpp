// --kernels auto: which sizes are timed in a graph, and which kernels a pass then uses.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>

#include "kernels/emulation/emulator.hpp"
#include "kernels/gpu/auto_factory.hpp"
#include "kernels/make_backend.hpp"
#include "model/net.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

namespace gyre::emulated {
namespace {

// How often each call of an operation was made, and how often it ran, by number of images.
using Counts = std::map<std::string, int>;

class CountingOp final : public Op {
 public:
    CountingOp(Stream& stream, std::shared_ptr<Counts> counts, std::string name)
        : stream_(stream), counts_(std::move(counts)), name_(std::move(name)) {}
    OpNeeds needs() const override { return {.saved_bytes = 1}; }
    void forward(const Batch& batch, const OpIo&) override {
        count(batch.training ? "training" : "forward", batch.n);
    }
    void backward_begin(const Batch& batch, const OpIo&) override { count("begin", batch.n); }
    void backward_params(const Batch& batch, const OpIo&) override { count("params", batch.n); }
    void backward_input(const Batch& batch, const OpIo&) override { count("input", batch.n); }

 private:
    void count(const std::string& what, int n) {
        const std::string key = name_ + " " + what + " " + std::to_string(n);
        ++(*counts_)[key];
        emulator::submit(stream_, [counts = counts_, key] { ++(*counts)[key + " runs"]; });
    }
    Stream& stream_;
    const std::shared_ptr<Counts> counts_;
    const std::string name_;
};

// Two factories that differ only in their names.
class CountingFactory final : public KernelFactory {
 public:
    CountingFactory(Stream& stream, std::shared_ptr<Counts> counts, std::string name)
        : stream_(stream), counts_(std::move(counts)), name_(std::move(name)) {}
    std::string description() const override { return name_; }
    std::unique_ptr<Op> make(const std::string& layer, const OpSpec& spec, const OpSizes&,
                             DataType) override {
        if (std::holds_alternative<ReluSpec>(spec) && name_ == "library") {
            return nullptr;
        }
        return std::make_unique<CountingOp>(stream_, counts_, name_ + " " + layer);
    }

 private:
    Stream& stream_;
    const std::shared_ptr<Counts> counts_;
    const std::string name_;
};

// A choice between two sets of counting kernels.
struct Chosen {
    explicit Chosen(const std::filesystem::path& file = {}) {
        GpuOptions options;
        options.device = 7;  // as if ranks shared the only GPU
        options.choices_file = file.string();
        factory = make_auto_factory({stream, workspace}, options, "the GPU",
                                    std::make_unique<CountingFactory>(stream, counts, "ours"),
                                    std::make_unique<CountingFactory>(stream, counts, "library"));
    }
    int operator[](const std::string& key) const {
        const auto found = counts->find(key);
        return found == counts->end() ? 0 : found->second;
    }
    Stream stream;
    Workspace workspace{stream};
    const std::shared_ptr<Counts> counts = std::make_shared<Counts>();
    std::unique_ptr<KernelFactory> factory;
};

const Conv2dSpec kConv{.shape = {{2, 6, 6}, 3, 3, 1, 0}};
const MaxPool2dSpec kPool{{{3, 4, 4}, 2, 2}};
const BatchNorm2dSpec kNorm{.in = {3, 4, 4}};
const LinearSpec kLinear{.in = {12, 1, 1}, .shape = {12, 5}};

}  // namespace

TEST_CASE("kernels are chosen for each listed size, timed in a graph") {
    Chosen chosen;
    const OpSizes sizes{.train_images = 4, .eval_images = 20};
    chosen.factory->make("conv", kConv, sizes);
    chosen.factory->make("pool", kPool, sizes);
    chosen.factory->make("fc", kLinear, sizes);
    for (const std::string set : {"ours ", "library "}) {
        INFO(set);
        for (const std::string layer : {"conv ", "pool ", "fc "}) {
            INFO(layer);
            CHECK(chosen[set + layer + "training 4"] > 0);
            // A graph runs more often than it was captured.
            CHECK(chosen[set + layer + "training 4 runs"] > chosen[set + layer + "training 4"]);
            CHECK(chosen[set + layer + "input 4"] > 0);
            CHECK((chosen[set + layer + "params 4"] > 0) == (layer != "pool "));
            CHECK(chosen[set + layer + "forward 20"] > 0);
            CHECK(chosen[set + layer + "forward 4"] == 0);
            CHECK(chosen[set + layer + "input 20"] == 0);
            CHECK(chosen[set + layer + "params 20"] == 0);
        }
    }
    // All timings are known. An evaluation with as many images as a training pass uses the choice
    // made for training.
    const auto before = *chosen.counts;
    chosen.factory->make("conv", kConv, {.train_images = 4, .eval_images = 4});
    chosen.factory->make("pool", kPool, {.train_images = 4, .eval_images = 4});
    CHECK(*chosen.counts == before);
}

TEST_CASE("each listed size has its own choice; others use that of the next larger one") {
    const test::TempDir dir;
    const auto file = dir.path() / "choices.json";
    const OpSizes sizes{.eval_images = 20, .eval_sizes = {20, 4}};
    Chosen(file).factory->make("fc", kLinear, sizes);
    std::ifstream in(file);
    auto json = nlohmann::json::parse(in);
    in.close();
    REQUIRE(json.at("timings").size() == 2);
    for (auto& timing : json.at("timings")) {
        CHECK(std::string(timing.at("environment")).starts_with("the GPU, gyre "));
        const bool ours = timing.at("n") == 20;
        timing["ours_us"] = ours ? 1.0 : 2.0;
        timing["library_us"] = ours ? 2.0 : 1.0;
    }
    std::ofstream(file) << json;
    Chosen second(file);
    const auto op = second.factory->make("fc", kLinear, sizes);
    CHECK(second.counts->empty());  // all timings are known
    for (const int n : {0, 3, 4, 5, 20, 21}) {
        op->forward({.n = n}, {});
    }
    CHECK(*second.counts == Counts{{"library fc forward 0", 1},
                                   {"library fc forward 3", 1},
                                   {"library fc forward 4", 1},
                                   {"ours fc forward 5", 1},
                                   {"ours fc forward 20", 1},
                                   {"ours fc forward 21", 1}});
}

TEST_CASE("directions are chosen separately, max-pooling and batch normalisation as a whole") {
    const test::TempDir dir;
    const auto file = dir.path() / "choices.json";
    const OpSizes sizes{.train_images = 4, .eval_images = 20};
    {
        Chosen first(file);
        first.factory->make("fc", kLinear, sizes);
        first.factory->make("pool", kPool, sizes);
        first.factory->make("norm", kNorm, sizes);
    }
    std::ifstream in(file);
    auto json = nlohmann::json::parse(in);
    in.close();
    const std::set<std::string> library = {"linear backward data", "maxpool2d both ways",
                                           "batchnorm2d both ways"};
    std::set<std::string> found;
    for (auto& timing : json.at("timings")) {
        found.insert(timing.at("operation"));
        timing["ours_us"] = 2.0;
        timing["library_us"] = library.contains(timing.at("operation")) ? 1.0 : 3.0;
    }
    CHECK(found == std::set<std::string>{"linear forward", "linear backward data",
                                         "linear backward weights", "maxpool2d both ways",
                                         "maxpool2d forward", "batchnorm2d both ways",
                                         "batchnorm2d forward"});
    std::ofstream(file) << json;
    Chosen second(file);
    for (const auto& op :
         {second.factory->make("fc", kLinear, sizes), second.factory->make("pool", kPool, sizes),
          second.factory->make("norm", kNorm, sizes)}) {
        op->forward({.n = 4, .training = true}, {});
        op->backward_begin({.n = 4, .training = true}, {});
        op->backward_params({.n = 4, .training = true}, {});
        op->backward_input({.n = 4, .training = true}, {});
        op->forward({.n = 20}, {});
    }
    CHECK(*second.counts == Counts{{"ours fc training 4", 1},
                                   {"library fc begin 4", 1},
                                   {"ours fc params 4", 1},
                                   {"library fc input 4", 1},
                                   {"ours fc forward 20", 1},
                                   {"library pool training 4", 1},
                                   {"library pool begin 4", 1},
                                   {"library pool params 4", 1},
                                   {"library pool input 4", 1},
                                   {"ours pool forward 20", 1},
                                   {"library norm training 4", 1},
                                   {"library norm begin 4", 1},
                                   {"library norm params 4", 1},
                                   {"library norm input 4", 1},
                                   {"ours norm forward 20", 1}});
}

TEST_CASE("gyre's own kernels run what the library lacks, and nothing is timed") {
    Chosen chosen;
    const auto op = chosen.factory->make("relu", ReluSpec{{3, 4, 4}}, {.train_images = 4});
    CHECK(chosen.counts->empty());
    op->forward({.n = 4}, {});
    CHECK(*chosen.counts == Counts{{"ours relu forward 4", 1}});
}

}  // namespace gyre::emulated

namespace {

using namespace gyre;
using namespace gyre::model;

TEST_CASE("a net announces the sizes of training and evaluation") {
    GpuOptions options;
    options.kernels = KernelSet::automatic;
    const auto sizes = [&](const NetOptions& net_options) {
        const auto backend = make_emulated_backend(options);
        const Net net(*backend, parse_model("conv 2 k3\nmaxpool 2\nlinear classes\n", "small"),
                      {1, 6, 6}, 3, net_options);
        std::map<std::string, std::set<int>> found;  // by operation
        std::istringstream table(backend->choices());
        std::string line;
        std::getline(table, line);
        while (std::getline(table, line)) {
            // layer  operation  shape  n  ours  library  chosen
            std::istringstream words(line);
            std::vector<std::string> all{std::istream_iterator<std::string>(words), {}};
            found[all.at(1) + " " + all.at(2)].insert(std::stoi(all.at(all.size() - 4)));
        }
        return found;
    };
    using Found = std::map<std::string, std::set<int>>;
    CHECK(sizes({4, 9, {}, {}, {4, 3}, {9, 2}}) == Found{{"conv2d forward", {2, 3, 4, 9}},
                                                         {"conv2d backward", {3, 4}},
                                                         {"maxpool2d both", {3, 4}},
                                                         {"maxpool2d forward", {2, 9}},
                                                         {"linear forward", {2, 3, 4, 9}},
                                                         {"linear backward", {3, 4}}});
    CHECK(sizes({4, 0}) == Found{{"conv2d forward", {4}},
                                 {"conv2d backward", {4}},
                                 {"maxpool2d both", {4}},
                                 {"linear forward", {4}},
                                 {"linear backward", {4}}});
    CHECK(sizes({0, 9}) ==
          Found{{"conv2d forward", {9}}, {"maxpool2d forward", {9}}, {"linear forward", {9}}});
}

}  // namespace
