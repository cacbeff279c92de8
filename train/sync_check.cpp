#include "train/sync_check.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <vector>

#include "train/hash.hpp"

namespace gyre::train {

void require_same_parameters(Communicator& comm, const Net& net, const std::string& when) {
    std::vector<std::string> names;
    std::vector<std::uint64_t> own;
    net.visit_parameters([&](const std::string& name, const std::vector<std::int64_t>&,
                             std::span<const float> values) {
        names.push_back(name);
        own.push_back(hash_bytes(values.data(), values.size_bytes()));
    });
    std::vector<std::uint64_t> roots = own;
    comm.broadcast(roots.data(), roots.size() * sizeof(std::uint64_t), 0);
    // [tensor][rank]: 1 if the rank differs.
    const auto ranks = static_cast<std::size_t>(comm.size());
    std::vector<double> differs(names.size() * ranks);
    for (std::size_t i = 0; i < names.size(); ++i) {
        differs[i * ranks + static_cast<std::size_t>(comm.rank())] = own[i] != roots[i];
    }
    comm.allreduce_sum(differs);
    for (std::size_t i = 0; i < names.size(); ++i) {
        std::string where;
        for (std::size_t r = 0; r < ranks; ++r) {
            if (differs[i * ranks + r] != 0.0) {
                where += fmt::format("{}{}", where.empty() ? "" : ", ", r);
            }
        }
        if (!where.empty()) {
            throw AgreedError(
                ExitCode::communication,
                fmt::format("{}: parameter {} differs from rank 0's on rank {}; the ranks have "
                            "drifted apart, so nothing they learn from here on is right: look for "
                            "faulty memory or a changed binary there, and start again from saved "
                            "weights",
                            when, names[i], where));
        }
    }
}

void SyncCheck::on_pause(const Training& training) {
    if (due_) {
        require_same_parameters(
            training.session.communicator(), training.session.net(),
            fmt::format("epoch {}, step {}", training.cursor.epoch, training.cursor.step));
    }
    due_ = false;
}

}  // namespace gyre::train
