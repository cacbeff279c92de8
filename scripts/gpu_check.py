#!/usr/bin/env python3
"""Checks gyre on this machine's GPU, and measures it, in less than 8 minutes.

BUILD_DIR is taken as it is where it has a gyre, or else built; it may be what scripts/pack.sh wrote on
another machine. cuDNN, cuBLAS and NCCL are also found in the packages of python3. Each step has its own time limit. ARCHIVE has all logs and figures, whatever happens,
and the summary is what stands last in the output.
Exit codes: 0; 1: a step failed; 2: wrong use, or the build failed; 77: no GPU here; 128 + n: ended by
signal n.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

from step_runner import FAIL, PASS, SKIPPED, Command, Ran, Runner, Step, Verdict

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUDGET = 470.0  # seconds for all steps
POINTS = 0.7  # that accuracies after 3 epochs may differ; seeds alone make 0.3 in one run of four
# That losses of 20 steps may differ between sets of kernels; later, a flipped ReLU or pooling choice,
# which rounding alone decides, may show.
RELATIVE = 1e-4
# That they may differ where only the order of sums does, on a net without such choices: 8 times
# float32's epsilon, as in tests/losses.hpp.
SAME = 8 * 2.0**-23

# What gyre's own kernels have most ways through: odd extents, strides, padding, uneven channels.
ODD_NET = """conv 6 k3 s2 p1
relu
conv 10 k5 s2 p2
maxpool 2
relu
dropout 0.3
linear 33
relu
linear classes
"""


# ---- reading what gyre wrote


def events(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: pathlib.Path) -> list[float]:
    """Of all steps; ValueError where there are none, or where one is not finite."""
    found = [event["loss"] for event in events(path) if event["event"] == "step"]
    if not found or not all(isinstance(x, float) and abs(x) < 1e30 for x in found):
        raise ValueError(f"{path.name} has no losses, or some that are not finite")
    return found


def last(path: pathlib.Path, key: str) -> float:
    return [event[key] for event in events(path) if key in event][-1]


def difference(a: pathlib.Path, b: pathlib.Path) -> float:
    """The largest relative difference of two runs' losses; infinite where the numbers of steps differ."""
    one, other = losses(a), losses(b)
    if len(one) != len(other):
        return float("inf")
    return max(abs(x - y) / max(abs(x), 1.0) for x, y in zip(one, other))


# ---- programs of their own, started as this script with a first word


def hold_context() -> int:
    """Keeps the GPU initialised, which without persistence mode each process would do anew."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(f"no context is held: {error}", file=sys.stderr)
        return 1
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for result in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
                   cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)):
        if result != 0:
            print(f"no context is held: CUDA error {result}", file=sys.stderr)
            return 1
    signal.pause()
    return 0


def escaped(name: str) -> str:
    """A test case's name where Catch2 wants a choice of cases."""
    return re.sub(r"([\\,\[\]*\"])", r"\\\1", name)


def isolate(report: str, program: str, *words: str) -> int:
    """Runs Catch2 tests, and those that failed again singly: an error that stays with the process
    makes all later cases fail. 0 where none fails alone; 1."""
    pathlib.Path(report).unlink(missing_ok=True)
    code = subprocess.call([program, *words, "-r", "xml", "-o", report])
    text = pathlib.Path(report).read_text(errors="replace") if os.path.exists(report) else ""
    cases = re.split(r"<TestCase name=", text)[1:]
    names, failed = [], []
    for case in cases:
        name = re.match(r'"([^"]*)"', case)
        if name:
            names.append(name[1])
            if not re.search(r'<OverallResult success="true"', case):
                failed.append(name[1])
    print(f"{len(names)} cases, {len(failed)} failed, exit code {code}", flush=True)
    if code != 0 and not failed:
        print("isolate: the program failed beside its cases", flush=True)
        return 1
    alone = []
    for name in failed:
        for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
            name = name.replace(entity, char)
        print(f"again, alone: {name}", flush=True)
        if subprocess.call([program, escaped(name)]) != 0:
            alone.append(name)
            print(f"FAILED ALONE: {name}", flush=True)
    print(f"failed alone: {len(alone)} of {len(names)}", flush=True)
    return 1 if alone else 0


def stop_rank(which: str, running: str, *job: str) -> int:
    """Two ranks, of which the second gets the signal after a dozen steps: the first must end in time
    with exit code 4 and name it. running: the first one's --json."""
    job_words = [*job, "--init-method", f"tcp://127.0.0.1:{random.randrange(20000, 30000)}",
                 "--world-size", "2"]
    path = pathlib.Path(running)
    path.unlink(missing_ok=True)
    peer = subprocess.Popen([*job_words, "--rank", "1"])
    survivor = subprocess.Popen([*job_words, "--rank", "0", "--json", running],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end and survivor.poll() is None:
            if path.exists() and path.read_text().count('"event":"step"') >= 12:
                break
            time.sleep(0.1)
        peer.send_signal(getattr(signal, f"SIG{which}"))
        begin = time.monotonic()
        try:
            text, _ = survivor.communicate(timeout=25)
        except subprocess.TimeoutExpired:
            print(f"the other rank was still there 25 s after SIG{which}")
            return 1
        print(text)
        print(f"SIG{which} to rank 1: exit code {survivor.returncode} of rank 0 after "
              f"{time.monotonic() - begin:.1f} s")
        return 0 if survivor.returncode == 4 and "rank 1 on " in text else 1
    finally:
        for process in (peer, survivor):
            process.kill()
            process.wait()


HELPERS = {"hold-context": hold_context, "isolate": isolate, "stop-rank": stop_rank}


# ---- the steps


class Check:
    """What steps have in common: where things are, and how gyre is called."""

    def __init__(self, build: pathlib.Path, folder: pathlib.Path, data: str, device: str):
        self.build, self.folder, self.data, self.device = build, folder, data, device
        self.emulated = device == "emulated"
        self.tools = pathlib.Path(tempfile.mkdtemp(prefix="gyre-check-"))
        found = [d for p in sys.path if p for d in sorted(glob.glob(f"{p}/nvidia/*/lib"))]
        known = os.environ.get("LD_LIBRARY_PATH")
        self.libraries = ":".join([str(build / "lib"), *found, *([known] if known else [])])
        (self.tools / "odd.txt").write_text(ODD_NET)
        # Only gyre's programs get these libraries: python3 and the system's tools have their own.
        for name in ("gyre", "gyre_for_fake_nccl", "unit_tests", "bench-kernels", "bench-allreduce"):
            program = self.tools / name
            program.write_text(f"#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(self.libraries)} exec "
                               f"{shlex.quote(str(build / name))} \"$@\"\n")
            program.chmod(0o755)
        self.sanitizer = shutil.which("compute-sanitizer") or next(
            iter(sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))), "")
        # Ranks that share the GPU take turns: small messages, few channels, one algorithm.
        self.nccl = {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
                     "NCCL_IB_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
        self.nccl_gyre = self.tools / "gyre"
        if self.emulated:  # the tests' stand-in
            self.nccl_gyre = self.tools / "gyre_for_fake_nccl"
            self.nccl["GYRE_NCCL_LIBRARY"] = str(build / "tests" / "libfake_nccl.so")

    def close(self) -> None:
        shutil.rmtree(self.tools, ignore_errors=True)

    def has(self, program: str) -> bool:
        return os.access(self.build / program, os.X_OK)

    def call(self, *words: object, **env: str) -> Command:
        """Of one of gyre's programs, of this script's own, or of any at a path."""
        first, *rest = (str(word) for word in words)
        if first in HELPERS:
            return Command([sys.executable, str(pathlib.Path(__file__).resolve()), first, *rest], env)
        return Command([first if "/" in first else str(self.tools / first), *rest], env)

    def out(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}.jsonl"

    def train_words(self, name: str, kernels: str, *flags: object) -> list[str]:
        """name: of the file with its figures; empty: none. flags replace the usual ones."""
        given = [str(flag) for flag in flags]
        words = ["train", "--data", self.data, "--no-eval"]
        for flag, value in (("--epochs", "1"), ("--log-interval", "1")):
            words += [] if flag in given else [flag, value]
        if kernels == "cpu":
            words += ["--device", "cpu"]
        else:
            words += ["--device", self.device, "--kernels", kernels]
        return [*words, *([] if name == "" else ["--json", str(self.out(name))]), *given]

    def train(self, name: str, kernels: str, *flags: object) -> Command:
        return self.call("gyre", *self.train_words(name, kernels, *flags))

    def ranks(self, name: str, count: int, *flags: object) -> Command:
        words = self.train_words(name, "ours", "--global-batch", 32, "--share-gpu",
                                 "--model", ROOT / "tests" / "smooth.model", *flags)  # fmt: skip
        return self.call(str(ROOT / "tests" / "launch_ranks.sh"), count, self.nccl_gyre, *words,
                         **self.nccl)

    def same(self, *pairs: tuple[str, str]) -> list[str]:
        """The pairs of runs whose losses are not equal bit by bit."""
        return [f"{a} and {b} differ" for a, b in pairs
                if losses(self.out(a)) != losses(self.out(b))]

    def close_to(self, allowed: float, first: str, *others: str) -> tuple[list[str], str]:
        """Those too far from the first, and a text of all differences."""
        found = [(name, difference(self.out(first), self.out(name))) for name in others]
        return ([f"{name} is {d:.1e} from {first}" for name, d in found if not d <= allowed],
                ", ".join(f"{name} {d:.1e}" for name, d in found))


def verdict(problems: list[str], text: str) -> Verdict:
    return (FAIL, "; ".join(problems)) if problems else (PASS, text)


def make_steps(c: Check) -> list[Step]:
    em = c.emulated  # gets little of everything, and has no libraries
    no_data = "" if c.data else "no data set: give --data, or run scripts/get-mnist.sh"
    twenty = ["--limit", 320 if em else 1280]
    few = ["--limit", 64 if em else 6400, "--epochs", 2, "--batch-size", 24]
    steps: list[Step] = []

    def add(name: str, seconds: float, commands: object, *args: object, **options: object) -> None:
        steps.append(Step(name, seconds, commands, *args, **options))

    # 10 s
    def judge_device(ran: Ran) -> Verdict:
        gpu = re.search(r"^GPU 0 +(.*)", ran.text, re.M)
        name = gpu[1] if gpu and not em else f"device {c.device}"
        return PASS, f"{name}; data {c.data or 'none'}"

    system = [] if em else [Command(["nvidia-smi"])]
    add("device", 10, [*system, Command(["df", "-h", "/dev/shm"]), c.call("gyre", "info")],
        judge_device)

    # 25 s
    adam = ["--optimizer", "adam", "--max-grad-norm", 5]

    def judge_own(ran: Ran) -> Verdict:
        bad, text = c.close_to(RELATIVE, "cpu", "ours")
        bad += c.same(("ours", "ours-graph"), ("ours-adam", "ours-adam-graph"))
        if "without a CUDA graph" in ran.text:
            bad.append("a step could not be captured")
        speeds = [f"{last(c.out(n), 'images_per_second'):.0f}" for n in ("ours-adam", "ours-adam-graph")]
        return verdict(bad, f"losses from the CPU's: {text}; a graph changes no bit; images/s "
                            f"{speeds[0]} without, {speeds[1]} with it")

    add("own", 25, [
        c.train("cpu", "cpu", *twenty),
        c.train("ours", "ours", *twenty, "--graph", "off"),
        c.train("ours-graph", "ours", *twenty, "--graph", "on"),
        c.train("ours-adam", "ours", *few, *adam, "--graph", "off"),
        c.train("ours-adam-graph", "ours", *few, *adam, "--graph", "on"),
    ], judge_own, skip=no_data)

    # 20 s. Algorithms picked by timing differ from run to run, some with atomics: bits are compared
    # with --deterministic only.
    def judge_library(ran: Ran) -> Verdict:
        bad, text = c.close_to(RELATIVE, "cpu", "cudnn", "auto")
        return verdict(bad + c.same(("cudnn", "cudnn-graph")), f"losses from the CPU's: {text}; "
                       "deterministic cuDNN with and without a graph: equal bit by bit")

    add("library", 20, [
        c.train("cudnn", "cudnn", *twenty, "--deterministic", "--graph", "off"),
        c.train("cudnn-graph", "cudnn", *twenty, "--deterministic", "--graph", "on"),
        c.train("auto", "auto", *twenty, "-v"),
    ], judge_library, skip=no_data or ("the device is emulated" if em else ""))

    # 45 s: 2 ranks, which take turns on the GPU.
    no_ranks = no_data
    if not no_ranks and not c.has(c.nccl_gyre.name):
        no_ranks = f"{c.build} has no {c.nccl_gyre.name}"
    if not no_ranks and "compiled in" not in gloo_line(c):
        no_ranks = "ranks are started over Gloo here, which this build lacks"
    dozen = ["--limit", 12 * 32]

    def judge_nccl(count: int) -> object:
        def judge(ran: Ran) -> Verdict:
            eager, graph = f"nccl-{count}", f"nccl-{count}-graph"
            bad, text = c.close_to(SAME, f"gloo-{count}", eager)
            times = re.findall(r"^ +(\d+) +\d+ +float +sum +([\d.]+) .* (\d+)$", ran.text, re.M)
            bad += [f"wrong sums of {size} bytes" for size, _, wrong in times if wrong != "0"]
            rows = ", ".join(f"{size} B {us} us" for size, us, _ in times)
            return verdict(bad + c.same((eager, graph)), f"{count} ranks, from Gloo's losses: {text}; "
                           f"with a graph equal bit by bit" + (f"; allreduce {rows}" if rows else ""))
        return judge

    bench = []
    if c.has("bench-allreduce"):
        where = ["--device", "cpu"] if em else ["--device", "cuda", "--comm", "nccl", "--share-gpu"]
        bench = [c.call(str(ROOT / "tests" / "launch_ranks.sh"), 2, c.tools / "bench-allreduce", "-b", "4K",
                        "-e", "1M", "-f", 16, "-n", 5, "-w", 2, *where, **c.nccl, NCCL_DEBUG="INFO",
                        NCCL_DEBUG_FILE=str(c.folder / "nccl-info.%h.%p"))]
    add("nccl", 45, [
        *bench,
        c.ranks("gloo-2", 2, *dozen, "--comm", "gloo"),
        c.ranks("nccl-2", 2, *dozen, "--comm", "nccl", "--graph", "off"),
        c.ranks("nccl-2-graph", 2, *dozen, "--comm", "nccl", "--graph", "on"),
    ], judge_nccl(2), skip=no_ranks)

    # 60 s
    def judge_unit(ran: Ran) -> Verdict:
        if not em and "skipped: the backends on a GPU" in ran.text:
            return FAIL, "the tests on the GPU were skipped: the program saw none"
        alone = re.findall(r"^FAILED ALONE: (.*)", ran.text, re.M)
        cases = re.search(r"^(\d+ cases, \d+ failed).*", ran.text, re.M)
        if alone or not ran.good:
            return FAIL, f"{cases[1] if cases else 'no case ended'}; alone: {', '.join(alone) or 'none'}"
        return PASS, f"{cases[1]}; none fails alone"

    unit_words = ["dropout*"] if em else []
    add("unit", 60, [c.call("isolate", c.folder / "unit.xml", c.tools / "unit_tests", *unit_words,
                            GYRE_TEST_BACKENDS="emulated" if em else "gpu")],
        judge_unit, judge_failures=True, skip="" if c.has("unit_tests") else f"{c.build} has no unit_tests")

    # 90 s, a program for each net, so that no more than one net's figures can be lost.
    def judge_kernels(ran: Ran) -> Verdict:
        timed = len(re.findall(r"/manual_time .* us ", ran.text))
        missed = len(re.findall(r"^MISSED:", ran.text, re.M))
        wrong = len(re.findall("ERROR OCCURRED", ran.text))
        text = f"{timed} timings, {wrong} wrong results, goals missed: {missed}"
        good = ran.good or ran.codes == [3]  # goals are there to be missed until they are met
        return (PASS if good and not wrong else FAIL), text + (", ran out of time" if ran.timed_out else "")

    for net, batches in (("net", "64,256,1024,4096"), ("wide", "64,1024")):
        words = [f"--device={c.device}", "--check", f"--benchmark_filter=^{net}/",
                 f"--batches={2 if em else batches}", f"--benchmark_out={c.folder}/kernels-{net}.json"]
        skip = "" if c.has("bench-kernels") else f"{c.build} has no bench-kernels"
        if em and net == "wide":
            skip = "the device is emulated"
        add(f"kernels-{net}", 45, [c.call("bench-kernels", *words)], judge_kernels, judge_failures=True,
            skip=skip)

    # 50 s
    sets = {"cpu": "cpu", "ours": "ours"} | ({} if em else {"library": "cudnn"})
    evaluated = ["--epochs", 1 if em else 3, "--log-interval", 1000000] + (["--limit", 256] if em else [])

    def judge_accuracy(ran: Ran) -> Verdict:
        points = {name: 100 * last(c.out(f"accuracy-{name}"), "test_accuracy") for name in sets}
        text = ", ".join(f"{name} {points[name]:.2f} % ({last(c.out(f'accuracy-{name}'), 'images_per_second'):.0f}"
                         " images/s)" for name in sets)
        apart = max(points.values()) - min(points.values())
        return (PASS if apart <= POINTS else FAIL), f"{apart:.2f} points apart: {text}"

    add("accuracy", 35, [
        c.call("gyre", *[w for w in c.train_words(f"accuracy-{name}", kernels, *evaluated) if w != "--no-eval"])
        for name, kernels in sets.items()], judge_accuracy, skip=no_data)

    def repeated(name: str, i: int) -> Command:
        flags = ["--deterministic"] if name == "cudnn" else []
        return c.train(f"repeat-{name}-{i}", name, *few, *flags, "--save", c.tools / f"{name}-{i}.safetensors")

    twice = ["ours"] + ([] if em else ["cudnn"])

    def judge_repeat(ran: Ran) -> Verdict:
        bad = c.same(*((f"repeat-{name}-1", f"repeat-{name}-2") for name in twice))
        bad += [f"the weights of {name} differ" for name in twice
                if (c.tools / f"{name}-1.safetensors").read_bytes() !=
                (c.tools / f"{name}-2.safetensors").read_bytes()]
        return verdict(bad, f"{', '.join(twice)}: losses and weights of two runs equal bit by bit")

    add("repeat", 15, [repeated(name, i) for name in twice for i in (1, 2)], judge_repeat, skip=no_data)

    # 50 s
    def judge_torch(ran: Ran) -> Verdict:
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

    torch_skip = no_data
    if not torch_skip and not glob.glob(f"{c.data}/train-images-idx3-ubyte.gz"):
        torch_skip = f"the comparison reads .gz files only, and {c.data} has none"
    torch = ["--batch-sizes", "64", "--steps", "300", "--forms", "eager,fused,graph"]
    if em:
        torch = ["--device", "cpu", "--gyre-device", "emulated", "--kernels", "ours", "--case", "net",
                 "--limit", "8", "--batch-sizes", "4", "--steps", "2", "--warmup", "1", "--repeats", "1",
                 "--epochs", "2", "--forms", "eager"]

    def compare(out: str, *flags: str) -> Command:
        return Command([sys.executable, str(ROOT / "bench" / "peers" / "torch_eager.py"), "--compare",
                        "--gyre", str(c.tools / "gyre"), "--python", sys.executable, "--data", c.data,
                        "--json", str(c.folder / out), *flags])

    add("torch", 50, [compare("torch.json", *torch)], judge_torch, judge_failures=True, skip=torch_skip)

    # 60 s: what failed above first.
    def sanitized(tool: str, name: str, *flags: object) -> Command:
        return c.call(c.sanitizer, "--tool", tool, "--error-exitcode", 99, c.build / "gyre",
                      *c.train_words("", name, *flags), LD_LIBRARY_PATH=c.libraries)

    def trainings(tool: str) -> list[Command]:
        small = ["--limit", 128]
        return [sanitized(tool, "ours", *small), sanitized(tool, "ours", *small, "--graph", "on"),
               sanitized(tool, "ours", "--model", c.tools / "odd.txt", "--limit", 70, "--batch-size", 35,
                         "--optimizer", "adam"),
               sanitized(tool, "ours", "--limit", 64, "--tf32"),
               sanitized(tool, "ours", "--model", "wide", "--limit", 24, "--batch-size", 12,
                         "--optimizer", "adam")]

    def memcheck(runner: Runner) -> list[Command]:
        commands = trainings("memcheck")
        failed = runner.failed()
        if "unit" in failed:
            alone = re.findall(r"^FAILED ALONE: (.*)", (c.folder / "unit.log").read_text(), re.M)
            first = [c.call(c.sanitizer, "--tool", "memcheck", "--error-exitcode", 99, c.build / "unit_tests",
                            escaped(name), GYRE_TEST_BACKENDS="gpu", LD_LIBRARY_PATH=c.libraries)
                     for name in alone[:3]]
            commands = first + commands
        if "library" in failed:
            commands = [sanitized("memcheck", "cudnn", "--limit", 64)] + commands
        return commands

    def judge_sanitizer(ran: Ran) -> Verdict:
        if "Device not supported" in ran.text:
            return SKIPPED, "compute-sanitizer does not support this device"
        clean = len(re.findall("ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", ran.text))
        bad = [code for code in ran.codes if code not in (0, None, 124)]
        text = f"{clean} of {len(ran.codes)} programs without errors"
        return (FAIL if bad or not clean else PASS), text + (", then the time was over" if ran.timed_out else "")

    no_sanitizer = "the device is emulated" if em else "" if c.sanitizer else \
        "compute-sanitizer is not on this machine"
    add("memcheck", 60, memcheck, judge_sanitizer, judge_failures=True, skip=no_sanitizer or no_data)

    # 50 s
    job = [c.nccl_gyre, *c.train_words("", "ours", "--comm", "nccl", "--share-gpu", "--timeout", 6,
                                       *dozen, "--epochs", 1000000)]
    add("stop", 50, [c.call("stop-rank", which, c.out(f"stop-{which}"), *job, **c.nccl)
                     for which in ("KILL", "STOP")],
        lambda ran: (PASS, "a killed and a stopped rank are named, exit code 4"), skip=no_ranks)

    # 35 s, with what is left
    for tool in ("initcheck", "racecheck"):
        add(tool, 12, lambda runner, tool=tool: trainings(tool)[:3], judge_sanitizer, judge_failures=True,
            skip=no_sanitizer or no_data, optional=True)
    add("nccl-4", 15, [
        c.ranks("gloo-4", 4, *dozen, "--comm", "gloo"),
        c.ranks("nccl-4", 4, *dozen, "--comm", "nccl", "--graph", "off"),
        c.ranks("nccl-4-graph", 4, *dozen, "--comm", "nccl", "--graph", "on"),
    ], judge_nccl(4), skip=no_ranks, optional=True)
    if not em:
        add("torch-compile", 40, [compare("torch-compile.json", "--batch-sizes", "64", "--steps", "300",
                                          "--forms", "compile", "--kernels", "ours")],
            judge_torch, judge_failures=True, skip=torch_skip, optional=True)
    return steps


def gloo_line(c: Check) -> str:
    try:
        info = subprocess.run([c.nccl_gyre, "info"], capture_output=True, text=True, timeout=10,
                              env=os.environ | c.nccl)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next((line for line in info.stdout.splitlines() if line.startswith("Gloo ")), "")


# ---- what is needed first


def has_images(folder: pathlib.Path) -> bool:
    return any(folder.glob("train-images*"))


def find_data(wanted: str) -> str:
    """A folder with images, or an empty text."""
    if wanted and has_images(pathlib.Path(wanted)):
        return str(pathlib.Path(wanted).resolve())
    places = [pathlib.Path(p) for p in os.environ.get("GYRE_DATA", "").split(":") if p]
    places += [ROOT / "data-cache", pathlib.Path.home() / ".cache" / "gyre",
               pathlib.Path("/usr/local/share/datasets"), pathlib.Path("/usr/share/datasets")]
    names = [wanted] if wanted else ["mnist", "fashion-mnist"]
    candidates = ([] if wanted else places) + [p / name for name in names for p in places]
    return next((str(p) for p in candidates if has_images(p)), "")


def make_build(build: pathlib.Path, device: str) -> bool:
    log = build.with_name(build.name + "-gpu-check.log")
    print(f"building in {build} (log: {log})", flush=True)
    architecture = "90" if device == "emulated" else "native"
    with open(log, "wb") as out:
        for words in (["cmake", "--preset", "release", "-B", str(build),
                       f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"], ["cmake", "--build", str(build)]):
            if subprocess.call(words, cwd=ROOT, stdout=out, stderr=out) != 0:
                print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
                print(f"gpu-check: the build failed; the whole log is in {log}", file=sys.stderr)
                return False
    return True


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] in HELPERS:
        return HELPERS[sys.argv[1]](*sys.argv[2:])
    parser = argparse.ArgumentParser(prog="gpu-check.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default=str(ROOT / "build"), metavar="BUILD_DIR",
                        help="default: build")
    parser.add_argument("archive", nargs="?", metavar="ARCHIVE", help="default: gpu-check-DATE.tar.gz",
                        default=time.strftime("gpu-check-%Y%m%d-%H%M%S.tar.gz"))
    parser.add_argument("--data", default="", help="name or folder of the images; default: mnist, or else "
                        "fashion-mnist, in $GYRE_DATA, data-cache, /usr/share/datasets, ...")
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda",
                        help="emulated: tries the check itself without a GPU, on very little data")
    args = parser.parse_args()
    archive = pathlib.Path(args.archive).absolute()
    if not archive.name.endswith(".tar.gz") or archive.is_dir():
        parser.error(f"ARCHIVE {args.archive}: it must be a file that ends in .tar.gz")
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"ARCHIVE {args.archive}: {error}")
    if not os.access(archive.parent, os.W_OK):
        parser.error(f"ARCHIVE {args.archive}: its folder cannot be written")
    if args.device == "cuda" and "GPU " not in gpus():
        print(f"gpu-check: no GPU on {os.uname().nodename}: nvidia-smi is missing or lists none; "
              "nothing was checked", file=sys.stderr)
        return 77
    build = pathlib.Path(args.build).absolute()
    if build.is_file():
        with tempfile.TemporaryDirectory(prefix="gyre-check-build-") as unpacked:
            try:
                with tarfile.open(build) as tar:
                    tar.extractall(unpacked)
            except (OSError, tarfile.TarError) as error:
                parser.error(f"BUILD_DIR {args.build}: no folder, and no pack: {error}")
            return check(pathlib.Path(unpacked), archive, args)
    return check(build, archive, args)


def check(build: pathlib.Path, archive: pathlib.Path, args: argparse.Namespace) -> int:
    if not os.access(build / "gyre", os.X_OK) and not make_build(build, args.device):
        return 2

    os.environ.setdefault("NCCL_DEBUG", "WARN")
    os.environ.setdefault("CUDA_LOG_FILE", "stderr")  # reasons in plain words
    emulated = args.device == "emulated"
    with tempfile.TemporaryDirectory(prefix="gyre-check-logs-") as folder:
        c = Check(build, pathlib.Path(folder), find_data(args.data), args.device)
        try:
            # The emulator, on a busy machine, may take longer than a GPU.
            runner = Runner(c.folder, archive, f"gyre on {args.device}", 3.0 if emulated else 1.0,
                            1e9 if emulated else BUDGET,
                            probe=c.train("probe", "ours", "--limit", 64) if c.data else None,
                            beside=None if emulated else c.call("hold-context"))
            return runner.run(make_steps(c))
        finally:
            c.close()


def gpus() -> str:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    sys.exit(main())
