#!/usr/bin/env python3
"""Measures how much of its speed a job keeps on a machine that others use, too.

Times in turn, on a quiet machine and with K busy processes: a job of two ranks with a thread each, over
MPI and over Gloo; two unconnected runs of one rank; and one rank with two threads. A job that waits well
keeps as much as the two unconnected runs, which get what the kernel thinks fair and wait for nobody.

    python3 bench/busy.py --gyre build/gyre --min 0.9

The exit status is 1 if a job of two ranks keeps less than --min of what the unconnected runs keep
(medians over the runs). The busy processes are started by this script and end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
JOBS = ("mpi", "gloo")  # two ranks; they are compared with "unconnected" and "threads"
CASES = (*JOBS, "unconnected", "threads")


def commands(case: str, args: argparse.Namespace, folder: pathlib.Path) -> list[list[str]]:
    """The commands to start together; each writes the JSON file that its last two words name."""
    train = [args.gyre, "train", "--data", args.data, "--limit", str(args.images), "--model"]
    train += [args.model, "--epochs", str(args.epochs), "--no-eval", "--device", "cpu", "--seed"]
    train += ["1", "--log-interval", "1000000", "--threads", "2" if case == "threads" else "1"]
    if case == "mpi":
        starts = [[*shlex.split(args.mpirun), "-np", "2", *train]]
    elif case == "gloo":
        meet = ["--init-method", f"file://{folder}/meet", "--world-size", "2"]
        starts = [[*train, *meet, "--rank", str(rank)] for rank in range(2)]
    else:
        starts = [train] * (2 if case == "unconnected" else 1)
    return [[*start, "--metrics", f"{folder}/{i}.jsonl"] for i, start in enumerate(starts)]


def speed(case: str, args: argparse.Namespace) -> float:
    """Images/s of all processes together, in the epochs after the first."""
    with tempfile.TemporaryDirectory(prefix="gyre-busy-") as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **os.environ}
        running = []
        for command in commands(case, args, folder):
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            running.append(process)
        for process in running:
            try:
                if process.wait(args.timeout) != 0:
                    sys.exit(f"busy.py: exit status {process.returncode}: {shlex.join(process.args)}")
            except subprocess.TimeoutExpired as error:
                sys.exit(f"busy.py: {error}")
        total = 0.0
        for file in folder.glob("*.jsonl"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            epochs = [line for line in lines if line["event"] == "epoch"][1:]
            total += statistics.harmonic_mean(epoch["images_per_second"] for epoch in epochs)
        return total


@contextlib.contextmanager
def competitors(count: int):
    """Runs busy processes, which also end if this script is killed: the pipe to them closes."""
    spin = "import sys,threading,os\n" \
           "threading.Thread(target=lambda:(sys.stdin.read(),os._exit(0)),daemon=True).start()\n" \
           "while True: pass\n"
    busy = [subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE)
            for _ in range(count)]  # fmt: skip
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
            process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gyre", default=str(ROOT / "build" / "gyre"))
    parser.add_argument("--than", metavar="GYRE", help="another build, timed in turn with it")
    parser.add_argument("--mpirun", default="mpirun --bind-to none")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--model", default="net")
    parser.add_argument("--images", type=int, default=30000)
    parser.add_argument("--epochs", type=int, default=3, help="epochs; the first is not counted")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--busy", type=int, default=2, help="busy processes; 0: quiet runs only")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    parser.add_argument("--min", type=float, help="least share of what the unconnected runs keep")
    args = parser.parse_args()
    if args.epochs < 2 or args.runs < 1:
        parser.error("at least two epochs and one run are needed")
    if args.min is not None and ("unconnected" not in args.cases or args.busy == 0):
        parser.error("--min needs busy processes and the unconnected runs")

    builds = [args.gyre] + ([args.than] if args.than else [])
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    print(f"{platform.platform()}, {os.cpu_count()} cores, {now}, load {os.getloadavg()[0]:.2f}")
    print(shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]), flush=True)
    times: dict[tuple[str, str, int], list[float]] = {}
    for run in range(args.runs):
        for load in dict.fromkeys((0, args.busy)):
            for case in args.cases:
                for build in builds[:: 1 if run % 2 == 0 else -1]:
                    args.gyre = build
                    with competitors(load):
                        figure = speed(case, args)
                    times.setdefault((build, case, load), []).append(figure)
                    print(f"run {run + 1}: {build} {case} with {load} busy: {figure:.0f}", flush=True)

    kept: dict[tuple[str, str], float] = {}
    for build in builds:
        print(f"\n{build}: images/s, median (least-greatest) of {args.runs} runs")
        print(f"{'case':12} {'quiet':>22} {f'with {args.busy} busy':>22}  kept")
        for case in args.cases:
            row = [times[build, case, load] for load in dict.fromkeys((0, args.busy))]
            text = " ".join(f"{f'{statistics.median(t):.0f} ({min(t):.0f}-{max(t):.0f})':>22}"
                            for t in row)  # fmt: skip
            kept[build, case] = statistics.median(b / a for a, b in zip(row[0], row[-1]))
            print(f"{case:12} {text}  {kept[build, case]:.2f}")
    if args.than:
        print(f"\n{builds[0]} over {builds[1]}, median of the pairs:")
        for case in args.cases:
            for load in dict.fromkeys((0, args.busy)):
                pairs = zip(times[builds[0], case, load], times[builds[1], case, load])
                ratio = statistics.median(a / b for a, b in pairs)
                print(f"{case:12} with {load} busy: {ratio:.3f}")
    if args.min is not None:
        missed = False
        for case in (c for c in JOBS if c in args.cases):
            share = kept[builds[0], case] / kept[builds[0], "unconnected"]
            met = share >= args.min
            missed |= not met
            print(f"{'met' if met else 'MISSED'}: {case} keeps {share:.2f} of what unconnected runs "
                  f"keep, goal >= {args.min}")  # fmt: skip
        sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
