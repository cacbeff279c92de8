#include "train/threads.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace gyre::train {

int choose_threads(int asked, const Communicator& comm) {
    if (asked > 0) {
        return asked;
    }
    const int processors = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    cpu_set_t mask;
    const int allowed =
        sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : processors;
    // A launcher that binds its ranks has divided the processors already.
    return allowed < processors ? allowed : std::max(1, processors / comm.local_size());
}

}  // namespace gyre::train
