#include "train/cli/terminal.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "base/descriptor.hpp"
#include "comm/launch/local_ranks.hpp"

namespace gyre::train {
namespace {

constexpr int kUsualColumns = 80;  // if a terminal does not say
constexpr int kMostBar = 24, kLeastBar = 6;

std::string duration_text(double seconds) {
    const auto whole = static_cast<long>(std::ceil(seconds));
    return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                         : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

int columns_at(int terminal) {
    winsize size = {};
    return ioctl(terminal, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsualColumns;
}

}  // namespace

// mpirun gives each rank a terminal of its own, and `gyre launch` a pipe, wherever the output goes
// from there: under a launcher its standard output counts, the parent's.
int terminal_columns() {
    const bool launched = std::getenv(comm::kLaunchFolder) != nullptr;
    if (!launched && isatty(STDOUT_FILENO) == 0) {
        return 0;
    }
    if (!launched && std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) {
        return columns_at(STDOUT_FILENO);
    }
    std::error_code error;
    const auto target = std::filesystem::read_symlink(
        fmt::format("/proc/{}/fd/{}", static_cast<long>(getppid()), STDOUT_FILENO), error);
    if (error ||
        !(target.string().starts_with("/dev/pts/") || target.string().starts_with("/dev/tty"))) {
        return 0;
    }
    const Descriptor terminal(open(target.c_str(), O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
    return columns_at(terminal.fd()) - (launched ? comm::kRankColumns : 0);
}

int columns_of(const std::string& text) {
    return static_cast<int>(std::count_if(text.begin(), text.end(), [](char byte) {
        return (static_cast<unsigned char>(byte) & 0xC0u) != 0x80u;  // not within a character
    }));
}

std::string wrap(const std::vector<std::string>& items, const std::string& separator, int columns) {
    std::string text;
    int used = 0;
    for (const std::string& item : items) {
        const int more = columns_of(separator) + columns_of(item);
        if (text.empty()) {
            used = columns_of(item);
        } else if (columns > 0 && used + more > columns) {
            text += "\n  ";
            used = 2 + columns_of(item);
        } else {
            text += separator;
            used += more;
        }
        text += item;
    }
    return text;
}

std::string progress_line(const Progress& p, int columns) {
    std::string line =
        fmt::format("epoch {}/{}{}", p.epoch, p.epochs, p.evaluates ? " evaluating" : "");
    // In the order of their worth.
    std::vector<std::string> figures;
    if (!p.evaluates) {
        figures.push_back(fmt::format("loss {:.4f}", p.loss));
    }
    figures.push_back(fmt::format("ETA {}", duration_text(p.seconds_left)));
    if (!p.evaluates) {
        figures.push_back(fmt::format("{:.0f} images/s", p.images_per_second));
    }
    figures.push_back(fmt::format("{}/{}", p.done, p.images));
    // The last column stays free: some terminals begin a line when it is written.
    const int room = columns - 1;
    const int bar_columns = 3 + kLeastBar;
    int left = room - static_cast<int>(line.size());
    const bool has_bar = left >= bar_columns;
    left -= has_bar ? bar_columns : 0;
    std::string rest;
    for (const std::string& figure : figures) {
        const int more = 2 + static_cast<int>(figure.size());
        if (more <= left) {
            rest += "  " + figure;
            left -= more;
        }
    }
    if (has_bar) {
        const int length = std::min(kMostBar, kLeastBar + left);
        const double share = static_cast<double>(p.done) / static_cast<double>(p.images);
        const int filled = static_cast<int>(share * length);
        line += fmt::format(" [{:#<{}}{:.<{}}]", "", filled, "", length - filled);
    }
    line += rest;
    return line.substr(0, static_cast<std::size_t>(std::max(0, room)));
}

}  // namespace gyre::train
