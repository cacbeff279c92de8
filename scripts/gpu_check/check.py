"""Code shared by the steps: paths, calls of gyre, and reading its output."""

from __future__ import annotations

import functools
import glob
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

from programs import HELPERS
from step_runner import Command

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

# A net that takes many paths through gyre's kernels: odd extents, strides, padding, uneven channels.
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


def events(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: pathlib.Path) -> list[float]:
    """The losses of all steps; ValueError if there are none or if one is not finite."""
    found = [event["loss"] for event in events(path) if event["event"] == "step"]
    if not found or not all(isinstance(x, float) and abs(x) < 1e30 for x in found):
        raise ValueError(f"{path.name} has no losses, or some that are not finite")
    return found


def last(path: pathlib.Path, key: str) -> float:
    return [event[key] for event in events(path) if key in event][-1]


def difference(a: pathlib.Path, b: pathlib.Path) -> float:
    """The largest relative difference of two runs' losses; infinite if the numbers of steps differ."""
    one, other = losses(a), losses(b)
    if len(one) != len(other):
        return float("inf")
    return max(abs(x - y) / max(abs(x), 1.0) for x, y in zip(one, other))


class Check:
    """Paths and calls of gyre, shared by the steps."""

    def __init__(self, build: pathlib.Path, folder: pathlib.Path, data: str, device: str):
        self.build, self.folder, self.data, self.device = build, folder, data, device
        self.emulated = device == "emulated"
        self.tools = pathlib.Path(tempfile.mkdtemp(prefix="gyre-check-"))
        found = [d for p in sys.path if p for d in sorted(glob.glob(f"{p}/nvidia/*/lib"))]
        known = os.environ.get("LD_LIBRARY_PATH")
        self.libraries = ":".join([str(build / "lib"), *found, *([known] if known else [])])
        (self.tools / "odd.txt").write_text(ODD_NET)
        # Only gyre's programs get these libraries; python3 and the system's tools have their own.
        for name in ("gyre", "gyre_for_fake_nccl", "unit_tests", "bench-kernels", "bench-allreduce"):
            program = self.tools / name
            program.write_text(f"#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(self.libraries)} exec "
                               f"{shlex.quote(str(build / name))} \"$@\"\n")
            program.chmod(0o755)
        self.sanitizer = shutil.which("compute-sanitizer") or next(
            iter(sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))), "")
        # Ranks that share the GPU take turns, so NCCL uses small messages, few channels, one algorithm.
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
        """A call of one of gyre's programs, of one in programs.py, or of any program at a path."""
        first, *rest = (str(word) for word in words)
        if first in HELPERS:
            return Command([sys.executable, str(FOLDER / "programs.py"), first, *rest], env)
        return Command([first if "/" in first else str(self.tools / first), *rest], env)

    def out(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}.jsonl"

    def train_words(self, name: str, kernels: str, *flags: object) -> list[str]:
        """name: of the file with its figures; empty: none. flags replace the defaults."""
        given = [str(flag) for flag in flags]
        words = ["train", "--data", self.data, "--no-eval"]
        for flag, value in (("--epochs", "1"), ("--log-interval", "1")):
            words += [] if flag in given else [flag, value]
        if kernels == "cpu":
            words += ["--device", "cpu"]
        else:
            words += ["--device", self.device, "--kernels", kernels]
        return [*words, *([] if name == "" else ["--metrics", str(self.out(name))]), *given]

    def train(self, name: str, kernels: str, *flags: object) -> Command:
        return self.call("gyre", *self.train_words(name, kernels, *flags))

    def ranks(self, name: str, count: int, *flags: object) -> Command:
        words = self.train_words(name, "ours", "--global-batch", 32, "--share-gpu",
                                 "--model", ROOT / "tests/program/smooth.model", *flags)  # fmt: skip
        return self.call(str(ROOT / "tests/comm/launch_ranks.sh"), count, self.nccl_gyre, *words,
                         **self.nccl)

    def same(self, *pairs: tuple[str, str]) -> list[str]:
        """The pairs of runs whose losses are not equal bit by bit."""
        return [f"{a} and {b} differ" for a, b in pairs
                if losses(self.out(a)) != losses(self.out(b))]

    def close_to(self, allowed: float, first: str, *others: str) -> tuple[list[str], str]:
        """The runs that are too far from the first, and a text with all differences."""
        found = [(name, difference(self.out(first), self.out(name))) for name in others]
        return ([f"{name} is {d:.1e} from {first}" for name, d in found if not d <= allowed],
                ", ".join(f"{name} {d:.1e}" for name, d in found))

    @functools.cached_property
    def no_data(self) -> str:
        """Why steps that train cannot run; empty if they can. The other no_... properties are alike."""
        return "" if self.data else "no data set: give --data, or run scripts/get-mnist.sh"

    @functools.cached_property
    def no_ranks(self) -> str:
        if self.no_data:
            return self.no_data
        if not self.has(self.nccl_gyre.name):
            return f"{self.build} has no {self.nccl_gyre.name}"
        if "compiled in" not in self.gloo_line():
            return "ranks start over Gloo here, which this build lacks"
        return ""

    @functools.cached_property
    def no_torch(self) -> str:
        if self.no_data or glob.glob(f"{self.data}/train-images-idx3-ubyte.gz"):
            return self.no_data
        return f"the comparison reads only .gz files, and {self.data} has none"

    @functools.cached_property
    def no_sanitizer(self) -> str:
        return "the device is emulated" if self.emulated else "" if self.sanitizer else \
            "compute-sanitizer is not on this machine"

    def gloo_line(self) -> str:
        try:
            info = subprocess.run([self.nccl_gyre, "info"], capture_output=True, text=True, timeout=10,
                                  env=os.environ | self.nccl)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return next((line for line in info.stdout.splitlines() if line.startswith("Gloo ")), "")
