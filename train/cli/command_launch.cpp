// gyre launch: the ranks of a job on this host, and on others with it, without mpirun.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "comm/launch/local_ranks.hpp"
#include "comm/launch/rendezvous.hpp"
#include "kernels/make_backend.hpp"
#include "train/cli/commands.hpp"

namespace gyre::train {

int run_launch(const LaunchCommandOptions& options, const std::vector<std::string>& command) {
    if (!gloo_available()) {
        throw usage_error(
            "launch: it needs Gloo, which this build lacks; use mpirun, or install libgloo-dev "
            "and build again");
    }
    const int gpus = options.gpus ? cuda_device_count() : 0;
    if (options.gpus && gpus == 0) {
        throw usage_error("--gpus: no GPU is found here (see `gyre info`); give -n N");
    }
    if (!options.gpus && !options.ranks) {
        throw usage_error("launch: give the number of ranks with -n N, or --gpus");
    }
    if (command.empty()) {
        throw usage_error(
            "launch: what are the ranks to do? As in gyre launch -n 2 -- train --data mnist");
    }
    LocalRanksSpec job = options.job;
    job.ranks = options.gpus ? gpus : *options.ranks;
    NodesSpec& hosts = job.hosts;
    hosts.node = options.node.value_or(0);
    hosts.insecure = std::ranges::find(command, "--insecure") != command.end();
    if (hosts.most > 1 && (!options.node || hosts.master_addr.empty())) {
        throw usage_error(fmt::format(
            "launch: --nnodes {} also needs --node-rank, which is 0 to {} on the hosts, "
            "and --master-addr, the address of the host with --node-rank 0",
            nnodes_text(hosts), hosts.most - 1));
    }
    if (hosts.node >= hosts.most) {
        throw usage_error(fmt::format("launch: --node-rank {} of {} hosts: they count from 0 to {}",
                                      hosts.node, hosts.most, hosts.most - 1));
    }
    std::vector<std::string> words = {std::filesystem::read_symlink("/proc/self/exe").string()};
    words.insert(words.end(), command.begin(), command.end());
    return run_local_ranks(job, words);
}

}  // namespace gyre::train
