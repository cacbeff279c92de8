#include "train/cli/tutorial_flags.hpp"

namespace gyre::train {
namespace {

constexpr std::string_view kStart =
    "one process is one rank: mpirun -np N gyre train ..., or torchrun --no-python "
    "--nproc-per-node N gyre train ...";
constexpr std::string_view kTorchrun =
    "it stands before gyre: torchrun --no-python --nnodes M --nproc-per-node N --master-addr HOST "
    "gyre train ...";
constexpr std::string_view kMeet = "--init-method tcp://HOST:PORT --rank R --world-size N";
constexpr std::string_view kGpu =
    "each rank takes the GPU of its number on its host; CUDA_VISIBLE_DEVICES=N chooses others";
constexpr std::string_view kWorkers =
    "leave it out: the data set is in memory; --threads sets the threads of a rank";
constexpr std::string_view kStepSchedule =
    "--lr-schedule step --lr-step-size 1 --lr-gamma G : times G after every epoch";
constexpr std::string_view kSchedules =
    "--lr-schedule constant, step, cosine or one-cycle; it follows every step, not every epoch";
constexpr std::string_view kResume = "--save DIR, and --resume DIR to continue";
constexpr std::string_view kNarrow = "--precision bf16, or fp16, whose loss is scaled";

constexpr TutorialFlag kTutorialFlags[] = {
    {"--backend", "--comm", ""},
    {"--dist-backend", "--comm", ""},
    {"--dist-url", "--init-method", ""},
    {"--recipe", "--config", ""},
    {"--batch", "--batch-size", ""},
    {"--num-epochs", "--epochs", ""},
    {"--total-epochs", "--epochs", ""},
    {"-b", "--batch-size", ""},
    {"--learning-rate", "--lr", ""},
    {"--lr-warmup-epochs", "--warmup-epochs", ""},
    {"--wd", "--weight-decay", ""},
    {"--opt", "--optimizer", ""},
    {"--optim", "--optimizer", ""},
    {"--random-seed", "--seed", ""},
    {"--manual-seed", "--seed", ""},
    {"--print-freq", "--log-interval", ""},
    {"-p", "--log-interval", ""},
    {"--gradient-accumulation-steps", "--accumulate", ""},
    {"--clip-grad-norm", "--max-grad-norm", ""},
    {"--dataset", "--data", ""},
    {"--data-dir", "--data", ""},
    {"--data-path", "--data", ""},
    {"--root", "--data", ""},
    {"--arch", "--model", ""},
    {"-a", "--model", ""},
    {"--no-accel", "--no-cuda", ""},
    {"--cpu", "--no-cuda", ""},

    {"--json", "", "--metrics FILE.jsonl"},
    {"--tcp", "", kMeet},
    {"--port", "", kMeet},
    {"--local-rank", "",
     "leave it out: torchrun and mpirun say it; by hand: --rank R --world-size N"},
    {"--gpu", "", kGpu},
    {"--gpu-id", "", kGpu},
    {"--cuda", "", "--device cuda"},
    {"--use-cuda", "", "--device cuda"},
    {"--no-mps", "", "leave it out: --device is auto, cpu or cuda"},
    {"-n", "", kStart},
    {"-g", "", kStart},
    {"-nr", "", kStart},
    {"--nodes", "", kStart},
    {"--gpus", "", kStart},
    {"--num-gpus", "", kStart},
    {"--nr", "", kStart},
    {"-np", "", kStart},
    {"--nprocs", "", kStart},
    {"--num-processes", "", kStart},
    {"--multiprocessing-distributed", "", kStart},
    {"--nnodes", "", kTorchrun},
    {"--node-rank", "", kTorchrun},
    {"--nproc-per-node", "", kTorchrun},
    {"--master-addr", "", kTorchrun},
    {"--master-port", "", kTorchrun},
    {"-j", "", kWorkers},
    {"--workers", "", kWorkers},
    {"--num-workers", "", kWorkers},
    {"--gamma", "", kStepSchedule},
    {"--step-size", "", kStepSchedule},
    {"--lr-scheduler", "", kSchedules},
    {"--scheduler", "", kSchedules},
    {"--one-cycle", "", "--lr-schedule one-cycle"},
    {"--pretrained", "", "--init FILE starts from saved weights"},
    {"--start-epoch", "", kResume},
    {"--save-model", "", "--save DIR keeps best.safetensors and last.safetensors there"},
    {"--save-last", "", "--save DIR keeps last.safetensors there"},
    {"--snapshot-path", "", kResume},
    {"--model-dir", "", "--save DIR"},
    {"--model-filename", "", "--save DIR"},
    {"--evaluate", "", "gyre eval --weights FILE"},
    {"-e", "", "gyre eval --weights FILE"},
    {"--dry-run", "", "--epochs 1 --limit 64"},
    {"--use-syn", "", "gyre plan measures a step without data"},
    {"--dummy", "", "gyre plan measures a step without data"},
    {"--mixed-precision", "--precision", ""},
    {"--amp", "", kNarrow},
    {"--fp16", "", "--precision fp16"},
    {"--bf16", "", "--precision bf16"},
    {"--tf32", "", "--precision tf32"},
    {"--fp16-allreduce", "", "--comm-dtype fp16"},
};

}  // namespace

std::span<const TutorialFlag> tutorial_flags() {
    return kTutorialFlags;
}

}  // namespace gyre::train
