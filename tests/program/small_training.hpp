// A training of a small net in this process, its ranks as threads, from flags to what it says.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"
#include "tests/support/thread_ranks.hpp"
#include "train/cli/commands.hpp"
#include "train/cli/flags.hpp"

namespace gyre::test {

// The settings that `gyre train FLAGS` makes of its flags.
struct Parsed {
    explicit Parsed(const std::string& flags) {
        train::add_flags(app, rows);
        app.parse(flags);
        for (const train::ManifestEntry& entry : train::manifest_of(rows)) {
            manifest[entry.name] = entry.value;
        }
    }
    CLI::App app;
    train::RunSpec options;
    const std::vector<train::Setting> rows = train::train_flags(options);
    std::map<std::string, std::string> manifest;  // what the ranks compare
};

// Text that goes to the standard output meanwhile.
inline std::string printed(const std::function<void()>& work) {
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
        std::filesystem::remove(json);  // a resumed training adds to it
        ThreadRanks job(ranks);
        job.arrived = arrived;
        Result result;
        result.output = printed([&] {
            job.run([&](Communicator& comm) {
                std::string all = flags + " " + (own ? own(comm.rank()) : "");
                for (const auto& [flag, value] : {std::pair{"--model", model()},
                                                  {"--data", data()},
                                                  {"--metrics", json},
                                                  {"--log-interval", "1"},
                                                  {"--threads", "1"}}) {
                    if (all.find(flag) == all.npos) {
                        all.append(" ").append(flag).append(" ").append(value);
                    }
                }
                const Parsed parsed(all);
                if (compare_flags) {
                    train::require_same_manifest(comm, train::manifest_of(parsed.rows));
                }
                train::run_train(comm, parsed.options);
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

}  // namespace gyre::test
