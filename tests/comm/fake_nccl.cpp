// A FAKE: this is not NCCL, and it is only for tests. It is a shared library with the NCCL
// functions that gyre uses, for the emulated GPU: the stream it is given is a
// simt::Stream, and a reduction is work on that stream which goes through a file in
// shared memory that all ranks map. The version that gyre prints names it as a fake, and gyre
// rejects it for real GPUs.
//
// Like NCCL with a non-blocking communicator it answers "in progress" and must be asked again.
// The environment variable GYRE_FAKE_NCCL lists faults, comma-separated:
//   init       the communicator is never ready
//   async:N    from the N-th operation on they do not end, and an asynchronous error appears
//   stall:N    from the N-th operation on they do not end, and no error appears
//   call:N     the N-th call that begins an operation fails
//   abort      ncclCommAbort hangs
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/data_type.hpp"
#include "comm/nccl/nccl_library.hpp"
#include "kernels/emulation/emulator.hpp"

namespace {

using namespace gyre;
using namespace gyre::comm::nccl;

constexpr int kMostRanks = 8;
constexpr std::size_t kPieceBytes = 256 << 10;

struct Shared {
    std::atomic<int> joined;
    std::atomic<std::uint64_t> arrived[kMostRanks];  // at barriers
    std::byte pieces[kMostRanks][kPieceBytes];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

std::string fault(const std::string& name) {
    const char* text = std::getenv("GYRE_FAKE_NCCL");
    std::string all = ",";
    all.append(text == nullptr ? "" : text).append(",");
    const std::size_t at = all.find(std::string(",").append(name));
    return at == std::string::npos ? "" : all.substr(at + 1, all.find(',', at + 1) - at - 1);
}

}  // namespace

struct gyre::comm::nccl::Communicator {
    Communicator(const char* name, int ranks_, int rank_) : path(name), ranks(ranks_), rank(rank_) {
        const int file = open(name, O_RDWR | O_CLOEXEC);
        void* const at =
            file < 0 ? MAP_FAILED
                     : mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (at == MAP_FAILED) {
            std::perror("fake_nccl: the shared memory");
            std::abort();
        }
        shared = static_cast<Shared*>(at);
        for (const char* kind : {"async:", "stall:"}) {
            if (const std::string found = fault(kind); !found.empty()) {
                fails_at = std::stol(found.substr(6));
            }
        }
        if (fault("init").empty()) {
            ++shared->joined;
        }
    }
    ~Communicator() {
        munmap(shared, sizeof(Shared));
        unlink(path.c_str());  // fails on all ranks but one, which is fine
    }
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    bool barrier() {
        const std::uint64_t mine = ++shared->arrived[rank];
        for (int r = 0; r < ranks; ++r) {
            while (shared->arrived[r] < mine) {
                if (aborted) {
                    return false;
                }
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        }
        return true;
    }

    // Sums in the order of the ranks, rounding each addition, so that all ranks get the same bits.
    template <typename T, typename Add>
    bool reduce(T* data, std::size_t elems, Add add) {
        constexpr std::size_t kPieceElems = kPieceBytes / sizeof(T);
        for (std::size_t at = 0; at < elems; at += kPieceElems) {
            const std::size_t n = std::min(kPieceElems, elems - at);
            std::memcpy(shared->pieces[rank], data + at, n * sizeof(T));
            if (!barrier()) {
                return false;
            }
            std::memcpy(data + at, shared->pieces[0], n * sizeof(T));
            for (int r = 1; r < ranks; ++r) {
                const T* theirs = reinterpret_cast<const T*>(shared->pieces[r]);
                for (std::size_t i = 0; i < n; ++i) {
                    data[at + i] = add(data[at + i], theirs[i]);
                }
            }
            if (!barrier()) {
                return false;
            }
        }
        return true;
    }

    void gather(std::byte* data, std::size_t bytes) {
        for (std::size_t at = 0; at < bytes; at += kPieceBytes) {
            const std::size_t n = std::min(kPieceBytes, bytes - at);
            std::memcpy(shared->pieces[rank], data + static_cast<std::size_t>(rank) * bytes + at,
                        n);
            if (!barrier()) {
                return;
            }
            for (int r = 0; r < ranks; ++r) {
                std::memcpy(data + static_cast<std::size_t>(r) * bytes + at, shared->pieces[r], n);
            }
            if (!barrier()) {
                return;
            }
        }
    }

    Result begin(Stream stream, std::function<void()> operation) {
        const std::string call = fault("call:");
        if (!call.empty() && calls++ >= std::stol(call.substr(5))) {
            return system_error;
        }
        asked = 0;
        submit = [this, stream, operation] {
            simt::emulator::submit(*static_cast<simt::Stream*>(stream),
                                   [this, operation] { run(operation); });
        };
        return in_progress;
    }

    // Runs one of the operations above, unless it is to fail.
    void run(const std::function<void()>& operation) {
        if (fails_at >= 0 && operations++ >= fails_at) {
            error = !fault("async:").empty();
            while (!aborted) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            return;
        }
        operation();
    }

    void sum_up(void* data, std::size_t elems, Type type) {
        auto* half = static_cast<std::uint16_t*>(data);
        if (type == float32) {
            reduce(static_cast<float*>(data), elems, std::plus<float>{});
        } else if (type == bfloat16) {
            reduce(half, elems, [](std::uint16_t a, std::uint16_t b) {
                return narrow::to_bfloat16(narrow::from_bfloat16(a) + narrow::from_bfloat16(b));
            });
        } else {
            reduce(half, elems, [](std::uint16_t a, std::uint16_t b) {
                return narrow::to_float16(narrow::from_float16(a) + narrow::from_float16(b));
            });
        }
    }

    const std::string path;
    const int ranks, rank;
    Shared* shared = nullptr;
    bool ready = false;
    std::function<void()> submit;  // a call in progress, and how often it was polled
    int asked = 0;
    long fails_at = -1, operations = 0, calls = 0;
    std::atomic<bool> aborted{false}, error{false};
};

extern "C" {

// This symbol tells gyre that the library is the fake.
int gyre_fake_nccl = 1;

Result ncclGetVersion(int* version) {
    *version = 22809;
    return success;
}

Result ncclGetUniqueId(UniqueId* id) {
    static int count = 0;
    std::snprintf(id->internal, sizeof id->internal, "/dev/shm/gyre-fake-nccl-%d-%d", getpid(),
                  count++);
    const int file = open(id->internal, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const bool made = file >= 0 && ftruncate(file, sizeof(Shared)) == 0;
    close(file);
    return made ? success : system_error;
}

Result ncclCommInitRankConfig(Handle* comm, int ranks, UniqueId id, int rank, Config* config) {
    if (config->size != sizeof(Config) || config->magic != Config{}.magic ||
        config->blocking != 0 || ranks > kMostRanks) {
        return invalid_argument;
    }
    *comm = new Communicator(id.internal, ranks, rank);
    return in_progress;
}

Result ncclCommGetAsyncError(Handle comm, Result* state) {
    *state = success;
    if (comm->error) {
        *state = remote_error;
    } else if (!comm->ready) {
        comm->ready = comm->shared->joined >= comm->ranks;
        *state = comm->ready ? success : in_progress;
    } else if (comm->submit) {
        if (comm->asked++ == 0) {
            *state = in_progress;
        } else {
            comm->submit();
            comm->submit = nullptr;
        }
    }
    return success;
}

Result ncclAllReduce(const void* from, void* to, std::size_t elems, Type type, Operation operation,
                     Handle comm, Stream stream) {
    if (from != to || elems == 0 || operation != sum || comm->submit || !comm->ready) {
        return invalid_argument;
    }
    return comm->begin(stream, [=] { comm->sum_up(to, elems, type); });
}

Result ncclAllGather(const void* from, void* to, std::size_t elems, Type type, Handle comm,
                     Stream stream) {
    auto* data = static_cast<std::byte*>(to);
    const std::size_t bytes = elems * (type == float32 ? 4 : 2);
    if (from != data + static_cast<std::size_t>(comm->rank) * bytes || elems == 0 || comm->submit ||
        !comm->ready) {
        return invalid_argument;
    }
    return comm->begin(stream, [=] { comm->gather(data, bytes); });
}

Result ncclReduceScatter(const void* from, void* to, std::size_t elems, Type type,
                         Operation operation, Handle comm, Stream stream) {
    auto* data = static_cast<std::byte*>(const_cast<void*>(from));
    const std::size_t bytes = elems * (type == float32 ? 4 : 2);
    const auto rank = static_cast<std::size_t>(comm->rank);
    const auto ranks = static_cast<std::size_t>(comm->ranks);
    if (to != data + rank * bytes || elems == 0 || operation != sum || comm->submit ||
        !comm->ready) {
        return invalid_argument;
    }
    return comm->begin(stream, [=] {
        std::vector<std::byte> sums(data, data + ranks * bytes);
        comm->sum_up(sums.data(), elems * ranks, type);
        std::memcpy(data + rank * bytes, sums.data() + rank * bytes, bytes);
    });
}

Result ncclCommFinalize(Handle comm) {
    comm->asked = 0;
    comm->submit = [] {};
    return in_progress;
}

Result ncclCommDestroy(Handle comm) {
    delete comm;
    return success;
}

Result ncclCommAbort(Handle comm) {
    unlink(comm->path.c_str());
    while (!fault("abort").empty()) {
        std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    comm->aborted = true;  // `comm` stays allocated, as work on the stream may still use it
    return success;
}

const char* ncclGetErrorString(Result result) {
    return result == remote_error ? "remote process exited or there was a network error"
                                  : "an error of the fake NCCL";
}

const char* ncclGetLastError(Handle comm) {
    return comm != nullptr && comm->error ? "fake: connection closed by the remote peer" : "";
}

}  // extern "C"
