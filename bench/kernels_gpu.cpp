// Times every GPU kernel, gyre's own and the libraries' (cuDNN, cuBLASLt), at shapes of the
// built-in nets, and gives the share of the ceilings measured in the same run.
//
// The ceilings are a large copy from device to device (bytes read and written), fused multiply-adds
// in registers, and large matrix products through cuBLASLt in fp32 and TF32. A kernel's floor is
// the larger of its fewest bytes over the copy's bandwidth and the formula's FLOPs over the faster
// of FMA and fp32 product (with --precision=tf32: the TF32 product); "%" is floor over time.
//
// Times are medians over kSamples batches of calls between two events. A batch is a CUDA graph by
// default, so that kernels follow one another as fast as the GPU can start them, whatever the
// host's speed; --launch=stream times plain calls. Calls rotate over copies of their operands that
// together exceed the L2 cache, up to kMostSets copies. Every operation is verified before it is
// timed: ours and the library's against the CPU backend, with as many images as that handles
// quickly, then ours against the library's with the timed batch. Inputs are random and differ in
// every check; outputs are filled with NaN first.
//
// This is compiled twice, like kernels/cuda/: on the emulator times mean nothing, and gyre's own
// kernels replace the library's.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <thread>

#include "base/error.hpp"
#include "bench/gpu_ceilings.hpp"
#include "bench/gpu_estimates.hpp"
#include "bench/gpu_verify.hpp"
#include "bench/report.hpp"
#include "kernels/make_backend.hpp"

namespace gyre::SIMT_NAMESPACE {
namespace {

using bench::Row;

// ---- the suite ----------------------------------------------------------------------------------

class Suite {
 public:
    explicit Suite(const bench::Options& options)
        : options_(options),
          device_(select_device(0, false)),
          context_{stream_, workspace_, device_.multiprocessors, options.tf32},
          ours_(make_own_factory(context_)),
          library_(make_library(options.tf32)),
          cpu_(make_cpu_backend(
              std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 16))),
          pool_(stream_) {}

    int run() {
        ceilings_ = CeilingMeter(context_, pool_, [this](bool tf32) {
                        return make_library(tf32);
                    }).measure(options_.graph);
        for (const auto& [name, text] : facts()) {
            benchmark::AddCustomContext(name, text);
        }
        add_benchmarks();
        const bool any = benchmark::RunSpecifiedBenchmarks() > 0;
        operands_.reset();
        benchmark::ClearRegisteredBenchmarks();
        return any ? conclude() : 2;
    }

 private:
    // tf32: the library may round the operands of its products to TF32.
    std::unique_ptr<KernelFactory> make_library(bool tf32) {
        const Context context{stream_, workspace_, device_.multiprocessors, tf32};
#if defined(GYRE_EMULATED)
        return make_own_factory(context);
#else
        try {
            return make_library_factory(context, false);
        } catch (const Error& error) {
            if (error.code() != ExitCode::usage) {
                throw;
            }
            no_library_ = error.what();
            return nullptr;
        }
#endif
    }

    std::vector<std::pair<std::string, std::string>> facts() const {
        const auto number = [](double value) { return fmt::format("{:.2f}", value); };
        return {{"device", device_.name},
                {"ours", ours_->description()},
                {"library",
                 library_ ? kEmulated ? "ours again" : library_->description() : no_library_},
                {"timed", ceilings_.graphs_work ? "CUDA graphs" : "plain calls"},
                {"tf32", options_.tf32 ? "on" : "off"},
                {"copy GB/s", number(ceilings_.copy_gbs)},
                {"FMA TFLOP/s", number(ceilings_.fma_tflops)},
                {"fp32 product TFLOP/s", number(ceilings_.gemm_tflops)},
                {"TF32 product TFLOP/s", number(ceilings_.gemm_tf32_tflops)},
                {"smallest kernel us", number(ceilings_.call_us)}};
    }
    // ---- one operation at one batch

    struct Case {
        Operation operation;
        int n;  // 0: independent of the batch
        bool verified = false;
        std::string fault;  // found by the verification
    };

    void add_benchmarks() {
        std::vector<int> batches = options_.batches;
        if (batches.empty()) {
            batches = kEmulated ? std::vector{2} : std::vector{64, 256, 1024, 4096};
        }
        for (const bench::Net& net : bench::nets()) {
            for (const int n : batches) {
                for (const bench::Layer& layer : net.layers) {
                    const bool once = std::holds_alternative<bench::ParameterWork>(layer.work);
                    if (once && n != batches.back()) {
                        continue;
                    }
                    Operations operations(net.name, layer.name);
                    std::visit(operations, layer.work);
                    for (Operation& operation : operations.take()) {
                        add_benchmark(std::make_shared<Case>(
                            Case{std::move(operation), once ? 0 : n, false, {}}));
                    }
                }
            }
        }
    }
    void add_benchmark(const std::shared_ptr<Case>& the_case) {
        const Operation& op = the_case->operation;
        Row named;
        named.net = op.net;
        named.layer = op.layer;
        named.direction = op.direction;
        named.n = the_case->n;
        for (const bool ours : {true, false}) {
            if (!ours && (!op.vendor || !library_ || options_.profile)) {
                continue;
            }
            benchmark::RegisterBenchmark(
                (named.name() + (ours ? "/ours" : "/library")).c_str(),
                [=, this](benchmark::State& state) { measure(state, the_case, ours); })
                ->UseManualTime()
                ->Iterations(kSamples)
                ->Unit(benchmark::kMicrosecond);
        }
    }

    void measure(benchmark::State& state, const std::shared_ptr<Case>& the_case, bool ours) {
        const Operation& op = the_case->operation;
        Row& row = report_.row(op.net, op.layer, op.direction, the_case->n);
        row.has_library = static_cast<bool>(op.vendor);
        set_floor(op, ceilings_, options_.tf32, row);
        try {
            if (operands_of_ != the_case.get()) {
                operands_.reset();
                operands_of_ = nullptr;
                row.skipped = lacks_memory(*the_case);
                if (row.skipped.empty()) {
                    make_ops(*the_case);
                    operands_ = std::make_unique<OperandSets>(
                        pool_, op.operands, images_of(*the_case), sets_of(*the_case));
                    operands_of_ = the_case.get();
                }
            }
            if (!row.skipped.empty()) {
                state.SkipWithError(row.skipped.c_str());
                return;
            }
            if (options_.profile) {  // instead of timing it
                estimates_.add_counts(row);
                for (auto _ : state) {
                    state.SetIterationTime(1e-6);
                }
                return;
            }
            if (!the_case->verified) {
                the_case->verified = true;
                the_case->fault = verify(*the_case);
                if (!the_case->fault.empty()) {
                    faults_.push_back(row.name() + ": " + the_case->fault);
                }
            }
            if (!the_case->fault.empty()) {
                row.skipped = the_case->fault;
                state.SkipWithError(the_case->fault.c_str());
                return;
            }
            (ours ? row.ours_us : row.library_us) = time(state, op, ours);
            if (ours && !kEmulated) {
                row.estimate_us = estimates_.estimate_us(row);
            }
        } catch (const Error& error) {
            faults_.push_back(row.name() + ": " + error.what());
            row.skipped = error.what();
            state.SkipWithError(error.what());
            return;
        }
        const double us = ours ? row.ours_us : row.library_us;
        state.counters["median_us"] = us;
        state.counters["GB/s"] = row.bytes / us / 1e3;
        state.counters["%ceiling"] = 100.0 * row.floor_us / us;
        if (row.flop > 0) {
            state.counters["TFLOP/s"] = row.flop / us / 1e6;
        }
        if (!ours && row.ours_us > 0) {
            state.counters["ratio"] = row.ratio();
        }
    }

    static int images_of(const Case& c) {
        return std::max(c.n, 1);
    }
    static std::size_t sets_of(const Case& c) {
        const std::size_t bytes = OperandSets::set_bytes(c.operation.operands, images_of(c));
        return std::clamp<std::size_t>((kRotate + bytes - 1) / bytes, 1, kMostSets);
    }
    // Returns why the case cannot be timed, or nothing.
    static std::string lacks_memory(const Case& c) {
        const std::size_t set = OperandSets::set_bytes(c.operation.operands, images_of(c));
        // Libraries need room for the operands on which they choose algorithms, and for workspace.
        constexpr std::size_t kRoom = (kEmulated ? 64 : 768) * kMiB;
        const std::size_t needed = std::max(set * sets_of(c), set) + kRoom, free = free_memory();
        if (needed > free) {
            return fmt::format("needs {} MiB of GPU memory, {} MiB are free", needed / kMiB,
                               free / kMiB);
        }
        return {};
    }
    void make_ops(const Case& c) {
        const int n = images_of(c);
        for (const bool timed : {false, true}) {
            if (timed && !c.operation.timed_spec) {
                ops_[timed] = ops_[!timed];
                continue;
            }
            ops_[timed].ours = make(*ours_, c.operation, n, timed);
            ops_[timed].vendor = library_ ? make(*library_, c.operation, n, timed) : nullptr;
        }
    }

    Gpu gpu(bool ours, const Args& args) {
        const Ops& ops = ops_[args.timed];
        return {context_, (ours ? ops.ours : ops.vendor).get()};
    }
    void call(const Operation& op, bool ours, const Args& args) {
        (ours ? op.ours : op.vendor)(gpu(ours, args), args);
    }
    void set_up(const Operation& op, bool ours, const Args& args) {
        if (op.set_up) {
            op.set_up(gpu(ours, args), args);
        }
    }

    double time(benchmark::State& state, const Operation& op, bool ours) {
        std::vector<Args>& sets = operands_->sets();
        for (Args& args : sets) {
            args.timed = true;
            set_up(op, ours, args);
        }
        const Calls::Body body = [&](int i) {
            call(op, ours, sets[static_cast<std::size_t>(i) % sets.size()]);
        };
        for (int i = 0; i < kWarmUps; ++i) {
            body(i);
        }
        Calls few(stream_, body, 2, false);
        const double once = std::max(watch_.microseconds(few), 0.1);
        const double wanted =
            std::max(std::ceil(kBatchUs / once), static_cast<double>(sets.size()));
        const int calls = static_cast<int>(std::clamp(wanted, 1.0, double{kMostCalls}));
        Calls batch(stream_, body, calls, options_.graph);
        batch.run();
        stream_.synchronize();
        std::vector<double> samples;
        for (auto _ : state) {
            samples.push_back(std::max(watch_.microseconds(batch), 1e-3));
            state.SetIterationTime(samples.back() * 1e-6);
        }
        stream_.synchronize();
        if (options_.graph && !batch.is_graph()) {
            state.SetLabel("plain calls: it could not be captured");
        }
        return median(samples);
    }

    // ---- verification

    Host download(const void* device, std::size_t bytes) {
        Host host(bytes);
        stream_.download(host.data(), device, bytes);
        stream_.synchronize();
        return host;
    }
    // Runs an operation once, after set_up() and with poisoned outputs.
    void run_once(const Operation& op, bool ours, const Args& args) {
        set_up(op, ours, args);
        for (std::size_t i = 0; i < op.operands.size(); ++i) {
            if (op.operands[i].role == Role::out) {
                pool_.poison(op.operands[i], args.n, args.at[i]);
            }
        }
        call(op, ours, args);
        stream_.synchronize();
    }
    std::string judge(const Operation& op, const std::string& what, std::size_t operand,
                      const Numbers& found, const Numbers& expected) const {
        const double error = relative_error(found, expected);
        const double tolerance = op.is_product && options_.tf32 ? kToleranceTf32 : kTolerance;
        if (error <= tolerance) {
            return {};
        }
        return fmt::format(
            "WRONG: {}: operand {} is off by {:.1e} of its norm, at most {:.0e} is "
            "allowed",
            what, operand, error, tolerance);
    }

    std::string verify(const Case& c) {
        std::string fault = verify_against_cpu(c.operation, images_of(c));
        return fault.empty() ? verify_at_full_batch(c.operation) : fault;
    }
    std::string verify_against_cpu(const Operation& op, int n) {
        double few = n;
        if (op.image_flop > 0) {
            few = std::min(few, kReferenceFlop / op.image_flop);
        }
        if (op.image_bytes > 0) {
            few = std::min(few, static_cast<double>(kReferenceBytes) / op.image_bytes);
        }
        n = std::max(1, static_cast<int>(few));
        OperandSets operands(pool_, op.operands, n, 1);
        const Args& args = operands.sets()[0];
        std::vector<Host> inputs;
        for (std::size_t i = 0; i < op.operands.size(); ++i) {
            inputs.push_back(
                op.operands[i].is_input() ? download(args.at[i], op.operands[i].bytes(n)) : Host{});
        }
        CpuOperands expected(*cpu_, op.operands, n, inputs);
        const std::unique_ptr<Op> cpu_op = make(*cpu_, op, n);
        const Cpu cpu{*cpu_, cpu_op.get()};
        if (op.cpu_set_up) {
            op.cpu_set_up(cpu, expected.args());
        }
        op.reference(cpu, expected.args());
        for (const bool ours : {true, false}) {
            if (!ours && (!op.vendor || !library_)) {
                continue;
            }
            run_once(op, ours, args);
            for (std::size_t i = 0; i < op.operands.size(); ++i) {
                const Operand& operand = op.operands[i];
                if (!operand.is_output() || (!ours && operand.ours_alone)) {
                    continue;
                }
                const auto found = numbers(operand.type, download(args.at[i], operand.bytes(n)));
                const std::string what =
                    fmt::format("{} against the CPU at {} images", ours ? "ours" : "library", n);
                if (std::string fault = judge(op, what, i, found, expected.read(i));
                    !fault.empty()) {
                    return fault;
                }
            }
        }
        return {};
    }
    // Returns the begin and the end of an output of the first set.
    Numbers ends(const Operation& op, std::size_t i) {
        const Args& args = operands_->sets()[0];
        const Operand& operand = op.operands[i];
        const auto elems = static_cast<std::size_t>(operand.elems(args.n));
        const std::size_t each = operand.bytes(args.n) / elems;
        const std::size_t part = std::min(elems, kComparedElems) * each;
        Numbers values = numbers(operand.type, download(args.at[i], part));
        const auto* const end = static_cast<const char*>(args.at[i]) + elems * each;
        const Numbers last = numbers(operand.type, download(end - part, part));
        values.insert(values.end(), last.begin(), last.end());
        return values;
    }
    // Without a library, this only checks that everything was written.
    std::string verify_at_full_batch(const Operation& op) {
        const Args& args = operands_->sets()[0];
        std::vector<Numbers> found;
        run_once(op, true, args);
        for (std::size_t i = 0; i < op.operands.size(); ++i) {
            found.push_back(op.operands[i].is_output() ? ends(op, i) : Numbers{});
            for (const double value : found.back()) {
                if (!std::isfinite(value)) {
                    return fmt::format("WRONG: ours at {} images: operand {} has NaN or infinity",
                                       args.n, i);
                }
            }
        }
        if (!op.vendor || !library_) {
            return {};
        }
        run_once(op, false, args);
        for (std::size_t i = 0; i < op.operands.size(); ++i) {
            if (op.operands[i].is_output() && !op.operands[i].ours_alone) {
                const std::string what =
                    fmt::format("ours against the library at {} images", args.n);
                if (std::string fault = judge(op, what, i, found[i], ends(op, i)); !fault.empty()) {
                    return fault;
                }
            }
        }
        return {};
    }

    // ---- the end

    int conclude() {
        if (options_.profile) {
            fmt::print("\n{}", estimates_.text());
            return 0;
        }
        fmt::print("\n");
        for (const auto& [name, text] : facts()) {
            fmt::print("{:<22} {}\n", name, text);
        }
        fmt::print(
            "\nratio: library's time over ours, > 1: ours is faster; %: share of the ceiling in "
            "the last column; GB/s, TFLOP/s: ours\n{}",
            report_.table());
        fmt::print("{}", estimates_.text());
        if (kEmulated) {
            fmt::print("\nemulated: the times mean nothing, and ours ran instead of the library\n");
        }
        for (const std::string& fault : faults_) {
            fmt::print("{}\n", fault);
        }
        fmt::print("wrong results and errors: {}\n", faults_.size());
        std::vector<std::string> missed;
        if (options_.check) {
            missed = report_.missed_goals();
            for (const std::string& line : missed) {
                fmt::print("MISSED: {}\n", line);
            }
            fmt::print("goals missed: {}{}\n", missed.size(),
                       kEmulated ? " (not judged: emulated)" : "");
        }
        return !faults_.empty() ? 1 : missed.empty() || kEmulated ? 0 : 3;
    }

    const bench::Options options_;
    const DeviceProperties device_;  // before all GPU members, as it makes the device current
    Stream stream_;
    Workspace workspace_{stream_};
    const Context context_;
    Stopwatch watch_{stream_};
    std::string no_library_;
    std::unique_ptr<KernelFactory> ours_, library_;
    std::unique_ptr<Backend> cpu_;
    ValuePool pool_;
    Ceilings ceilings_;
    struct Ops {
        std::shared_ptr<Op> ours, vendor;
    };
    Ops ops_[2];  // the case's verified and timed operations
    const Case* operands_of_ = nullptr;
    std::unique_ptr<OperandSets> operands_;
    bench::Report report_;
    bench::Estimates estimates_{options_, device_.name};
    std::vector<std::string> faults_;
};

}  // namespace

int run_benchmarks(const bench::Options& options) {
    return Suite(options).run();
}

}  // namespace gyre::SIMT_NAMESPACE
