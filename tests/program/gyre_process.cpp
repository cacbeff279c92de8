#include "tests/program/gyre_process.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "base/philox.hpp"
#include "data/idx.hpp"
#include "tests/support/small_dataset.hpp"

namespace gyre::test {

using namespace data;

Outcome run_shell(const std::string& command) {
    const auto begin = std::chrono::steady_clock::now();
    FILE* pipe = popen(("{ " + command + "\n} 2>&1 </dev/null").c_str(), "r");
    if (pipe == nullptr) {
        throw std::runtime_error("cannot start a shell");
    }
    Outcome outcome;
    std::array<char, 4096> buffer;
    while (const std::size_t bytes = fread(buffer.data(), 1, buffer.size(), pipe)) {
        outcome.output.append(buffer.data(), bytes);
    }
    const int status = pclose(pipe);
    outcome.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
}

int count_of(const std::string& text, const std::string& part) {
    int count = 0;
    for (auto at = text.find(part); at != text.npos; at = text.find(part, at + 1)) {
        ++count;
    }
    return count;
}

std::string gyre_binary() {
    return built_file(GYRE_BINARY);
}

std::string gyre_command(int ranks, const std::string& arguments) {
    std::string command =
        ranks > 0 ? std::string(GYRE_MPIRUN) + " " + std::to_string(ranks) + " " : std::string();
    return command.append(gyre_binary()).append(" ").append(arguments);
}

std::vector<nlohmann::json> read_events(const std::filesystem::path& path,
                                        const std::string& event) {
    std::ifstream in(path);
    std::vector<nlohmann::json> events;
    for (std::string line; std::getline(in, line);) {
        auto json = nlohmann::json::parse(line);
        if (event.empty() || json.at("event") == event) {
            events.push_back(std::move(json));
        }
    }
    return events;
}

void make_dataset(const std::filesystem::path& directory, int train_images, int test_images,
                  int channels, int height, int width, int classes) {
    std::filesystem::create_directories(directory);
    const RandomStream random{77, RandomPurpose::init, 0, 0};
    std::uint32_t image = 0;
    for (const auto& [prefix, count] :
         {std::pair{"train", train_images}, std::pair{"test", test_images}}) {
        IdxArray images{IdxType::u8, {count, channels, height, width}, {}};
        IdxArray labels{IdxType::u8, {count}, {}};
        for (int i = 0; i < count; ++i, ++image) {
            const int label = i % classes;  // every class appears
            labels.payload.push_back(static_cast<std::byte>(label));
            for (int e = 0; e < channels * height * width; ++e) {
                const auto noise = random.word(image, static_cast<std::uint32_t>(e)) % 64;
                const bool bright = e % (height * width) * classes / (height * width) == label;
                images.payload.push_back(static_cast<std::byte>(noise + (bright ? 150 : 0)));
            }
        }
        const std::string stem = prefix;
        write_idx(directory / (stem + "-images-idx4-ubyte"), images);
        write_idx(directory / (stem + "-labels-idx1-ubyte"), labels);
    }
}

}  // namespace gyre::test
