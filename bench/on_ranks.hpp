// The start and the end that benchmarks on several ranks share.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>

#include "comm/communicator.hpp"

namespace gyre::bench {

// Parses the flags on all ranks together, then calls check(), which may throw Error. Returns false
// where --help was asked for and answered. Throws AgreedError for wrong flags, or a single rank.
inline bool parse_on_ranks(
    Communicator& comm, CLI::App& app, int argc, char** argv,
    const std::function<void()>& check = [] {}) {
    bool answered = false;
    agree(comm, [&] {
        try {
            app.parse(argc, argv);
        } catch (const CLI::Success& request) {
            answered = true;
            if (comm.is_root()) {
                app.exit(request);
            }
            return;
        } catch (const CLI::ParseError& error) {
            throw usage_error(error.what());
        }
        if (comm.size() == 1) {
            throw usage_error("one rank has nobody to talk to: run it with mpirun -np 2 or more");
        }
        check();
    });
    return !answered;
}

// The whole of main(): run(comm) and its exit code, or an error's message and code.
inline int on_ranks(const char* program, const std::function<int(Communicator&)>& run) {
    std::unique_ptr<Communicator> comm;
    try {
        comm = make_communicator();
        return run(*comm);
    } catch (const AgreedError& error) {
        if (comm->is_root()) {
            fmt::print(stderr, "{}: {}\n", program, error.what());
        }
        return static_cast<int>(error.code());
    } catch (const Error& error) {
        fmt::print(stderr, "{}: {}\n", program, error.what());
        if (comm != nullptr) {
            comm->abort(static_cast<int>(error.code()));
        }
        return static_cast<int>(error.code());
    }
}

}  // namespace gyre::bench
