// The user's settings for how ranks start and how long they wait for each other.
#pragma once

#include <optional>
#include <string>

namespace gyre::comm {

// Settings of the launch. Empty ones are taken from the environment.
struct LaunchSpec {
    std::string comm = "auto";     // auto, nccl, mpi, gloo
    std::string init_method = {};  // mpi, env://, tcp://HOST:PORT, file:///PATH
    std::optional<int> rank = {}, world_size = {};
    std::string job_id = {};         // tells jobs apart that meet on one port or file
    bool insecure = false;           // ranks of several hosts may meet without a secret
    double init_timeout = 60.0;      // seconds until all ranks must have met
    double timeout = 60.0;           // seconds that a rank waits for the others at most
    bool share_gpu = false;          // ranks may share a GPU, also where they reduce over NCCL
    std::string flight_record = {};  // path of what each rank writes on failure; empty: none

    // Seconds of one collective: longer than `timeout`, so that the watchdog, which can say more,
    // speaks first.
    double collective_timeout() const { return timeout + 15.0; }
};

}  // namespace gyre::comm
