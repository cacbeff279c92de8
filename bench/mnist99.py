#!/usr/bin/env python3
"""Measures how surely, and in how many seconds, gyre gets 99 % of MNIST's test images right.

    python3 bench/mnist99.py --gyre build/gyre --seeds 30 --torch-seeds 5

This runs `gyre train --config mnist99` on two ranks with each seed, and in between the same recipe with
PyTorch DDP (peers/torch_ddp.py, also on two ranks). The seconds of training are those of the epochs'
steps; the others include starting up, reading the data, and evaluating. The exit status is 1 if gyre's
mean accuracy is below 99.0 %, or its seconds of training are above --max-seconds.

    python3 bench/mnist99.py --tune

This found the recipe: it trains on the first 50,000 training images and evaluates on the other 10,000,
never on the test images.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import itertools
import json
import os
import pathlib
import platform
import shlex
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
import torch_ddp  # noqa: E402

HELD_OUT = 10000
GRID = {"--epochs": (2, 3), "--global-batch": (128, 256, 512), "--lr": (0.006, 0.01, 0.015, 0.02)}


def run(command: list[str]) -> str:
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **os.environ}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"mnist99.py: exit status {done.returncode} from {shlex.join(command)}\n"
                 f"{(done.stderr or done.stdout).strip()[-2000:]}")  # fmt: skip
    return done.stdout


def train(args: argparse.Namespace, seed: int, *flags: str) -> tuple[float, float, float]:
    """Accuracy in %, seconds of training and total seconds of one run of the recipe."""
    with tempfile.TemporaryDirectory(prefix="gyre-mnist99-") as folder:
        file = pathlib.Path(folder, "run.jsonl")
        command = [*shlex.split(args.mpirun), "-np", "2", args.gyre, "train", "--config", "mnist99"]
        command += ["--data", args.data, "--device", "cpu", "--threads", "1", "--seed", str(seed)]
        start = time.perf_counter()
        run([*command, *flags, "--metrics", str(file)])
        whole = time.perf_counter() - start
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    epochs = [line for line in lines if line["event"] == "epoch"]
    seconds = sum(epoch["train_seconds"] for epoch in epochs)
    return 100 * epochs[-1]["test_accuracy"], seconds, whole


def train_torch(args: argparse.Namespace, seed: int) -> tuple[float, float, float]:
    """The same figures for PyTorch."""
    command = [sys.executable, torch_ddp.__file__, "--data", args.data, "--optimizer", "adam"]
    command += ["--lr", "0.01", "--betas", "0.7", "0.9", "--one-cycle", "--no-dropout", "--epochs"]
    command += ["3", "--batch-size", "128", "--form", "auto", "--evaluate", "--seed", str(seed)]
    command += ["--python", args.python] if args.python else []
    start = time.perf_counter()
    lines = [json.loads(line) for line in run(command).splitlines() if line.startswith("{")]
    whole = time.perf_counter() - start
    seconds = sum(line["seconds"] for line in lines if line["event"] == "epoch")
    return 100 * lines[-1]["test_accuracy"], seconds, whole


def report(name: str, runs: list[tuple[float, float, float]]) -> None:
    accuracy, seconds, whole = zip(*runs)
    deviation = statistics.stdev(accuracy) if len(runs) > 1 else 0.0
    print(f"{name}: {statistics.mean(accuracy):.3f} % mean, {deviation:.3f} standard deviation, "
          f"{min(accuracy):.2f} least, over {len(runs)} seeds; training {statistics.median(seconds):.2f} s "
          f"({min(seconds):.2f}-{max(seconds):.2f}), with set-up and evaluation "
          f"{statistics.median(whole):.2f} s (medians)", flush=True)  # fmt: skip


def write_held_out(source: pathlib.Path, to: pathlib.Path) -> None:
    """Writes the training set, with its last HELD_OUT images as the test set."""
    for what, dimensions in (("images-idx3", 3), ("labels-idx1", 1)):
        raw = gzip.decompress((source / f"train-{what}-ubyte.gz").read_bytes())
        extents = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
        start, size = 4 + 4 * dimensions, (len(raw) - 4 - 4 * dimensions) // extents[0]
        kept = extents[0] - HELD_OUT
        for part, first, count in (("train", 0, kept), ("t10k", kept, HELD_OUT)):
            header = raw[:4] + struct.pack(f">{dimensions}I", count, *extents[1:])
            body = raw[start + first * size : start + (first + count) * size]
            (to / f"{part}-{what}-ubyte").write_bytes(header + body)


def tune(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="gyre-held-out-") as folder:
        write_held_out(torch_ddp.dataset_dir(args.data), pathlib.Path(folder))
        args.data = folder
        for values in itertools.product(*GRID.values()):
            flags = [str(word) for pair in zip(GRID, values) for word in pair]
            runs = [train(args, seed, *flags) for seed in range(1, args.seeds + 1)]
            report(shlex.join(flags), runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gyre", default=str(ROOT / "build" / "gyre"))
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--data", default="mnist", help="directory of MNIST's .gz files, or data set name")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--torch-seeds", type=int, default=5, help="seeds for PyTorch; 0: none")
    parser.add_argument("--python", help="interpreter with torch")
    parser.add_argument("--tune", action="store_true", help="search on held-out training images")
    parser.add_argument("--max-seconds", type=float, default=3.0, help="most seconds of training")
    args = parser.parse_args()

    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    print(f"{platform.platform()}, {os.cpu_count()} cores, {now}, load {os.getloadavg()[0]:.2f}")
    print(shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]), flush=True)
    if args.tune:
        tune(args)
        return 0
    torch_every = max(1, args.seeds // args.torch_seeds) if args.torch_seeds else 0
    ours, theirs = [], []
    for seed in range(1, args.seeds + 1):
        ours.append(train(args, seed))
        print("gyre seed {}: {:.2f} %, {:.2f} s, {:.2f} s in total".format(seed, *ours[-1]), flush=True)
        if torch_every and seed % torch_every == 0 and len(theirs) < args.torch_seeds:
            theirs.append(train_torch(args, seed))
            print("torch seed {}: {:.2f} %, {:.2f} s, {:.2f} s in total".format(seed, *theirs[-1]),
                  flush=True)  # fmt: skip
    report("gyre", ours)
    if theirs:
        report("torch", theirs)
        ratio = statistics.median(t[1] for t in theirs) / statistics.median(t[1] for t in ours)
        print(f"seconds of training, torch / gyre: {ratio:.2f}")
    accuracy, seconds = (statistics.mean(run[i] for run in ours) for i in (0, 1))
    met = accuracy >= 99.0 and seconds <= args.max_seconds
    print("goals met" if met else "a goal was missed: 99.0 % or --max-seconds")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
