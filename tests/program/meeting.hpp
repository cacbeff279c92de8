// Ranks started without mpirun, which meet by their flags and environment.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <initializer_list>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/program/gyre_process.hpp"
#include "tests/support/catch.hpp"

namespace gyre::test {

// A listening socket, and a port that nobody else listens on once it is closed: one below those
// that the system gives to programs which ask for any, such as MPI's in the tests that run at the
// same time.
struct Listener {
    int fd, port = 0;
    explicit Listener(in_addr_t host = INADDR_LOOPBACK)
        : fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(host);
        std::random_device random;
        bool bound = false;
        for (int attempt = 0; attempt < 100 && !bound; ++attempt) {
            port = std::uniform_int_distribution(10000, 19999)(random);
            address.sin_port = htons(static_cast<std::uint16_t>(port));
            bound = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
        }
        REQUIRE(bound);
        REQUIRE(listen(fd, 8) == 0);
    }
    ~Listener() { close(fd); }
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;
};

inline int free_port() {
    return Listener().port;
}

// Shell commands at the same time, each to its end.
class Jobs {
 public:
    // `environment`: NAME=VALUE ... in front of the program.
    void start(const std::string& arguments, const std::string& environment = {}) {
        running_.push_back(
            std::async(std::launch::async, run_shell,
                       environment + " timeout -k 1 120 " + gyre_command(0, "") + arguments));
    }
    void start_shell(const std::string& command) {
        running_.push_back(std::async(std::launch::async, run_shell, command));
    }
    std::vector<Outcome> wait() {
        std::vector<Outcome> outcomes;
        for (auto& job : running_) {
            outcomes.push_back(job.get());
        }
        running_.clear();
        return outcomes;
    }

 private:
    std::vector<std::future<Outcome>> running_;
};

inline void sleep_ms(int time) {
    std::this_thread::sleep_for(std::chrono::milliseconds(time));
}

inline void expect(const Outcome& outcome, int code, std::initializer_list<std::string> parts) {
    INFO(outcome.output);
    CHECK(outcome.exit_code == code);
    for (const std::string& part : parts) {
        INFO("expected to contain: " << part);
        CHECK(outcome.output.find(part) != std::string::npos);
    }
}

inline std::string tcp(int port, const std::string& host = "127.0.0.1") {
    return "tcp://" + host + ":" + std::to_string(port);
}

// The flags of one rank of a job that needs none of its data to fail.
inline std::string rank_flags(const std::string& method, int rank, int ranks,
                              const std::string& more = "--init-timeout 2") {
    return "train --data no-such-set --init-method " + method + " --rank " + std::to_string(rank) +
           " --world-size " + std::to_string(ranks) + " " + more;
}

}  // namespace gyre::test
