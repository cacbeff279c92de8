// Measures time and bandwidth of gyre's gradient reduction as nccl-tests does: with warm-up and
// barrier, in place, verified.
//
//   mpirun -np N build/bench-allreduce -b 8 -e 256M -f 2
//   mpirun -np N build/bench-allreduce --comm nccl --device cuda
//   torchrun --no-python --nproc-per-node N build/bench-allreduce          (over Gloo)
//
//   time    of one reduction: the median over the iterations, of the slowest rank each
//   algbw   bytes / time
//   busbw   algbw * 2 (n-1)/n, the load of each link in a ring; see nccl-tests' PERFORMANCE.md
//   #wrong  elements, over all ranks and iterations, that are not the exact sum, or that changed
//           although they are before or after the data
// Every iteration, warm-ups included, starts from fresh input and is checked completely, so
// in-place sums do not grow, and a later iteration cannot hide an error of an earlier one. The
// inputs are integers whose sums float32 represents. Under MPI a last column has the time of one
// plain MPI_Iallreduce of the same data. The exit code is 1 for wrong values or too little
// bandwidth, 2 for wrong flags.
#include <fmt/format.h>
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "bench/on_ranks.hpp"
#include "comm/communicator.hpp"
#include "kernels/make_backend.hpp"

namespace {

using namespace gyre;
using namespace gyre::comm;

constexpr std::int64_t kGuardElems = 16;  // on either side of the data
constexpr float kGuard = -1.0f;           // never a sum
constexpr std::int64_t kMostBytes = std::int64_t{4} << 30;

struct Options {
    std::int64_t begin = 8, end = 256 << 20, at_bytes = 0;
    int factor = 2, iterations = 20, warm_ups = 5;
    double min_busbw = 0.0;
    bool peer = true, in_tree = false;
    LaunchSpec launch;
    std::string device = "cpu";
};

struct Measured {
    double seconds = 0.0;
    double wrong = 0.0;
};

float input(std::int64_t i, int rank) {
    return static_cast<float>(static_cast<int>(i % 1000) + rank);
}
float expected(std::int64_t i, int ranks) {
    return static_cast<float>(ranks * static_cast<int>(i % 1000) + ranks * (ranks - 1) / 2);
}

// reduce(data) returns when the sums are in `data`, which is in the backend's memory.
template <typename Reduce>
Measured measure(Communicator& comm, Backend& backend, std::int64_t elems, const Options& options,
                 Reduce reduce) {
    std::vector<float> memory(static_cast<std::size_t>(elems + 2 * kGuardElems), kGuard);
    float* data = memory.data() + kGuardElems;
    // GPU memory is filled from host memory and checked there.
    const bool copied = !backend.host_memory();
    const DeviceBuffer<float> device(backend, copied ? elems + 2 * kGuardElems : 1);
    const std::size_t bytes = memory.size() * sizeof(float);
    std::vector<double> times;
    Measured result;
    for (int iteration = -options.warm_ups; iteration < options.iterations; ++iteration) {
        for (std::int64_t i = 0; i < elems; ++i) {
            data[i] = input(i, comm.rank());
        }
        if (copied) {
            backend.upload(device.get(), memory.data(), bytes);
        }
        comm.barrier();
        const auto start = std::chrono::steady_clock::now();
        reduce(copied ? device.get() + kGuardElems : data);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        if (copied) {
            backend.download(memory.data(), device.get(), bytes);
        }
        std::vector<double> all(static_cast<std::size_t>(comm.size()));
        all[static_cast<std::size_t>(comm.rank())] = taken.count();
        comm.allreduce_sum(all);
        if (iteration >= 0) {
            times.push_back(*std::max_element(all.begin(), all.end()));
        }
        for (std::int64_t i = 0; i < elems; ++i) {
            result.wrong += data[i] != expected(i, comm.size());
        }
        for (std::int64_t i = 0; i < kGuardElems; ++i) {
            result.wrong +=
                (memory[static_cast<std::size_t>(i)] != kGuard) + (data[elems + i] != kGuard);
        }
    }
    std::sort(times.begin(), times.end());
    result.seconds = times[times.size() / 2];
    comm.allreduce_sum({&result.wrong, 1});
    return result;
}

void add_flags(CLI::App& app, Options& o) {
    const CLI::AsSizeValue size(false);  // K, M and G are powers of 1024, as in nccl-tests
    app.add_option("-b,--begin", o.begin, "Smallest message in bytes")
        ->transform(size)
        ->check(CLI::Range(std::int64_t{4}, kMostBytes))
        ->default_str("8");
    app.add_option("-e,--end", o.end, "Largest message in bytes")
        ->transform(size)
        ->check(CLI::Range(std::int64_t{4}, kMostBytes))
        ->default_str("256M");
    app.add_option("-f,--factor", o.factor, "Factor between two sizes")
        ->check(CLI::Range(2, 1 << 20))
        ->capture_default_str();
    app.add_option("-n,--iters", o.iterations, "Timed iterations per size")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    app.add_option("-w,--warmup-iters", o.warm_ups, "Untimed iterations before them")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
    auto* minimum =
        app.add_option("--min-busbw", o.min_busbw, "Fail if busbw is below this, in GB/s ...")
            ->check(CLI::PositiveNumber);
    auto* at = app.add_option("--at-bytes", o.at_bytes, "... at this size, one of those measured")
                   ->transform(size)
                   ->needs(minimum);
    minimum->needs(at);
    bench::add_launch_flags(app, o.launch);
    app.add_option("--device", o.device,
                   "Memory to reduce: cpu, or with --comm nccl cuda (emulated: for tests)")
        ->check(CLI::IsMember({"cpu", "cuda", "emulated"}))
        ->capture_default_str();
    app.add_flag("--in-tree", o.in_tree,
                 "Add in the tree over the ranks, as virtual ranks do where they can");
    app.add_flag_callback(
        "--no-peer", [&o] { o.peer = false; }, "Leave out the plain MPI_Iallreduce");
}

std::vector<std::int64_t> sizes(const Options& options) {
    std::vector<std::int64_t> list;
    for (std::int64_t bytes = options.begin; bytes <= options.end; bytes *= options.factor) {
        list.push_back(bytes / 4 * 4);
    }
    if (list.empty()) {
        throw usage_error("--begin is larger than --end");
    }
    if (options.at_bytes != 0 &&
        std::find(list.begin(), list.end(), options.at_bytes) == list.end()) {
        throw usage_error(fmt::format(
            "--at-bytes {} is not among the sizes that --begin, --end and --factor give",
            options.at_bytes));
    }
    return list;
}

int run(Communicator& comm, int argc, char** argv) {
    CLI::App app("bench-allreduce: time and bandwidth of gradient reductions, like nccl-tests");
    Options options;
    add_flags(app, options);
    std::vector<std::int64_t> list;
    if (!bench::parse_on_ranks(comm, app, argc, argv, [&] { list = sizes(options); })) {
        return 0;
    }
    std::unique_ptr<Backend> backend;
    agree(comm, [&] {
        GpuOptions gpu;
        gpu.device = comm.local_rank();
        gpu.share = options.launch.share_gpu;
        backend = options.device == "cpu"    ? make_cpu_backend(1)
                  : options.device == "cuda" ? make_cuda_backend(gpu)
                                             : make_emulated_backend(gpu);
    });
    if (!comm.use_device(*backend)) {
        throw AgreedError(ExitCode::usage,
                          fmt::format("{} reduces host memory: use --device cpu, or --comm "
                                      "nccl with GPUs",
                                      comm.description()));
    }
    if (options.in_tree && !comm.can_sum_in_tree()) {
        throw AgreedError(ExitCode::usage, fmt::format("--in-tree: {} has an order of its own; "
                                                       "leave it out",
                                                       comm.description()));
    }
    int mpi = 0;
    MPI_Initialized(&mpi);
    const bool peer = options.peer && mpi != 0 && backend->host_memory();
    if (comm.is_root()) {
        fmt::print("# {} ranks, {}; {} warm-ups, median of {} iterations, slowest rank\n",
                   comm.size(), comm.description(), options.warm_ups, options.iterations);
        fmt::print("#{:>11} {:>12} {:>7} {:>6} {:>11} {:>8} {:>8} {:>7}{}\n", "size", "count",
                   "type", "redop", "time", "algbw", "busbw", "#wrong",
                   peer ? "  MPI_Iallreduce" : "");
        fmt::print("#{:>11} {:>12} {:>7} {:>6} {:>11} {:>8} {:>8} {:>7}{}\n", "(B)", "(elements)",
                   "", "", "(us)", "(GB/s)", "(GB/s)", "", peer ? "            (us)" : "");
    }
    double wrong = 0.0, busbw_sum = 0.0, busbw_at = 0.0;
    for (const std::int64_t bytes : list) {
        const std::int64_t elems = bytes / std::int64_t{sizeof(float)};
        const Measured ours = measure(comm, *backend, elems, options, [&](float* data) {
            comm.start({.kind = Collective::Kind::all_reduce,
                        .data = data,
                        .count = elems,
                        .in_tree = options.in_tree})
                ->wait();
        });
        wrong += ours.wrong;
        const double algbw = static_cast<double>(bytes) / ours.seconds / 1e9;
        const double busbw = algbw * 2.0 * (comm.size() - 1) / comm.size();
        busbw_sum += busbw;
        busbw_at = bytes == options.at_bytes ? busbw : busbw_at;
        std::string peer_us;
        if (peer) {
            const Measured whole = measure(comm, *backend, elems, options, [&](float* data) {
                MPI_Request request = MPI_REQUEST_NULL;
                if (MPI_Iallreduce(MPI_IN_PLACE, data, static_cast<int>(elems), MPI_FLOAT, MPI_SUM,
                                   MPI_COMM_WORLD, &request) != MPI_SUCCESS ||
                    MPI_Wait(&request, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
                    throw Error(ExitCode::communication,
                                fmt::format("MPI_Iallreduce of {} bytes failed", bytes));
                }
            });
            peer_us = fmt::format(" {:>15.1f}", whole.seconds * 1e6);
        }
        if (comm.is_root()) {
            fmt::print("{:>12} {:>12} {:>7} {:>6} {:>11.1f} {:>8.3f} {:>8.3f} {:>7}{}\n", bytes,
                       elems, "float", "sum", ours.seconds * 1e6, algbw, busbw, ours.wrong,
                       peer_us);
            std::fflush(stdout);
        }
    }
    const bool slow = busbw_at < options.min_busbw;
    if (comm.is_root()) {
        fmt::print("# Out of bounds values : {} {}\n", wrong, wrong == 0.0 ? "OK" : "FAILED");
        fmt::print("# Avg bus bandwidth    : {:.4g}\n",
                   busbw_sum / static_cast<double>(list.size()));
        if (options.at_bytes != 0) {
            fmt::print("# busbw at {} bytes: {:.4g} GB/s, {} the least, {:.4g}: {}\n",
                       options.at_bytes, busbw_at, slow ? "below" : "at or above",
                       options.min_busbw, slow ? "FAILED" : "OK");
        }
    }
    return wrong == 0.0 && !slow ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    // All ranks have the same times, so they all end with the same code.
    return bench::on_ranks("bench-allreduce", bench::launch_options(argc, argv),
                           [&](Communicator& comm) { return run(comm, argc, argv); });
}
