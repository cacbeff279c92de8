#include "comm/launch/meeting_folder.hpp"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <system_error>
#include <thread>

#include "comm/launch/meeting_error.hpp"

namespace gyre::comm {

MeetingFolder::MeetingFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "gyre-launch-XXXXXX").string();
    std::array<int, 2> ends{};
    if (mkdtemp(name.data()) == nullptr) {
        throw launcher_error(
            fmt::format("no folder {} can be made for the ranks to meet in", name));
    }
    path_ = name;
    std::fflush(nullptr);
    // The child's child belongs to nobody here.
    pid_t child = -1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0) {
        here_ = Socket(ends[0]);
        Socket there(ends[1]);
        child = fork();
        if (child == 0) {
            here_.close();
            if (fork() == 0) {
                await_end(there);
            }
            _exit(0);
        }
    }
    if (child < 0) {
        const int error = errno;
        rmdir(path_.c_str());
        errno = error;
        throw launcher_error("the process that removes the ranks' folder cannot be started");
    }
    waitpid(child, nullptr, 0);
}

void MeetingFolder::await_end(const Socket& there) const {
    setsid();  // no signal of the terminal's ends it
    // The port of a launcher that is killed is free at once.
    dup2(there.fd(), STDIN_FILENO);
    close_range(STDERR_FILENO + 1, ~0u, 0);
    char byte = 0;
    Socket(STDIN_FILENO).receive_all(&byte, 1);
    // A rank whose parent was killed may still write to it for a moment.
    std::error_code error;
    for (int i = 0; i < 50; ++i) {
        std::filesystem::remove_all(path_, error);
        if (!std::filesystem::exists(path_, error)) {
            break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    _exit(0);
}

MeetingFolder::~MeetingFolder() {
    char byte = 0;
    shutdown(here_.fd(), SHUT_WR);
    here_.receive_all(&byte, 1);
}

}  // namespace gyre::comm
