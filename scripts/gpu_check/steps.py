"""The steps of a check: what is run, in how many seconds, and what to make of its output."""

from __future__ import annotations

import glob
import json
import re
import sys

from check import ROOT, Check, last
from programs import escaped
from step_runner import FAIL, PASS, SKIPPED, Command, Ran, Runner, Step, Verdict

BUDGET = 470.0  # seconds for all steps
POINTS = 0.7  # that accuracies after 3 epochs may differ; seeds alone make 0.3 in one run of four
# That losses of 20 steps may differ between sets of kernels; later, a flipped ReLU or pooling choice,
# which rounding alone decides, may show.
RELATIVE = 1e-4
# That they may differ where only the order of sums does, on a net without such choices: 8 times
# float32's epsilon, as in tests/losses.hpp.
SAME = 8 * 2.0**-23
DOZEN = ["--limit", 12 * 32]  # images, for a dozen steps of ranks


def verdict(problems: list[str], text: str) -> Verdict:
    return (FAIL, "; ".join(problems)) if problems else (PASS, text)


def twenty_steps(c: Check) -> list[object]:
    """Flags. The emulated device gets little of everything, and has no libraries."""
    return ["--limit", 320 if c.emulated else 1280]


def few_images(c: Check) -> list[object]:
    return ["--limit", 64 if c.emulated else 6400, "--epochs", 2, "--batch-size", 24]


# 10 s
def device(c: Check) -> Step:
    def judge_device(ran: Ran) -> Verdict:
        gpu = re.search(r"^GPU 0 +(.*)", ran.text, re.M)
        name = gpu[1] if gpu and not c.emulated else f"device {c.device}"
        return PASS, f"{name}; data {c.data or 'none'}"

    system = [] if c.emulated else [Command(["nvidia-smi"])]
    return Step("device", 10, [*system, Command(["df", "-h", "/dev/shm"]), c.call("gyre", "info")],
                judge_device)


# 25 s
def own(c: Check) -> Step:
    twenty, few = twenty_steps(c), few_images(c)
    adam = ["--optimizer", "adam", "--max-grad-norm", 5]

    def judge_own(ran: Ran) -> Verdict:
        bad, text = c.close_to(RELATIVE, "cpu", "ours")
        bad += c.same(("ours", "ours-graph"), ("ours-adam", "ours-adam-graph"))
        if "without a CUDA graph" in ran.text:
            bad.append("a step could not be captured")
        speeds = [f"{last(c.out(n), 'images_per_second'):.0f}" for n in ("ours-adam", "ours-adam-graph")]
        return verdict(bad, f"losses from the CPU's: {text}; a graph changes no bit; images/s "
                            f"{speeds[0]} without, {speeds[1]} with it")

    return Step("own", 25, [
        c.train("cpu", "cpu", *twenty),
        c.train("ours", "ours", *twenty, "--graph", "off"),
        c.train("ours-graph", "ours", *twenty, "--graph", "on"),
        c.train("ours-adam", "ours", *few, *adam, "--graph", "off"),
        c.train("ours-adam-graph", "ours", *few, *adam, "--graph", "on"),
    ], judge_own, skip=c.no_data)


# 20 s. Algorithms picked by timing differ from run to run, some with atomics: bits are compared
# with --deterministic only.
def library(c: Check) -> Step:
    twenty = twenty_steps(c)

    def judge_library(ran: Ran) -> Verdict:
        bad, text = c.close_to(RELATIVE, "cpu", "cudnn", "auto")
        return verdict(bad + c.same(("cudnn", "cudnn-graph")), f"losses from the CPU's: {text}; "
                       "deterministic cuDNN with and without a graph: equal bit by bit")

    return Step("library", 20, [
        c.train("cudnn", "cudnn", *twenty, "--deterministic", "--graph", "off"),
        c.train("cudnn-graph", "cudnn", *twenty, "--deterministic", "--graph", "on"),
        c.train("auto", "auto", *twenty, "-v"),
    ], judge_library, skip=c.no_data or ("the device is emulated" if c.emulated else ""))


# Ranks that take turns on the GPU; with 2 also the times of reductions alone.
def nccl(c: Check, name: str, count: int, seconds: float, optional: bool = False) -> Step:
    def judge(ran: Ran) -> Verdict:
        eager, graph = f"nccl-{count}", f"nccl-{count}-graph"
        bad, text = c.close_to(SAME, f"gloo-{count}", eager)
        times = re.findall(r"^ +(\d+) +\d+ +float +sum +([\d.]+) .* (\d+)$", ran.text, re.M)
        bad += [f"wrong sums of {size} bytes" for size, _, wrong in times if wrong != "0"]
        rows = ", ".join(f"{size} B {us} us" for size, us, _ in times)
        return verdict(bad + c.same((eager, graph)), f"{count} ranks, from Gloo's losses: {text}; "
                       f"with a graph equal bit by bit" + (f"; allreduce {rows}" if rows else ""))

    bench = []
    if count == 2 and c.has("bench-allreduce"):
        where = ["--device", "cpu"] if c.emulated else ["--device", "cuda", "--comm", "nccl", "--share-gpu"]
        bench = [c.call(str(ROOT / "tests" / "launch_ranks.sh"), 2, c.tools / "bench-allreduce", "-b", "4K",
                        "-e", "1M", "-f", 16, "-n", 5, "-w", 2, *where, **c.nccl, NCCL_DEBUG="INFO",
                        NCCL_DEBUG_FILE=str(c.folder / "nccl-info.%h.%p"))]
    return Step(name, seconds, [
        *bench,
        c.ranks(f"gloo-{count}", count, *DOZEN, "--comm", "gloo"),
        c.ranks(f"nccl-{count}", count, *DOZEN, "--comm", "nccl", "--graph", "off"),
        c.ranks(f"nccl-{count}-graph", count, *DOZEN, "--comm", "nccl", "--graph", "on"),
    ], judge, skip=c.no_ranks, optional=optional)


# 60 s
def unit(c: Check) -> Step:
    def judge_unit(ran: Ran) -> Verdict:
        if not c.emulated and "skipped: the backends on a GPU" in ran.text:
            return FAIL, "the tests on the GPU were skipped: the program saw none"
        alone = re.findall(r"^FAILED ALONE: (.*)", ran.text, re.M)
        cases = re.search(r"^(\d+ cases, \d+ failed).*", ran.text, re.M)
        if alone or not ran.good:
            return FAIL, f"{cases[1] if cases else 'no case ended'}; alone: {', '.join(alone) or 'none'}"
        return PASS, f"{cases[1]}; none fails alone"

    unit_words = ["dropout*"] if c.emulated else []
    return Step("unit", 60, [c.call("isolate", c.folder / "unit.xml", c.tools / "unit_tests", *unit_words,
                                    GYRE_TEST_BACKENDS="emulated" if c.emulated else "gpu")],
                judge_unit, judge_failures=True,
                skip="" if c.has("unit_tests") else f"{c.build} has no unit_tests")


# 90 s, a program for each net, so that no more than one net's figures can be lost.
def kernels(c: Check) -> list[Step]:
    def judge_kernels(ran: Ran) -> Verdict:
        timed = len(re.findall(r"/manual_time .* us ", ran.text))
        missed = len(re.findall(r"^MISSED:", ran.text, re.M))
        wrong = len(re.findall("ERROR OCCURRED", ran.text))
        text = f"{timed} timings, {wrong} wrong results, goals missed: {missed}"
        good = ran.good or ran.codes == [3]  # goals are there to be missed until they are met
        return (PASS if good and not wrong else FAIL), text + (", ran out of time" if ran.timed_out else "")

    steps = []
    for net, batches in (("net", "64,256,1024,4096"), ("wide", "64,1024")):
        words = [f"--device={c.device}", "--check", f"--benchmark_filter=^{net}/",
                 f"--batches={2 if c.emulated else batches}", f"--benchmark_out={c.folder}/kernels-{net}.json"]
        skip = "" if c.has("bench-kernels") else f"{c.build} has no bench-kernels"
        if c.emulated and net == "wide":
            skip = "the device is emulated"
        steps.append(Step(f"kernels-{net}", 45, [c.call("bench-kernels", *words)], judge_kernels,
                          judge_failures=True, skip=skip))
    return steps


# 35 s
def accuracy(c: Check) -> Step:
    sets = {"cpu": "cpu", "ours": "ours"} | ({} if c.emulated else {"library": "cudnn"})
    evaluated = ["--epochs", 1 if c.emulated else 3, "--log-interval", 1000000]
    evaluated += ["--limit", 256] if c.emulated else []

    def judge_accuracy(ran: Ran) -> Verdict:
        points = {name: 100 * last(c.out(f"accuracy-{name}"), "test_accuracy") for name in sets}
        text = ", ".join(f"{name} {points[name]:.2f} % ({last(c.out(f'accuracy-{name}'), 'images_per_second'):.0f}"
                         " images/s)" for name in sets)
        apart = max(points.values()) - min(points.values())
        return (PASS if apart <= POINTS else FAIL), f"{apart:.2f} points apart: {text}"

    return Step("accuracy", 35, [
        c.call("gyre", *[w for w in c.train_words(f"accuracy-{name}", kernel_set, *evaluated)
                         if w != "--no-eval"])
        for name, kernel_set in sets.items()], judge_accuracy, skip=c.no_data)


# 15 s
def repeat(c: Check) -> Step:
    few = few_images(c)

    def repeated(name: str, i: int) -> Command:
        flags = ["--deterministic"] if name == "cudnn" else []
        return c.train(f"repeat-{name}-{i}", name, *few, *flags, "--overwrite", "--save", c.tools / f"{name}-{i}")

    twice = ["ours"] + ([] if c.emulated else ["cudnn"])

    def judge_repeat(ran: Ran) -> Verdict:
        bad = c.same(*((f"repeat-{name}-1", f"repeat-{name}-2") for name in twice))
        bad += [f"the weights of {name} differ" for name in twice
                if (c.tools / f"{name}-1" / "last.safetensors").read_bytes() !=
                (c.tools / f"{name}-2" / "last.safetensors").read_bytes()]
        return verdict(bad, f"{', '.join(twice)}: losses and weights of two runs equal bit by bit")

    return Step("repeat", 15, [repeated(name, i) for name in twice for i in (1, 2)], judge_repeat,
                skip=c.no_data)


def judge_torch(c: Check, ran: Ran) -> Verdict:
    if ran.codes == [77]:
        return SKIPPED, "python3 has no torch that sees the device"
    if ran.codes not in ([0], [124]):
        return FAIL, f"exit code {ran.codes[0]}"
    # What the time sufficed for counts.
    rows = json.loads((c.folder / f"{ran.name}.json").read_text())
    lines = [f"\n           {row['case']} batch {row['batch_size']}: torch "
             + ", ".join(f"{form} {line['images_per_second']:.0f}" for form, line in row["torch"].items())
             + "; gyre " + ", ".join(f"{k} {v['images_per_second']:.0f}" for k, v in row["gyre"].items())
             for row in rows]
    return PASS, "images/s" + "".join(lines)


def compare(c: Check, out: str, *flags: str) -> Command:
    return Command([sys.executable, str(ROOT / "bench" / "peers" / "torch_eager.py"), "--compare",
                    "--gyre", str(c.tools / "gyre"), "--python", sys.executable, "--data", c.data,
                    "--json", str(c.folder / out), *flags])


# 50 s
def torch(c: Check) -> Step:
    flags = ["--batch-sizes", "64", "--steps", "300", "--forms", "eager,fused,graph"]
    if c.emulated:
        flags = ["--device", "cpu", "--gyre-device", "emulated", "--kernels", "ours", "--case", "net",
                 "--limit", "8", "--batch-sizes", "4", "--steps", "2", "--warmup", "1", "--repeats", "1",
                 "--epochs", "2", "--forms", "eager"]
    return Step("torch", 50, [compare(c, "torch.json", *flags)], lambda ran: judge_torch(c, ran),
                judge_failures=True, skip=c.no_torch)


# 40 s, with what is left
def torch_compile(c: Check) -> Step:
    return Step("torch-compile", 40, [compare(c, "torch-compile.json", "--batch-sizes", "64", "--steps", "300",
                                              "--forms", "compile", "--kernels", "ours")],
                lambda ran: judge_torch(c, ran), judge_failures=True, skip=c.no_torch, optional=True)


def sanitized(c: Check, tool: str, name: str, *flags: object) -> Command:
    return c.call(c.sanitizer, "--tool", tool, "--error-exitcode", 99, c.build / "gyre",
                  *c.train_words("", name, *flags), LD_LIBRARY_PATH=c.libraries)


def trainings(c: Check, tool: str) -> list[Command]:
    small = ["--limit", 128]
    return [sanitized(c, tool, "ours", *small), sanitized(c, tool, "ours", *small, "--graph", "on"),
           sanitized(c, tool, "ours", "--model", c.tools / "odd.txt", "--limit", 70, "--batch-size", 35,
                     "--optimizer", "adam"),
           sanitized(c, tool, "ours", "--limit", 64, "--precision", "tf32"),
           sanitized(c, tool, "ours", "--limit", 64, "--precision", "fp16"),
           sanitized(c, tool, "ours", "--model", "wide", "--limit", 24, "--batch-size", 12,
                     "--optimizer", "adam")]


def judge_sanitizer(ran: Ran) -> Verdict:
    if "Device not supported" in ran.text:
        return SKIPPED, "compute-sanitizer does not support this device"
    clean = len(re.findall("ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", ran.text))
    bad = [code for code in ran.codes if code not in (0, None, 124)]
    text = f"{clean} of {len(ran.codes)} programs without errors"
    return (FAIL if bad or not clean else PASS), text + (", then the time was over" if ran.timed_out else "")


# 60 s: what failed above first.
def memcheck(c: Check) -> Step:
    def commands_of(runner: Runner) -> list[Command]:
        commands = trainings(c, "memcheck")
        failed = runner.failed()
        if "unit" in failed:
            alone = re.findall(r"^FAILED ALONE: (.*)", (c.folder / "unit.log").read_text(), re.M)
            first = [c.call(c.sanitizer, "--tool", "memcheck", "--error-exitcode", 99, c.build / "unit_tests",
                            escaped(name), GYRE_TEST_BACKENDS="gpu", LD_LIBRARY_PATH=c.libraries)
                     for name in alone[:3]]
            commands = first + commands
        if "library" in failed:
            commands = [sanitized(c, "memcheck", "cudnn", "--limit", 64)] + commands
        return commands

    return Step("memcheck", 60, commands_of, judge_sanitizer, judge_failures=True,
                skip=c.no_sanitizer or c.no_data)


# 12 s each, with what is left
def sanitizer(c: Check, tool: str) -> Step:
    return Step(tool, 12, lambda runner: trainings(c, tool)[:3], judge_sanitizer, judge_failures=True,
                skip=c.no_sanitizer or c.no_data, optional=True)


# 50 s
def stop(c: Check) -> Step:
    job = [c.nccl_gyre, *c.train_words("", "ours", "--comm", "nccl", "--share-gpu", "--timeout", 6,
                                       *DOZEN, "--epochs", 1000000)]
    return Step("stop", 50, [c.call("stop-rank", which, c.out(f"stop-{which}"), *job, **c.nccl)
                             for which in ("KILL", "STOP")],
                lambda ran: (PASS, "a killed and a stopped rank are named, exit code 4"), skip=c.no_ranks)


def make_steps(c: Check) -> list[Step]:
    """In this order: what later steps need first, and last what there need not be time for."""
    return [
        device(c), own(c), library(c), nccl(c, "nccl", 2, 45), unit(c), *kernels(c), accuracy(c), repeat(c),
        torch(c), memcheck(c), stop(c),
        # 35 s, with what is left
        sanitizer(c, "initcheck"), sanitizer(c, "racecheck"), nccl(c, "nccl-4", 4, 15, optional=True),
        *([] if c.emulated else [torch_compile(c)]),
    ]
