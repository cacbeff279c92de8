"""The steps of a check: their commands, time limits, and how their output is judged."""

from __future__ import annotations

import glob
import json
import pathlib
import re
import statistics
import sys

from check import ROOT, Check, events, last
from machine import gpus
from programs import escaped
from step_runner import FAIL, PASS, SKIPPED, Command, Ran, Runner, Step, Verdict

BUDGET = 585.0  # seconds for all steps
START = 2.0  # seconds until a program has its libraries and the GPU
SPARE = 1.5  # factor between a step's limit and the time that it needs
POINTS = 0.7  # allowed difference of accuracies after 3 epochs; seeds alone make 0.3 in one run of four
# Allowed difference of losses of 20 steps between sets of kernels; in later steps a flipped ReLU or pooling
# choice, which only rounding decides, may show.
RELATIVE = 1e-4
# Allowed difference if only the order of sums differs, on a net without such choices: 8 times
# float32's epsilon, as in tests/support/losses.hpp.
SAME = 8 * 2.0**-23
# Allowed difference of the first steps' losses from the CPU's in that precision (TF32: in float32), at least
# three times that of the emulated GPU, which is largest for batch normalisation of one image.
APART = {"fp32": RELATIVE, "tf32": 1e-3, "bf16": 3e-3, "fp16": 1e-3}
DOZEN = ["--limit", 12 * 32]  # images, for a dozen steps of ranks
ESTIMATES = 30.0  # %, the goal for the median error of estimated times
# Goals for a step's time: training flags, flags with which bench-kernels lists the step, microseconds.
GOALS = {
    "net": (["--model", "net", "--epochs", 20], ["--step=net"], 15.0),
    "wide": (["--model", "wide", "--precision", "tf32", "--optimizer", "adam", "--limit", 16384, "--epochs", 6],
             ["--step=wide", "--precision=tf32"], 400.0),
}  # fmt: skip


def needs(programs: int, work: float) -> float:
    """A step's limit, from the number of programs that it starts one after another and the seconds of work
    on a host of 16 cores, as far as they can be known without a GPU."""
    return SPARE * (programs * START + work)


def verdict(problems: list[str], text: str) -> Verdict:
    return (FAIL, "; ".join(problems)) if problems else (PASS, text)


def twenty_steps(c: Check) -> list[object]:
    """Flags for twenty steps; the emulated device gets fewer."""
    return ["--limit", 320 if c.emulated else 1280]


def few_images(c: Check) -> list[object]:
    return ["--limit", 64 if c.emulated else 6400, "--epochs", 2, "--batch-size", 24]


def device(c: Check) -> Step:
    def judge_device(ran: Ran) -> Verdict:
        gpu = re.search(r"^GPU 0 +(.*)", ran.text, re.M)
        name = gpu[1] if gpu and not c.emulated else f"device {c.device}"
        return PASS, f"{name}; data {c.data or 'none'}"

    system = [] if c.emulated else [Command(["nvidia-smi"])]
    return Step("device", needs(2, 1), [*system, Command(["df", "-h", "/dev/shm"]), c.call("gyre", "info")],
                judge_device)


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

    return Step("own", needs(5, 4), [
        c.train("cpu", "cpu", *twenty),
        c.train("ours", "ours", *twenty, "--graph", "off"),
        c.train("ours-graph", "ours", *twenty, "--graph", "on"),
        c.train("ours-adam", "ours", *few, *adam, "--graph", "off"),
        c.train("ours-adam-graph", "ours", *few, *adam, "--graph", "on"),
    ], judge_own, skip=c.no_data)


# Algorithms chosen by timing differ between runs, and some use atomics, so bits are compared only with
# --deterministic.
def library(c: Check) -> Step:
    twenty = twenty_steps(c)

    def judge_library(ran: Ran) -> Verdict:
        bad, text = c.close_to(RELATIVE, "cpu", "cudnn", "auto")
        return verdict(bad + c.same(("cudnn", "cudnn-graph")), f"losses from the CPU's: {text}; "
                       "deterministic cuDNN with and without a graph: equal bit by bit")

    return Step("library", needs(3, 8), [
        c.train("cudnn", "cudnn", *twenty, "--deterministic", "--graph", "off"),
        c.train("cudnn-graph", "cudnn", *twenty, "--deterministic", "--graph", "on"),
        c.train("auto", "auto", *twenty, "-v"),
    ], judge_library, skip=c.no_data or ("the device is emulated" if c.emulated else ""))


# The ranks take turns on the GPU; with 2 ranks reductions are also timed separately.
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
        bench = [c.call(str(ROOT / "tests/comm/launch_ranks.sh"), 2, c.tools / "bench-allreduce", "-b", "4K",
                        "-e", "1M", "-f", 16, "-n", 5, "-w", 2, *where, **c.nccl, NCCL_DEBUG="INFO",
                        NCCL_DEBUG_FILE=str(c.folder / "nccl-info.%h.%p"))]
    return Step(name, seconds, [
        *bench,
        c.ranks(f"gloo-{count}", count, *DOZEN, "--comm", "gloo"),
        c.ranks(f"nccl-{count}", count, *DOZEN, "--comm", "nccl", "--graph", "off"),
        c.ranks(f"nccl-{count}-graph", count, *DOZEN, "--comm", "nccl", "--graph", "on"),
    ], judge, skip=c.no_ranks, optional=optional)


def unit(c: Check) -> Step:
    def judge_unit(ran: Ran) -> Verdict:
        if not c.emulated and "skipped: the backends on a GPU" in ran.text:
            return FAIL, "the tests on the GPU were skipped: the program found none"
        alone = re.findall(r"^FAILED ALONE: (.*)", ran.text, re.M)
        cases = re.search(r"^(\d+ cases, \d+ failed).*", ran.text, re.M)
        if alone or not ran.good:
            return FAIL, f"{cases[1] if cases else 'no case ended'}; alone: {', '.join(alone) or 'none'}"
        return PASS, f"{cases[1]}; none fails alone"

    # The emulated device gets few cases, selected and distributed the same way.
    jobs, words = (2, ["--filenames-as-tags", "[gpu][#kernels_test],[gpu][#update_kernels_test]"]) if c.emulated else (8, ["[gpu]"])
    return Step("unit", needs(3, 16), [c.call("isolate", c.folder / "unit", jobs, c.tools / "unit_tests", *words,
                                              GYRE_TEST_BACKENDS="emulated" if c.emulated else "gpu")],
                judge_unit, judge_failures=True,
                skip="" if c.has("unit_tests") else f"{c.build} has no unit_tests")


def goal(what: str, value: float, most: float, unit: str) -> str:
    """A line for the summary; a missed goal is not a failure."""
    return f"{what} {value:.1f} {unit}, goal {most:.0f}: {'met' if value <= most else 'MISSED'}"


def judged_estimates(text: str) -> str:
    found = re.search(r"^estimates: median error (\d+) % of (\d+) times; .* and (\d+) % over the others", text, re.M)
    if not found:
        return "no estimates"
    return (goal(f"estimates of {found[2]} times off at the median by", float(found[1]), ESTIMATES, "%")
            + f" ({found[3]} % with fitted constants)")


# Each net and precision has its own program, so that a failure loses only its figures.
def kernels(c: Check) -> list[Step]:
    def judge_kernels(ran: Ran) -> Verdict:
        timed = len(re.findall(r"/manual_time .* us ", ran.text))
        missed = len(re.findall(r"^MISSED:", ran.text, re.M))
        wrong = len(re.findall("ERROR OCCURRED", ran.text))
        text = f"{timed} timings, {wrong} wrong results, goals missed: {missed}; {judged_estimates(ran.text)}"
        good = ran.good or ran.codes == [3]
        return (PASS if good and not wrong and timed else FAIL), text + (", ran out of time" if ran.timed_out else "")

    steps = []
    for name, layers, batches in (("net", "net/", "64,256,1024,4096"), ("wide", "wide/", "64,256"),
                                  ("wide-tf32", "wide/(conv|fc)", "64,1024")):
        if c.emulated:  # the smallest layers
            layers, batches = {"net": "net/", "wide": "wide/(relu3|fc2)", "wide-tf32": "wide/fc2"}[name], "2"
        words = [f"--device={c.device}", "--check", f"--benchmark_filter=^{layers}", f"--batches={batches}",
                 f"--benchmark_out={c.folder}/kernels-{name}.json",
                 *(["--precision=tf32"] if name.endswith("tf32") else [])]
        skip = "" if c.has("bench-kernels") else f"{c.build} has no bench-kernels"
        # The reference of the wide net on a CPU takes most of the time; in TF32 there are fewer of its layers.
        work = {"net": 26, "wide": 52, "wide-tf32": 30}[name]
        steps.append(Step(f"kernels-{name}", needs(1, work), [c.call("bench-kernels", *words)], judge_kernels,
                          judge_failures=True, skip=skip))
    return steps


# Compares the first steps of the nets whose products run on tensor cores with the CPU's, in every precision:
# losses depend on forward passes, and from the second step on on gradients and updates. Only GPUs have TF32.
def precision(c: Check) -> Step:
    few = ["--limit", 2, "--batch-size", 1] if c.emulated else ["--limit", 64, "--batch-size", 16]

    def name(net: str, kind: str, on: str) -> str:
        return f"precision-{net}-{kind}-{on}"

    def judge_precision(ran: Ran) -> Verdict:
        bad, texts = [], []
        for net in ("wide", "resnet"):
            for kind, allowed in APART.items():
                of_cpu = name(net, "fp32" if kind == "tf32" else kind, "cpu")
                far, text = c.close_to(allowed, of_cpu, name(net, kind, "gpu"))
                bad += far
                texts.append(text.removeprefix("precision-").replace("-gpu", ""))
        return verdict(bad, "losses from the CPU's: " + ", ".join(texts))

    return Step("precision", needs(14, 10), [
        c.train(name(net, kind, on), kernel_set, "--model", net, "--precision", kind, *few)
        for net in ("wide", "resnet") for kind in APART
        for on, kernel_set in (("cpu", "cpu"), ("gpu", "ours")) if (kind, on) != ("tf32", "cpu")
    ], judge_precision, skip=c.no_data)


def estimated_gpu(c: Check) -> str:
    """The device's name among the GPUs for which bench-kernels estimates times (bench/gpu_models.cpp), or empty."""
    if c.emulated:
        return "h200"
    first = gpus().partition("\n")[0]
    return next((name for name in ("a100", "h100", "h200") if name.upper() in first), "")


# Compares a step's time with its goal and, for some GPUs, with an estimate from the emulator's counts.
def speed(c: Check) -> Step:
    gpu = estimated_gpu(c)

    def judge_speed(ran: Ran) -> Verdict:
        estimates = [float(us) for us in re.findall(r"^\d+ launches, .* ([\d.]+) us by estimate", ran.text, re.M)]
        lines = []
        for (net, (_, _, most)), estimate in zip(GOALS.items(), estimates if gpu else [None] * len(GOALS), strict=True):
            speeds = [event["images_per_second"] for event in events(c.out(f"speed-{net}"))
                      if event["event"] == "epoch"][1:]
            us = 64e6 * statistics.mean(1 / speed for speed in speeds)
            off = "no estimates for this GPU" if estimate is None else goal(
                f"by estimate {estimate:.1f} us, off by", abs(estimate / us - 1) * 100, ESTIMATES, "%")
            lines.append(f"\n           {goal(f'a step of {net} with 64 images', us, most, 'us')}; {off}")
        return PASS, ("times of an emulated device mean nothing" if c.emulated else "") + "".join(lines)

    if not c.has("bench-kernels"):
        return Step("speed", 1, [], skip=f"{c.build} has no bench-kernels")
    trained = {net: [*flags, "--batch-size", 64] for net, (flags, _, _) in GOALS.items()}
    if c.emulated:  # something that does not take minutes
        trained = {net: ["--precision", kind, "--limit", 8, "--epochs", 2, "--batch-size", 4]
                   for net, kind in (("net", "fp32"), ("wide", "tf32"))}
    return Step("speed", needs(4, 12), [
        *(c.train(f"speed-{net}", "ours", *flags, "--log-interval", 1000000) for net, flags in trained.items()),
        *(c.call("bench-kernels", "--device=emulated", "--batches=64", "--profile", f"--gpu={gpu}", *listed)
          for _, listed, _ in (GOALS.values() if gpu else [])),
    ], judge_speed, skip=c.no_data)


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

    return Step("accuracy", needs(3, 17), [
        c.call("gyre", *[w for w in c.train_words(f"accuracy-{name}", kernel_set, *evaluated)
                         if w != "--no-eval"])
        for name, kernel_set in sets.items()], judge_accuracy, skip=c.no_data)


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

    return Step("repeat", needs(4, 3), [repeated(name, i) for name in twice for i in (1, 2)], judge_repeat,
                skip=c.no_data)


def judge_torch(c: Check, ran: Ran) -> Verdict:
    if 77 in ran.codes:
        return SKIPPED, "python3 has no torch that sees the device"
    bad = [code for code in ran.codes if code not in (0, 124, None)]
    if bad:
        return FAIL, f"exit code {bad[0]}"
    # Comparisons that were done in time count.
    rows = [row for path in sorted(c.folder.glob(f"{ran.name}-*.json")) for row in json.loads(path.read_text())]
    text = ""
    for row in rows:
        torch_us, gyre_us = ({name: row["batch_size"] * 1e6 / line["images_per_second"] for name, line in found.items()}
                             for found in (row["torch"], row["gyre"]))
        faster = all(gyre_us["ours"] < us for us in torch_us.values())
        text += (f"\n           {row['case']}, {row['batch_size']} images{', TF32' if row['tf32'] else ''}, us a step: torch "
                 + ", ".join(f"{form} {us:.1f}" for form, us in torch_us.items()) + "; gyre "
                 + ", ".join(f"{kernels} {us:.1f}" for kernels, us in gyre_us.items())
                 + f"; goal, ours before torch: {'met' if faster else 'MISSED'}")
    return (PASS if rows else FAIL), (text or "there was no time for a comparison")


def compare(c: Check, out: str, *flags: str) -> Command:
    return Command([sys.executable, str(ROOT / "bench" / "peers" / "torch_eager.py"), "--compare",
                    "--gyre", str(c.tools / "gyre"), "--python", sys.executable, "--data", c.data,
                    "--json", str(c.folder / out), *flags])


def torch(c: Check) -> Step:
    flags = ["--batch-sizes", "64", "--steps", "300", "--forms", "eager,graph", "--kernels", "ours,auto"]
    if c.emulated:
        flags = ["--device", "cpu", "--gyre-device", "emulated", "--kernels", "ours", "--limit", "8",
                 "--batch-sizes", "4", "--steps", "2", "--warmup", "1", "--repeats", "1", "--epochs", "2",
                 "--forms", "eager"]
    cases = [["--case", "net"], *([] if c.emulated else [["--case", "wide", "--tf32"]])]
    return Step("torch", needs(10, 20), [compare(c, f"torch-{case[1]}.json", *case, *flags) for case in cases],
                lambda ran: judge_torch(c, ran), judge_failures=True, skip=c.no_torch)


# This runs only if time is left.
def torch_compile(c: Check) -> Step:
    return Step("torch-compile", needs(4, 30), [
        compare(c, f"torch-compile-{case}.json", "--case", case, "--batch-sizes", "64", "--steps", "300",
                "--forms", "compile", "--kernels", "ours") for case in GOALS
    ], lambda ran: judge_torch(c, ran), judge_failures=True, skip=c.no_torch, optional=True)


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
    # A unit test that has failed before may fail here, too (exit code 1): its result counts there.
    bad = [code for words, code in ran.commands if code not in (0, 124, None)
           and not (code == 1 and any(pathlib.PurePath(word).name == "unit_tests" for word in words))]
    ended = len([code for code in ran.codes if code not in (124, None)])
    text = f"{clean} of {len(ran.codes)} programs without errors" + (f", exit code {bad[0]}" if bad else "")
    return (FAIL if bad or clean < max(ended, 1) else PASS), text + (", then ran out of time" if ran.timed_out else "")


# Checks what failed in earlier steps first.
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

    return Step("memcheck", needs(6, 28), commands_of, judge_sanitizer, judge_failures=True,
                skip=c.no_sanitizer or c.no_data)


# This runs only if time is left.
def sanitizer(c: Check, tool: str) -> Step:
    return Step(tool, needs(3, 2), lambda runner: trainings(c, tool)[:3], judge_sanitizer, judge_failures=True,
                skip=c.no_sanitizer or c.no_data, optional=True)


def stop(c: Check) -> Step:
    job = [c.nccl_gyre, *c.train_words("", "ours", "--comm", "nccl", "--share-gpu", "--timeout", 6,
                                       *DOZEN, "--epochs", 1000000)]
    return Step("stop", needs(4, 26), [c.call("stop-rank", which, c.out(f"stop-{which}"), *job, **c.nccl)
                             for which in ("KILL", "STOP")],
                lambda ran: (PASS, "a killed and a stopped rank are named, exit code 4"), skip=c.no_ranks)


def make_steps(c: Check) -> list[Step]:
    """The steps in order: those that later ones need come first, and those that may lack time last."""
    return [
        device(c), own(c), library(c), nccl(c, "nccl", 2, needs(8, 14)), unit(c), precision(c), *kernels(c), speed(c),
        accuracy(c), repeat(c), torch(c), memcheck(c), stop(c),
        # These run only if time is left.
        sanitizer(c, "initcheck"), sanitizer(c, "racecheck"), nccl(c, "nccl-4", 4, needs(3, 4), optional=True),
        *([] if c.emulated else [torch_compile(c)]),
    ]
