// gyre train --trace: what each rank did in a few steps.
#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temp_dir.hpp"

using namespace gyre::test;

namespace {

struct Span {
    std::string name;
    double begin, end;
};
// The events of a rank.
struct Spans {
    std::vector<Span> steps, computes, collectives;
};

// Checks that steps enclose what is computed, and that the spans of a row do not cross.
std::map<int, Spans> read_trace(const std::string& path) {
    const auto trace = nlohmann::json::parse(file_bytes(path));
    std::map<int, Spans> ranks;
    std::map<std::pair<int, int>, std::vector<Span>> rows;
    for (const auto& event : trace.at("traceEvents")) {
        const int rank = event.at("pid");
        if (event.at("ph") == "M") {
            ranks[rank];
            continue;
        }
        REQUIRE(event.at("ph") == "X");
        const double begin = event.at("ts"), duration = event.at("dur");
        const Span span{event.at("name"), begin, begin + duration};
        CHECK(duration >= 0.0);
        if (event.at("tid") == 0) {
            (span.name == "step" ? ranks[rank].steps : ranks[rank].computes).push_back(span);
        } else {
            CHECK(event.at("cat") == "communication");
            CHECK(event.at("args").at("bytes") > 0);
            ranks[rank].collectives.push_back(span);
            rows[{rank, event.at("tid")}].push_back(span);
        }
    }
    constexpr double kRounding = 0.002;  // microseconds: times are written to the nanosecond
    for (auto& [rank, spans] : ranks) {
        for (const Span& inner : spans.computes) {
            INFO(inner.name);
            CHECK(std::any_of(spans.steps.begin(), spans.steps.end(), [&](const Span& step) {
                return step.begin <= inner.begin + kRounding && inner.end <= step.end + kRounding;
            }));
        }
        rows[{rank, 0}] = spans.computes;
    }
    for (auto& [row, spans] : rows) {
        std::sort(spans.begin(), spans.end(),
                  [](const Span& a, const Span& b) { return a.begin < b.begin; });
        for (std::size_t i = 1; i < spans.size(); ++i) {
            INFO(spans[i - 1].name << ", " << spans[i].name);
            const bool inside =  // as a wait for the statistics of a forward pass
                row.second == 0 && spans[i].end <= spans[i - 1].end + kRounding;
            CHECK((inside || spans[i - 1].end <= spans[i].begin + kRounding));
        }
    }
    return ranks;
}

std::size_t count_of_names(const std::vector<Span>& spans, const std::string& start) {
    return static_cast<std::size_t>(
        std::count_if(spans.begin(), spans.end(),
                      [&](const Span& span) { return span.name.starts_with(start); }));
}

struct Set {
    TempDir dir;
    std::string train;
    Set() {
        make_dataset(dir.file("set"), 80, 20, 1, 12, 12, 3);
        std::ofstream(dir.file("model"))
            << "conv 4 k3\nbatchnorm\nrelu\nconv 4 k3\nrelu\nlinear 8\nlinear classes\n";
        train = "train --threads 1 --batch-size 5 --epochs 1 --data " + dir.file("set") +
                " --model " + dir.file("model") + " ";
    }
};

}  // namespace

TEST_CASE("a trace has each rank's steps with what it computed, and its collectives") {
    const Set set;
    const std::string file = set.dir.file("trace.json");
    for (const std::string device : {"cpu", "emulated"}) {
        for (const int ranks : {1, 2}) {
            INFO(device << ", " << ranks << " ranks");
            const std::string flags = set.train + "--device " + device + " --bucket-kib 1 ";
            const Outcome plain =
                run_gyre(ranks, flags + "--save " + set.dir.file("plain") + " --overwrite");
            INFO(plain.output);
            REQUIRE(plain.exit_code == 0);
            const Outcome traced =
                run_gyre(ranks, flags + "--trace " + file + " --trace-steps 2-4 --save " +
                                    set.dir.file("traced") + " --overwrite");
            INFO(traced.output);
            REQUIRE(traced.exit_code == 0);
            // Looking changes nothing.
            CHECK(file_bytes(set.dir.file("traced/last.safetensors")) ==
                  file_bytes(set.dir.file("plain/last.safetensors")));
            const auto found = read_trace(file);
            REQUIRE(found.size() == static_cast<std::size_t>(ranks));
            for (const auto& [rank, spans] : found) {
                INFO("rank " << rank);
                CHECK(spans.steps.size() == 3);
                for (const char* layer : {"conv1", "bn1", "conv2", "fc1"}) {
                    CHECK(count_of_names(spans.computes, std::string("forward ") + layer) == 3);
                    CHECK(count_of_names(spans.computes, std::string("backward ") + layer) == 3);
                }
                CHECK(count_of_names(spans.computes, "gather") == 3);
                CHECK(count_of_names(spans.computes, "loss") == 3);
                const std::size_t buckets = count_of_names(spans.collectives, "bucket ");
                CHECK((ranks == 1 ? buckets == 0 : buckets >= 6));
                CHECK(buckets % 3 == 0);
                CHECK(count_of_names(spans.computes, "wait for bucket ") == buckets);
                CHECK(count_of_names(spans.computes, "update") == (ranks == 1 ? 3 : buckets));
                // Batch normalisation over all ranks: mean, variance, and sums of the gradient.
                CHECK(count_of_names(spans.collectives, "statistics ") == (ranks == 1 ? 0 : 9));
            }
        }
    }
}

TEST_CASE(
    "--trace: a path that cannot be, a training that ends before, other flags on another rank") {
    const Set set;
    const Outcome nowhere = run_gyre(2, set.train + "--trace " + set.dir.file("no/trace.json"));
    INFO(nowhere.output);
    CHECK(nowhere.exit_code == 3);
    CHECK(count_of(nowhere.output, "--trace " + set.dir.file("no/trace.json")) == 1);
    CHECK(count_of(nowhere.output, "epoch 1/1") == 0);
    const std::string file = set.dir.file("trace.json");
    const Outcome early = run_gyre(2, set.train + "--trace-steps 500 --trace " + file);
    INFO(early.output);
    CHECK(early.exit_code == 0);
    CHECK(count_of(early.output, "the training ended before step 500") == 1);
    CHECK(file_bytes(file).empty());
    const Outcome wrong = run_gyre(0, set.train + "--trace-steps 4-2 --trace " + file);
    INFO(wrong.output);
    CHECK(wrong.exit_code == 2);
    CHECK(count_of(wrong.output, "'4-2' must be a step") == 1);
}
