// The start and the end that benchmarks on several ranks share.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.hpp"
#include "comm/launch/rendezvous.hpp"
#include "kernels/base/option_names.hpp"

namespace gyre::bench {

using namespace comm;

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

// --comm and --share-gpu: read before anything else, as the ranks must meet to agree about flags.
inline LaunchOptions launch_options(int argc, char** argv) {
    LaunchOptions options;
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
// The same for --help and for the check of what was given.
inline void add_launch_flags(CLI::App& app, LaunchOptions& options) {
    app.add_option("--comm", options.comm, "auto, nccl, mpi or gloo, as of gyre train")
        ->check(CLI::IsMember({"auto", "nccl", "mpi", "gloo"}))
        ->capture_default_str();
    app.add_flag("--share-gpu", options.share_gpu, "Ranks may share a GPU, with --comm nccl");
}

// The whole of main(): run(comm) and its exit code, or an error's message and code.
inline int on_ranks(const char* program, const LaunchOptions& options,
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
