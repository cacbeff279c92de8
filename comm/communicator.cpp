// The single-process communicator, and what is built on any communicator's few operations.
#include "comm/communicator.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <new>
#include <system_error>

namespace gyre::comm {
namespace {

class Complete final : public Request {
 public:
    void wait() override {}
};

class SingleCommunicator final : public Communicator {
 public:
    std::string description() const override { return "a single process"; }
    int rank() const override { return 0; }
    int size() const override { return 1; }
    int local_rank() const override { return 0; }
    int local_size() const override { return 1; }
    std::unique_ptr<Request> start(const Collective&) override {
        return std::make_unique<Complete>();
    }
    void allreduce_sum(std::span<double>) override {}
    void broadcast(void*, std::size_t, int) override {}
    void barrier() override {}
    [[noreturn]] void abort(int exit_code) noexcept override { std::_Exit(exit_code); }
};

}  // namespace

std::unique_ptr<Communicator> make_single_communicator() {
    return std::make_unique<SingleCommunicator>();
}

std::string broadcast_string(Communicator& comm, std::string text, int root) {
    std::uint64_t bytes = text.size();
    comm.broadcast(&bytes, sizeof bytes, root);
    text.resize(bytes);
    comm.broadcast(text.data(), bytes, root);
    return text;
}

bool is_out_of_resources(const std::exception& other) {
    // The standard library throws this for a thread that does not start.
    const auto* const failed = dynamic_cast<const std::system_error*>(&other);
    return dynamic_cast<const std::bad_alloc*>(&other) != nullptr ||
           (failed != nullptr && failed->code() == std::errc::resource_unavailable_try_again);
}

Error internal_error(const std::exception& other) {
    if (dynamic_cast<const std::bad_alloc*>(&other) != nullptr) {
        return {ExitCode::internal,
                "out of memory; use a smaller batch, model or data set, or fewer ranks on this "
                "host"};
    }
    if (is_out_of_resources(other)) {
        return {ExitCode::internal,
                "no thread could be started: memory, or the number of processes, is too limited "
                "here (ulimit -v, ulimit -u); raise the limit, or use fewer `threads` or fewer "
                "ranks on this host"};
    }
    return {ExitCode::internal, other.what()};
}

void agree(Communicator& comm, const std::function<void()>& work) {
    std::string message;
    ExitCode code = ExitCode::success;
    try {
        work();
    } catch (const Error& error) {
        message = error.what();
        code = error.code();
    } catch (const std::exception& error) {
        message = internal_error(error).what();
        code = ExitCode::internal;
    }
    std::vector<double> codes(static_cast<std::size_t>(comm.size()));
    codes[static_cast<std::size_t>(comm.rank())] = static_cast<double>(code);
    comm.allreduce_sum(codes);
    int failed = 0, first = -1;
    for (int rank = comm.size() - 1; rank >= 0; --rank) {
        if (codes[static_cast<std::size_t>(rank)] != 0.0) {
            ++failed;
            first = rank;
        }
    }
    if (failed == 0) {
        return;
    }
    message = broadcast_string(comm, std::move(message), first);
    if (failed < comm.size()) {
        message = fmt::format("on rank {} ({} of {} ranks failed): {}", first, failed, comm.size(),
                              message);
    }
    throw AgreedError(
        static_cast<ExitCode>(static_cast<int>(codes[static_cast<std::size_t>(first)])), message);
}

void require_same_manifest(Communicator& comm, const std::vector<ManifestEntry>& entries) {
    std::string text;
    for (const ManifestEntry& entry : entries) {
        text += entry.name + '\0' + entry.value + '\0';
    }
    const std::string expected = broadcast_string(comm, text, 0);
    agree(comm, [&] {
        if (text == expected) {
            return;
        }
        std::size_t at = 0;
        const auto next = [&] {
            const std::size_t end = std::min(expected.find('\0', at), expected.size());
            std::string field = expected.substr(std::min(at, expected.size()), end - at);
            at = end + 1;
            return field;
        };
        for (const ManifestEntry& entry : entries) {
            const std::string name = next(), value = next();
            if (name != entry.name || value != entry.value) {
                throw Error(ExitCode::communication,
                            fmt::format("{} differs between the ranks: rank 0 has '{}', rank {} "
                                        "has '{}'; start all ranks with the same command, program "
                                        "and files",
                                        name, value, comm.rank(), entry.value));
            }
        }
        throw Error(ExitCode::communication,
                    fmt::format("rank {} runs another version of gyre than rank 0", comm.rank()));
    });
}

}  // namespace gyre::comm
