// Options of the subcommands, and the tables of their flags.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/launch/local_ranks.hpp"
#include "kernels/ops/shapes.hpp"
#include "train/plan.hpp"
#include "train/run_spec.hpp"
#include "train/setting.hpp"
#include "train/settings.hpp"

namespace gyre::train {

// gyre train has the whole of RunSpec, others have parts of it and options of their own.
struct EvalOptions : RunSpec {
    EvalOptions() { net.model = {}; }  // the model that the weights file names
    std::string weights;
    std::optional<int> shards = {};  // as the weights were trained, if the ranks are not more
    bool per_class = false, confusion = false;
};

struct VerifyOptions : RunSpec {
    VerifyOptions() { data.path = {}; }  // that of the training
    std::string run;                     // folder of --save
    std::string from, to;  // checkpoints to begin from and to end at; empty: start, end
};

struct ReplayOptions : VerifyOptions {
    std::int64_t step = 0;  // from 1, over all epochs
};

struct PredictOptions : RunSpec {
    std::string weights;
    std::vector<std::string> images;  // files
    int top = 3;                      // classes of an image
    bool csv = false;
};

struct PlanOptions : RunSpec {
    PlanOptions() { data.classes = 10; }  // MNIST's, as the image is: there is no data set to ask
    Shape image = {1, 28, 28};
    std::vector<int> ranks;
    Link link;
    AllreduceAlgorithm algorithm = AllreduceAlgorithm::fastest;
    std::vector<double> compute_ms;  // forward, backward, update; empty: measured
    std::string json;                // path; empty: none
};

struct InfoOptions {
    // A file to show instead of this machine; empty: none. A checkpoint is checked to be one.
    std::string model, weights, checkpoint;
    Shape image = {1, 28, 28};
    int classes = 10;
    bool commands = false;  // show the command line itself
};

struct ExportOptions {
    std::string weights, onnx;  // files
};

struct ImportOptions {
    std::string net, output;  // file, folder
    std::string mean, std;    // numbers; empty: as the file says
    std::optional<Resize> resize;
};

struct DiffOptions {
    std::string first, second;  // files, or folders of --save
};

struct PlotOptions {
    std::vector<std::string> runs;  // files of metrics
    std::string output;
};

struct LaunchCommandOptions {
    std::optional<int> ranks;
    bool gpus = false;  // as many as there are
    std::optional<int> node;
    LocalRanksSpec job;
};

// With the rows that only a command line has, such as --config.
std::vector<Setting> train_flags(RunSpec& options);
std::vector<Setting> verify_flags(VerifyOptions& options);
std::vector<Setting> replay_flags(ReplayOptions& options);
std::vector<Setting> eval_flags(EvalOptions& options);
std::vector<Setting> plan_flags(PlanOptions& options);
std::vector<Setting> info_flags(InfoOptions& options);
std::vector<Setting> predict_flags(PredictOptions& options);
std::vector<Setting> export_flags(ExportOptions& options);
std::vector<Setting> import_flags(ImportOptions& options);
std::vector<Setting> diff_flags(DiffOptions& options);
std::vector<Setting> plot_flags(PlotOptions& options);
std::vector<Setting> launch_flags(LaunchCommandOptions& options);
// The value of --nnodes.
std::string nnodes_text(const comm::NodesSpec& hosts);

}  // namespace gyre::train
