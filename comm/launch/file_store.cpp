// The ranks' store in a folder that all of them see.
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>

#include "base/host_name.hpp"
#include "base/private_file.hpp"
#include "comm/launch/meeting_error.hpp"
#include "comm/launch/rendezvous.hpp"

namespace gyre::comm {
namespace {

// Keys are files in a folder that rank 0 makes; each is written elsewhere first and then linked to
// its name, which fails if the name is taken, on network file systems too.
class FileStore final : public Store {
 public:
    FileStore(const StartUp& start_up, double timeout_seconds)
        : start_up_(start_up), limits_(start_up.world_size) {
        deadline = deadline_in(timeout_seconds);
        if (start_up.rank == 0) {
            // A file in its place, or a folder that is not there, is told by what cannot be
            // written.
            made_ = mkdir(start_up.path.c_str(), 0700) == 0;
        }
    }
    ~FileStore() override { leave(); }

    void leave() override {
        if (start_up_.rank != 0 || !own_) {
            return;
        }
        std::error_code ignored;
        for (const auto& entry : std::filesystem::directory_iterator(start_up_.path, ignored)) {
            if (entry.path().filename().string().starts_with("gyre.")) {
                std::filesystem::remove(entry.path(), ignored);
            }
        }
        if (made_) {
            std::filesystem::remove(start_up_.path, ignored);
        }
    }

    bool set(const std::string& key, const std::string& value) override {
        const auto name = file(key);
        const auto draft = file(fmt::format("{}.draft-{}-{}", key, host_name(), getpid()));
        if (const int error = write_private(draft, value); error != 0) {
            throw meeting_error(
                fmt::format("`init-method` {}: cannot write {}: {}; the path must "
                            "be a new folder in one that all ranks can write to",
                            where(), draft.string(), error_text(error)));
        }
        const int result = link(draft.c_str(), name.c_str());
        const int error = errno;
        unlink(draft.c_str());
        if (result != 0 && error != EEXIST) {
            throw meeting_error(fmt::format("`init-method` {}: cannot write {}: {}", where(),
                                            name.string(), error_text(error)));
        }
        if (result == 0) {
            own_ = true;
        }
        return result == 0;
    }
    std::optional<std::string> find(const std::string& key) override {
        std::ifstream in(file(key), std::ios::binary);
        if (!in) {
            return std::nullopt;
        }
        std::error_code ignored;
        const auto bytes = std::filesystem::file_size(file(key), ignored);
        std::string value(std::min<std::size_t>(ignored ? 0 : bytes, limits_.value), '\0');
        in.read(value.data(), static_cast<std::streamsize>(value.size()));
        value.resize(static_cast<std::size_t>(in.gcount()));
        return value;
    }
    std::string where() const override { return fmt::format("file://{}", start_up_.path.string()); }
    std::string remedy() const override {
        return fmt::format("give each job a path of its own, or remove {} if that job has ended",
                           start_up_.path.string());
    }

 private:
    std::filesystem::path file(std::string key) const {
        std::replace(key.begin(), key.end(), '/', '.');
        return start_up_.path / ("gyre." + key);
    }
    const StartUp start_up_;
    const StoreLimits limits_;
    std::atomic<bool> made_{false}, own_{false};
};

}  // namespace

std::unique_ptr<Store> make_file_store(const StartUp& start_up, double timeout_seconds) {
    return std::make_unique<FileStore>(start_up, timeout_seconds);
}

}  // namespace gyre::comm
