// Every flag of `gyre train` reaches its option, and the comparison of the ranks.
#include <array>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/program/small_training.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/expect_error.hpp"

using namespace gyre;
using namespace gyre::train;
using namespace gyre::test;

namespace {

// A flag, a value, and whether that has arrived.
struct Row {
    const char* flag;
    const char* value;
    std::function<bool(const RunSpec&)> arrived;
    // True if ranks that differ in it are refused: it decides what is computed, or what is said
    // between the ranks.
    bool compared;
};
using O = const RunSpec&;
const std::vector<Row> kRows = {
    {"--data", "x", [](O o) { return o.data.path == "x"; }, false},  // its contents are
    {"--classes", "7", [](O o) { return o.data.classes == 7; }, true},
    {"--resize", "8,centercrop4x7",
     [](O o) { return o.data.resize && o.data.resize->width == 7 && o.data.resize->shorter == 8; },
     true},
    {"--skip-bad", "7", [](O o) { return o.data.skip_bad == 7; }, true},
    {"--mean", "0.25,0.5",
     [](O o) {
         return o.data.mean == std::vector{0.25f, 0.5f};
     },
     true},
    {"--std", "0.25,0.5",
     [](O o) {
         return o.data.stddev == std::vector{0.25f, 0.5f};
     },
     true},
    {"--test-batch-size", "7", [](O o) { return o.evaluation.batch_size == 7; }, true},
    {"--device", "emulated", [](O o) { return o.device.device == "emulated"; }, true},
    {"--no-cuda", "", [](O o) { return o.device.device == "cpu"; }, true},
    {"--kernels", "auto", [](O o) { return o.device.kernels == "auto"; }, true},
    {"--kernels-cache", "x", [](O o) { return o.device.kernels_cache == "x"; }, false},
    {"--deterministic", "", [](O o) { return o.device.deterministic; }, true},
    {"--precision", "bf16", [](O o) { return o.net.precision == Precision::bf16; }, true},
    {"--threads", "3", [](O o) { return o.device.threads == 3; }, false},
    {"--comm", "gloo", [](O o) { return o.launch.comm == "gloo"; }, true},
    {"--init-method", "mpi", [](O o) { return o.launch.init_method == "mpi"; }, false},
    {"--rank", "3", [](O o) { return o.launch.rank == 3; }, false},
    {"--world-size", "7", [](O o) { return o.launch.world_size == 7; }, true},
    {"--job-id", "x", [](O o) { return o.launch.job_id == "x"; }, true},
    {"--insecure", "", [](O o) { return o.launch.insecure; }, false},
    {"--init-timeout", "7", [](O o) { return o.launch.init_timeout == 7.0; }, false},
    {"--share-gpu", "", [](O o) { return o.launch.share_gpu; }, true},
    {"--timeout", "7", [](O o) { return o.launch.timeout == 7.0; }, true},
    {"--flight-record", "x", [](O o) { return o.launch.flight_record == "x"; }, false},
    {"--model", "x", [](O o) { return o.net.model == "x"; }, true},
    {"--label-smoothing", "0.25", [](O o) { return o.loss.label_smoothing == 0.25f; }, true},
    {"--target-accuracy", "90", [](O o) { return o.stop.target_accuracy == 90.0; }, true},
    {"--patience", "7", [](O o) { return o.stop.patience == 7; }, true},
    {"--max-seconds", "7", [](O o) { return o.stop.max_seconds == 7.0; }, true},
    {"--metrics", "x.csv", [](O o) { return o.reports.metrics == "x.csv"; }, false},
    {"--tensorboard", "x", [](O o) { return o.reports.tensorboard == "x"; }, false},
    {"--trace", "x", [](O o) { return o.reports.trace == "x"; }, false},
    {"--trace-steps", "7-9",
     [](O o) { return o.reports.trace_steps.first == 7 && o.reports.trace_steps.last == 9; }, true},
    {"--epochs", "3", [](O o) { return o.stop.epochs == 3; }, true},
    {"--batch-size", "7", [](O o) { return o.batch.batch_size == 7; }, true},
    {"--global-batch", "7", [](O o) { return o.batch.global_batch == 7; }, true},
    {"--accumulate", "7", [](O o) { return o.batch.accumulate == 7; }, true},
    {"--virtual-ranks", "8", [](O o) { return o.batch.shards == 8; }, true},
    {"--shards", "8", [](O o) { return o.batch.shards == 8; }, true},
    {"--limit", "7", [](O o) { return o.data.limit == 7; }, true},
    {"--val-split", "0.25", [](O o) { return o.data.val_split == 0.25; }, true},
    {"--balanced-sampler", "", [](O o) { return o.data.balanced; }, true},
    {"--seed", "7", [](O o) { return o.seed == 7; }, true},
    {"--optimizer", "adamw", [](O o) { return o.optimizer.rule == UpdateRule::adamw; }, true},
    {"--lr", "0.25", [](O o) { return o.optimizer.learning_rate == 0.25f; }, true},
    {"--lr-schedule", "cosine",
     [](O o) { return o.optimizer.schedule.kind == ScheduleKind::cosine; }, true},
    {"--lr-step-size", "7", [](O o) { return o.optimizer.schedule.step_epochs == 7; }, true},
    {"--lr-patience", "3", [](O o) { return o.optimizer.schedule.patience == 3; }, true},
    {"--lr-gamma", "0.25", [](O o) { return o.optimizer.schedule.gamma == 0.25; }, true},
    {"--lr-min", "0.25", [](O o) { return o.optimizer.schedule.min_rate == 0.25; }, true},
    {"--warmup-steps", "7", [](O o) { return o.optimizer.schedule.warmup_steps == 7; }, true},
    {"--warmup-epochs", "7", [](O o) { return o.optimizer.schedule.warmup_epochs == 7; }, true},
    {"--momentum", "0.25", [](O o) { return o.optimizer.momentum == 0.25f; }, true},
    {"--weight-decay", "0.25", [](O o) { return o.optimizer.weight_decay == 0.25f; }, true},
    {"--nesterov", "", [](O o) { return o.optimizer.nesterov; }, true},
    {"--betas", "0.25,0.5",
     [](O o) {
         return o.optimizer.betas == std::array{0.25f, 0.5f};
     },
     true},
    {"--alpha", "0.25", [](O o) { return o.optimizer.alpha == 0.25f; }, true},
    {"--eps", "0.25", [](O o) { return o.optimizer.epsilon == 0.25f; }, true},
    {"--freeze", "conv*", [](O o) { return o.optimizer.freeze == "conv*"; }, true},
    {"--ema", "0.25", [](O o) { return o.optimizer.ema == 0.25f; }, true},
    {"--lr-scale", "conv*=0.5", [](O o) { return o.optimizer.lr_scale == "conv*=0.5"; }, true},
    {"--weight-decay-scale", "bn*=0", [](O o) { return o.optimizer.decay_scale == "bn*=0"; }, true},
    {"--class-weights", "auto", [](O o) { return o.loss.balanced; }, true},
    {"--max-grad-norm", "0.25", [](O o) { return o.optimizer.max_grad_norm == 0.25f; }, true},
    {"--no-shuffle", "", [](O o) { return !o.batch.shuffle; }, true},
    {"--weight-init", "kaiming-normal",
     [](O o) { return o.net.weight_init == WeightInit::kaiming_normal; }, true},
    {"--init-scale", "fc*=0.5", [](O o) { return o.net.init_scale == "fc*=0.5"; }, true},
    {"--whiten", "conv1", [](O o) { return o.net.whiten == "conv1"; }, true},
    {"--tta", "hflip", [](O o) { return o.evaluation.views == Views::mirrored; }, true},
    {"--no-dropout", "", [](O o) { return !o.net.dropout; }, true},
    {"--augment", "crop4,hflip,randomresizedcrop8,rotate10,randomerasing25,mixup0.2,cutmix1",
     [](O o) {
         return o.batch.augment == AugmentSpec{.resized_crop = 8,
                                               .rotate = 10,
                                               .crop = 4,
                                               .flip = Flip::random,
                                               .erasing = 25,
                                               .mixup = 200,
                                               .cutmix = 1000};
     },
     true},
    {"--no-eval", "", [](O o) { return !o.evaluation.enabled; }, true},
    {"--bucket-kib", "7", [](O o) { return o.reduction.bucket_bytes == 7 * 1024; }, true},
    {"--tune-buckets", "", [](O o) { return o.reduction.tune_buckets; }, true},
    {"--factors", "on", [](O o) { return o.reduction.factors == FactorUse::on; }, true},
    {"--shard-optimizer", "on", [](O o) { return o.reduction.shard_optimizer == ShardUse::on; },
     true},
    {"--comm-dtype", "bf16", [](O o) { return o.reduction.type == DataType::bfloat16; }, true},
    {"--graph", "off", [](O o) { return o.device.graph == GraphUse::off; }, true},
    {"--graph-steps", "7", [](O o) { return o.device.graph_steps == 7; }, true},
    {"--audit", "7", [](O o) { return o.reports.audit == 7; }, true},
    {"--audit-warn", "", [](O o) { return o.reports.audit_warns; }, true},
    {"--check-sync", "7", [](O o) { return o.reports.check_sync == 7; }, true},
    {"--log-interval", "7", [](O o) { return o.reports.log_interval == 7; }, true},
    {"--save", "x", [](O o) { return o.checkpoints.save == "x"; }, false},
    {"--init", "x", [](O o) { return o.net.init == "x"; }, false},
    {"--finetune", "", [](O o) { return o.net.finetune; }, false},
    {"--save-every", "7steps",
     [](O o) {
         return o.checkpoints.every == SaveEvery{7, SaveEvery::Unit::steps};
     },
     true},
    {"--receipt-every", "7", [](O o) { return o.checkpoints.receipt_every == 7; }, true},
    {"--keep", "7", [](O o) { return o.checkpoints.keep == 7; }, true},
    {"--resume", "x", [](O o) { return o.checkpoints.resume == "x"; }, false},
    {"--overwrite", "", [](O o) { return o.checkpoints.overwrite; }, false},
    {"--verbose", "", [](O o) { return o.reports.verbose; }, false},
    {"--quiet", "", [](O o) { return o.reports.quiet; }, false},
};

}  // namespace

TEST_CASE("every flag of gyre train reaches its option, and the comparison of the ranks") {
    const Parsed none("");
    std::set<std::string> without_row;
    for (const CLI::Option* option : none.app.get_options()) {
        without_row.insert(option->get_name());
    }
    without_row.erase("--help");
    without_row.erase("--config");  // its settings have rows: config_test.cpp
    for (const Row& row : kRows) {
        INFO(row.flag << " " << row.value);
        const Parsed given(std::string(row.flag) + " " + row.value);
        CHECK(row.arrived(given.options));
        CHECK(!row.arrived(none.options));  // or it would show nothing
        CHECK((given.manifest != none.manifest) == row.compared);
        CHECK(given.manifest.size() == none.manifest.size());
        CHECK(without_row.erase(row.flag) == 1);
    }
    for (const std::string& flag : without_row) {
        INFO("this flag needs a row in the table above: " << flag);
        CHECK(flag.empty());
    }
}
