// The folder in which the ranks of one launcher meet.
#pragma once

#include <filesystem>

#include "comm/launch/socket.hpp"

namespace gyre::comm {

// A new folder for temporary files. A process of its own removes it, when the launcher lets go of
// it or has ended in whatever way.
class MeetingFolder {
 public:
    // Throws Error(communication).
    MeetingFolder();
    ~MeetingFolder();
    MeetingFolder(const MeetingFolder&) = delete;
    MeetingFolder& operator=(const MeetingFolder&) = delete;
    const std::filesystem::path& path() const { return path_; }

 private:
    [[noreturn]] void await_end(const Socket& there) const;

    std::filesystem::path path_;
    Socket here_;  // at its other end is that process
};

}  // namespace gyre::comm
