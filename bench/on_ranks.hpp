// Start and end of main(), shared by the benchmarks on several ranks.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "base/option_names.hpp"
#include "comm/communicator.hpp"
#include "comm/launch/rendezvous.hpp"

namespace gyre::bench {

using namespace comm;

// Parses the flags on all ranks together, then calls check(), which may throw Error. Returns false
// if --help was requested and printed. Throws AgreedError for wrong flags or a single rank.
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
            throw usage_error("one rank has no peers: run with mpirun -np 2 or more");
        }
        check();
    });
    return !answered;
}

// Reads --comm and --share-gpu before anything else, as the ranks must meet to agree about flags.
inline LaunchSpec launch_options(int argc, char** argv) {
    LaunchSpec options;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (flag == "--comm" && i + 1 < argc) {
            options.comm = argv[i + 1];
        } else if (flag.starts_with("--comm=")) {
            options.comm = flag.substr(7);
        }
        options.share_gpu = options.share_gpu || flag == "--share-gpu";
    }
    return options;
}
// Declares the same flags for --help and for checking their values.
inline void add_launch_flags(CLI::App& app, LaunchSpec& options) {
    app.add_option("--comm", options.comm, "auto, nccl, mpi or gloo, as for gyre train")
        ->check(CLI::IsMember({"auto", "nccl", "mpi", "gloo"}))
        ->capture_default_str();
    app.add_flag("--share-gpu", options.share_gpu, "With --comm nccl, ranks may share a GPU");
}

// Does all of main(): returns the exit code of run(comm), or prints an error and returns its code.
inline int on_ranks(const char* program, const LaunchSpec& options,
                    const std::function<int(Communicator&)>& run) {
    std::unique_ptr<Communicator> comm;
    try {
        comm = make_communicator(options);
        return run(*comm);
    } catch (const AgreedError& error) {
        if (comm->is_root()) {
            fmt::print(stderr, "{}: {}\n", program, name_flags(error.what()));
        }
        return static_cast<int>(error.code());
    } catch (const Error& error) {
        fmt::print(stderr, "{}: {}\n", program, name_flags(error.what()));
        if (comm != nullptr) {
            comm->abort(static_cast<int>(error.code()));
        }
        return static_cast<int>(error.code());
    }
}

}  // namespace gyre::bench
