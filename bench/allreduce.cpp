// Time and bandwidth of gyre's gradient reduction, in the manner of nccl-tests: warm-up, barrier,
// in place, verified in the same run.
//
//   mpirun -np N build/bench-allreduce [largest MiB]
//
// Beside it, what MPI does with the same data in one call: blocking, and non-blocking as a whole.
//   algbw = bytes / time; busbw = algbw * 2 (n-1)/n, what a ring puts through each link.
// Exits with 1 if any result is wrong.
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "comm/communicator.hpp"

namespace {

using namespace gyre;

constexpr int kWarmUps = 2, kRuns = 7;

// Median seconds of `reduce`, the slowest rank counting, and the number of wrong elements.
struct Measured {
    double seconds;
    double wrong;
};

template <typename Reduce>
Measured measure(Communicator& comm, std::vector<float>& data, Reduce reduce) {
    std::vector<double> times;
    double wrong = 0.0;
    const int n = comm.size();
    for (int run = -kWarmUps; run < kRuns; ++run) {
        for (std::size_t i = 0; i < data.size(); ++i) {
            data[i] = static_cast<float>(static_cast<int>(i % 1000) + comm.rank());  // exact sums
        }
        comm.barrier();
        const auto start = std::chrono::steady_clock::now();
        reduce();
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        std::vector<double> all(static_cast<std::size_t>(n));
        all[static_cast<std::size_t>(comm.rank())] = taken.count();
        comm.allreduce_sum(all);
        if (run >= 0) {
            times.push_back(*std::max_element(all.begin(), all.end()));
        }
        for (std::size_t i = 0; i < data.size(); ++i) {
            wrong +=
                data[i] != static_cast<float>(n * static_cast<int>(i % 1000) + n * (n - 1) / 2);
        }
    }
    std::sort(times.begin(), times.end());
    comm.allreduce_sum({&wrong, 1});
    return {times[times.size() / 2], wrong};
}

}  // namespace

int main(int argc, char** argv) {
    const std::int64_t largest = (argc > 1 ? std::atoll(argv[1]) : 128) << 20;
    const auto comm = make_communicator();
    if (comm->size() == 1) {
        fmt::print(stderr, "bench-allreduce: run it with mpirun -np 2 or more\n");
        return 2;
    }
    if (comm->is_root()) {
        fmt::print("{} ranks, {}; median of {} runs, float32, sum, in place\n", comm->size(),
                   comm->description(), kRuns);
        fmt::print("{:>12} {:>12} | {:>10} {:>8} {:>8} | {:>12} | {:>12} | {:>6}\n", "bytes",
                   "elems", "gyre us", "algbw", "busbw", "Allreduce us", "Iallreduce us", "wrong");
    }
    double wrong = 0.0;
    for (std::int64_t bytes = 8; bytes <= largest; bytes *= 4) {
        const std::int64_t elems = bytes / std::int64_t{sizeof(float)};
        std::vector<float> data(static_cast<std::size_t>(elems));
        const int count = static_cast<int>(elems);
        const Measured ours =
            measure(*comm, data, [&] { comm->allreduce_sum_async(data.data(), elems)->wait(); });
        const Measured blocking = measure(*comm, data, [&] {
            MPI_Allreduce(MPI_IN_PLACE, data.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        });
        const Measured whole = measure(*comm, data, [&] {
            MPI_Request request = MPI_REQUEST_NULL;
            MPI_Iallreduce(MPI_IN_PLACE, data.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                           &request);
            MPI_Wait(&request, MPI_STATUS_IGNORE);
        });
        wrong += ours.wrong + blocking.wrong + whole.wrong;
        if (comm->is_root()) {
            const double algbw = static_cast<double>(bytes) / ours.seconds / 1e9;
            fmt::print(
                "{:>12} {:>12} | {:>10.1f} {:>8.3f} {:>8.3f} | {:>12.1f} | {:>12.1f} | {:>6}\n",
                bytes, elems, ours.seconds * 1e6, algbw,
                algbw * 2.0 * (comm->size() - 1) / comm->size(), blocking.seconds * 1e6,
                whole.seconds * 1e6, ours.wrong);
        }
    }
    return wrong == 0.0 ? 0 : 1;
}
