// gyre plot: loss and accuracy of one or several trainings as a picture, drawn by gnuplot.
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "train/cli/commands.hpp"

namespace gyre::train {
namespace {

// A start's, a step's or an epoch's figures, by column. A start's "resumed" is in epochs.
using Row = std::map<std::string, double>;

constexpr std::streamsize kMostLineBytes = 1 << 16;
constexpr double kMostEpochs = std::numeric_limits<int>::max();
constexpr const char *kThin = "lines lw 0.5", *kDashed = "linespoints pt 7 ps 0.3 dt 2",
                     *kThick = "linespoints pt 7 ps 0.4 lw 2";
struct Curve {
    const char *column, *title, *style;
    bool accuracy;  // drawn in percent, in the second picture
};
constexpr std::array kCurves = {
    Curve{"loss", "each step", kThin, false},        Curve{"train_loss", "train", kDashed, false},
    Curve{"test_loss", "test", kThick, false},       Curve{"val_loss", "val", kThick, false},
    Curve{"train_accuracy", "train", kDashed, true}, Curve{"test_accuracy", "test", kThick, true},
    Curve{"val_accuracy", "val", kThick, true}};

// The training began, or resumed after so many epochs.
struct Start {
    double epochs = 0.0;
    int ranks = 0;
};

struct Run {
    std::string name;
    std::vector<Start> starts = {};
    std::array<std::string, kCurves.size()> points;  // lines of epoch and value, by column
    double epochs = 0.0;                             // of the last point
};

Row from_json(const std::string& line) {
    Row row;
    const auto json = nlohmann::json::parse(line);
    for (const auto& [name, value] : json.items()) {
        if (value.is_number()) {
            row[name] = value.get<double>();
        }
    }
    if (const auto resumed = json.find("resumed"); resumed != json.end()) {
        row["resumed"] =
            resumed->at("epoch").get<double>() - 1.0 +
            resumed->at("step").get<double>() / json.at("steps_per_epoch").get<double>();
    }
    return row;
}

std::vector<std::string> cells(const std::string& line) {
    std::vector<std::string> all;
    std::istringstream in(line);
    for (std::string cell; std::getline(in, cell, ',');) {
        all.push_back(cell);
    }
    return all;
}

Row from_csv(const std::vector<std::string>& columns, const std::string& line) {
    Row row;
    const std::vector<std::string> values = cells(line);
    for (std::size_t i = 1; i < values.size(); ++i) {  // the first is the event's name
        if (!values[i].empty() && values[i] != "true" && values[i] != "false") {
            row[columns.at(i)] = std::stod(values[i]);
        }
    }
    return row;
}

std::vector<Row> read_rows(const std::string& path) {
    std::ifstream file(path);
    std::vector<Row> rows;
    std::vector<std::string> columns;
    int number = 0;
    std::string buffer(kMostLineBytes, '\0');
    while (file.getline(buffer.data(), kMostLineBytes) || file.gcount() > 0) {
        const std::string line = buffer.substr(0, buffer.find('\0'));
        ++number;
        try {
            if (!file) {  // it has more bytes
                throw std::length_error(line);
            } else if (line.starts_with("event,")) {
                columns = cells(line);
            } else if (line.starts_with("{") || !columns.empty()) {
                const Row row = columns.empty() ? from_json(line) : from_csv(columns, line);
                for (const auto& [column, least] : {std::pair{"epoch", 1.0}, {"resumed", 0.0}}) {
                    if (const auto epoch = row.find(column);
                        epoch != row.end() &&
                        !(epoch->second >= least && epoch->second <= kMostEpochs)) {
                        throw std::out_of_range(line);
                    }
                }
                rows.push_back(row);
            } else {
                throw std::invalid_argument(line);
            }
        } catch (const std::exception&) {
            throw input_error(fmt::format(
                "{}, line {}: that is not a line of gyre train --metrics; give such a file", path,
                number));
        }
    }
    if (number == 0) {
        throw input_error(fmt::format(
            "{}: no file with lines that can be read; give one of gyre train --metrics", path));
    }
    return rows;
}

Run read_run(const std::string& path) {
    const std::vector<Row> rows = read_rows(path);
    Run run{.name = path, .points = {}};
    double last_step = 0.0;
    std::map<int, double> steps;  // the greatest of each epoch
    for (const Row& row : rows) {
        if (row.contains("ranks")) {
            const auto resumed = row.find("resumed");
            run.starts.push_back({resumed == row.end() ? 0.0 : resumed->second,
                                  static_cast<int>(std::clamp(row.at("ranks"), 1.0, 1e6))});
        }
        if (row.contains("epoch") && row.contains("step")) {
            last_step = std::max(last_step, row.at("step"));
            steps[static_cast<int>(row.at("epoch"))] = last_step;
        }
    }
    if (steps.empty()) {
        throw input_error(fmt::format("{}: no step and no epoch to draw", path));
    }
    // Steps of a whole epoch; if there is only one, as many as it has.
    const double of_epoch = steps.begin()->second / steps.begin()->first;
    for (const Row& row : rows) {
        for (std::size_t i = 0; i < kCurves.size() && row.contains("step"); ++i) {
            if (const auto value = row.find(kCurves[i].column); value != row.end()) {
                const double epoch = row.at("step") / of_epoch;
                run.epochs = std::max(run.epochs, epoch);
                run.points[i] += fmt::format("{} {}\n", epoch,
                                             (kCurves[i].accuracy ? 100.0 : 1.0) * value->second);
            }
        }
    }
    return run;
}

// For gnuplot, in single quotes.
std::string quoted(const std::string& text) {
    std::string result(1, '\'');
    for (const char c : text) {
        result += c == '\'' ? "''" : std::string(1, static_cast<unsigned char>(c) < ' ' ? '?' : c);
    }
    return result + "'";
}

// One of the two pictures: these curves of all runs, which are told apart by their colours, and in
// the first the styles of all curves, in black if there are several runs.
std::string plot(const std::vector<Run>& runs, bool accuracy) {
    std::vector<std::string> all;
    std::map<std::string, std::string> styles;
    for (std::size_t r = 0; r < runs.size(); ++r) {
        for (std::size_t i = 0; i < kCurves.size(); ++i) {
            const auto& [column, title, style, percent] = kCurves[i];
            if (!runs[r].points[i].empty()) {
                styles[title] = style;
                if (percent == accuracy) {
                    all.push_back(
                        fmt::format("$d{}_{} using 1:2 with {} lc {} notitle", r, i, style, r + 1));
                }
            }
        }
    }
    for (const auto& [title, style] : styles) {
        if (!accuracy) {
            all.push_back(fmt::format("NaN with {} lc {} title {}", style,
                                      runs.size() == 1 ? 1 : -1, quoted(title)));
        }
    }
    return all.empty() ? "" : fmt::format("plot {}\n", fmt::join(all, ", "));
}

// Dotted lines where the run resumed, with the number of ranks where that changed.
std::string marks(const Run& run, std::size_t color) {
    std::string text;
    for (std::size_t i = 1; i < run.starts.size(); ++i) {
        const auto& [epochs, ranks] = run.starts[i];
        text += fmt::format(
            "set arrow from first {0}, graph 0 to first {0}, graph 1 nohead dt 3 lc {1}\n", epochs,
            color);
        if (ranks != run.starts[i - 1].ranks) {
            text +=
                fmt::format("set label '{} rank{}' at first {}, graph 0.04 offset 0.3,0 tc lt {}\n",
                            ranks, ranks == 1 ? "" : "s", epochs, color);
        }
    }
    return text;
}

// As short as tells the runs apart.
void shorten_names(std::vector<Run>& runs) {
    for (const bool with_folder : {false, true}) {
        const auto short_name = [with_folder](const Run& run) {
            const std::filesystem::path path = run.name, name = path.filename();
            return (with_folder ? path.parent_path().filename() / name : name).string();
        };
        std::set<std::string> names;
        for (const Run& run : runs) {
            names.insert(short_name(run));
        }
        if (names.size() == runs.size()) {
            for (Run& run : runs) {
                run.name = short_name(run);
            }
            return;
        }
    }
}

std::string script(const std::vector<Run>& runs, const std::string& output) {
    constexpr std::size_t kNamesInRow = 3;
    constexpr int kPlot = 420, kName = 22, kBelow = 50;  // heights in pixels
    const std::size_t rows = runs.size() == 1 ? 0 : (runs.size() + kNamesInRow - 1) / kNamesInRow;
    const double height = kPlot + kName * static_cast<double>(rows);
    std::string text = fmt::format(
        "set terminal {} size 1000,{:.0f} noenhanced background '#ffffff'\nset output {}\n",
        output.ends_with(".png") ? "pngcairo" : "svg", height, quoted(output));
    double epochs = 0.0;
    for (std::size_t r = 0; r < runs.size(); ++r) {
        epochs = std::max(epochs, runs[r].epochs);
        for (std::size_t i = 0; i < kCurves.size(); ++i) {
            text += fmt::format("$d{}_{} << EOD\n{}EOD\n", r, i, runs[r].points[i]);
        }
    }
    text += fmt::format(
        "set multiplot\nset grid\nset xrange [0:{}]\nset xlabel 'epoch' offset 0,0.3\n"
        "set tmargin at screen 0.97\nset bmargin at screen {}\nset key top right samplen 3\n",
        1.02 * epochs, (kBelow + kName * static_cast<double>(rows)) / height);
    for (std::size_t r = 0; r < runs.size(); ++r) {
        text += marks(runs[r], r + 1);
    }
    for (std::size_t r = 0; r < runs.size() && rows > 0; ++r) {
        const std::size_t row = rows - 1 - r / kNamesInRow;  // from the bottom
        text += fmt::format("set label {} at screen {}, screen {} tc lt {}\n",
                            quoted("━━ " + runs[r].name),
                            0.07 + 0.31 * static_cast<double>(r % kNamesInRow),
                            (kName * static_cast<double>(row) + 14) / height, r + 1);
    }
    return text +
           "set lmargin at screen 0.07\nset rmargin at screen 0.49\nset ylabel 'loss' offset "
           "1,0\n" +
           plot(runs, false) +
           "unset key\nunset label\nset lmargin at screen 0.57\nset rmargin at screen 0.99\n"
           "set ylabel 'accuracy in %'\n" +
           plot(runs, true) + "unset multiplot\n";
}

void draw(const std::string& text, const std::string& output) {
    std::signal(SIGPIPE, SIG_IGN);  // of a gnuplot that ends early
    constexpr int kMissing = 127;   // as the shell has it
    std::FILE* gnuplot = popen("command -v gnuplot > /dev/null || exit 127; exec gnuplot", "w");
    if (gnuplot == nullptr) {
        throw Error(ExitCode::internal, "gyre plot: no process could be started for gnuplot");
    }
    std::fwrite(text.data(), 1, text.size(), gnuplot);
    const int status = pclose(gnuplot);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kMissing) {
        throw input_error(
            "gyre plot draws with gnuplot, which is not found; install it (Debian, Ubuntu: "
            "apt-get install gnuplot-nox)");
    }
    if (status != 0) {
        throw input_error(fmt::format("-o {}: gnuplot failed, as it says above", output));
    }
}

}  // namespace

ExitCode run_plot(const PlotOptions& options) {
    const auto folder = std::filesystem::absolute(options.output).parent_path();
    if (!std::filesystem::is_directory(folder)) {
        throw input_error(fmt::format("-o {}: there is no folder {}; check the path",
                                      options.output, folder.string()));
    }
    std::vector<Run> runs;
    for (const std::string& path : options.runs) {
        runs.push_back(read_run(path));
    }
    shorten_names(runs);
    draw(script(runs, options.output), options.output);
    fmt::print("{}\n", options.output);
    return ExitCode::success;
}

}  // namespace gyre::train
