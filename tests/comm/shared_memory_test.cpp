// Ranks of one host that share memory, as threads: that all decide alike whether they do, and what
// happens if one does not arrive. What they reduce is in comm_test.
#include "comm/shared/shared_communicator.hpp"

#include <functional>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/communicators.hpp"
#include "tests/support/expect_error.hpp"
#include "tests/support/thread_ranks.hpp"

using namespace gyre;
using namespace gyre::test;

namespace {

// How the last of three ranks differs from the others.
struct Oddity {
    const char* name;
    bool wants = true, on_this_host = true;
    std::function<void(char* data, std::size_t bytes)> receives = [](char*, std::size_t) {};
};

class Odd final : public BorrowedCommunicator {
 public:
    Odd(Communicator& from, const Oddity& oddity) : BorrowedCommunicator(from), oddity_(oddity) {}
    int local_size() const override { return oddity_.on_this_host ? size() : 1; }
    void broadcast(void* data, std::size_t bytes, int root) override {
        BorrowedCommunicator::broadcast(data, bytes, root);
        oddity_.receives(static_cast<char*>(data), bytes);
    }

 private:
    const Oddity& oddity_;
};

// Returns whether the bytes are the path of the memory. The token by which ranks know it has 32
// bytes.
bool is_path(const char* data, std::size_t bytes) {
    return bytes > 6 && std::string(data, 6) == "/proc/";
}

}  // namespace

TEST_CASE("ranks share memory if all can and want to, and otherwise none does", "[shared_memory]") {
    constexpr int kRanks = 3;
    const Oddity none{.name = "none"};
    const Oddity oddities[] = {
        none,
        {.name = "does not want to", .wants = false},
        {.name = "is on another host", .on_this_host = false},
        {.name = "finds no file",
         .receives =
             [](char* data, std::size_t bytes) {
                 if (is_path(data, bytes)) {
                     data[1] = 'P';
                 }
             }},
        {.name = "finds a file of another kind",
         .receives =
             [](char* data, std::size_t bytes) {
                 if (is_path(data, bytes)) {
                     std::string("/dev/zero").append(bytes, '\0').copy(data, bytes);
                 }
             }},
        {.name = "finds other memory of the same size",
         .receives =
             [](char* data, std::size_t bytes) {
                 if (bytes == 32) {
                     data[31] = static_cast<char>(data[31] + 1);
                 }
             }},
    };
    for (const Oddity& oddity : oddities) {
        INFO("one rank " << oddity.name);
        std::vector<std::string> descriptions(kRanks);
        std::vector<float> sums(kRanks);
        ThreadRanks(kRanks).run([&](Communicator& comm) {
            const auto rank = static_cast<std::size_t>(comm.rank());
            const Oddity& own = rank == kRanks - 1 ? oddity : none;
            const auto shared =
                comm::share_memory(std::make_unique<Odd>(comm, own), own.wants, 60.0);
            descriptions[rank] = shared->description();
            float value = static_cast<float>(rank + 1);
            shared->start(all_reduce(&value, 1))->wait();
            sums[rank] = value;
        });
        const std::string expected =
            &oddity == oddities ? "shared memory, started over threads" : "threads";
        CHECK(descriptions == std::vector<std::string>(kRanks, expected));
        CHECK(sums == std::vector<float>(kRanks, 6.0f));
    }
}

TEST_CASE("a rank that waits in shared memory for one that does not come says so",
          "[shared_memory]") {
    ThreadRanks(2).run([](Communicator& comm) {
        const auto shared =
            comm::share_memory(std::make_unique<BorrowedCommunicator>(comm), true, 0.3);
        if (comm.rank() == 0) {
            std::vector<float> values(1000);
            expect_error(ExitCode::communication,
                         {"allreduce(fp32) of 4000 bytes in shared memory", "within 0.3 s"},
                         [&] { shared->start(all_reduce(values.data(), 1000))->wait(); });
        }
    });
}
