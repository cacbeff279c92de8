#!/usr/bin/env python3
"""Compares `gyre plan` with `gyre train` across hosts whose links have a known rate.

    tests/program/hosts.sh 2 python3 bench/peers/plan_check.py --check

Each run measures the compute times with `gyre plan`, with one rank on every host at once, and then
trains many short epochs. The least prediction of all runs is compared with the fastest epoch of all
runs, which excludes the effect of other work on the machine. The link's bandwidth is the rate
that the script sets, less the headers of TCP; its latency is measured with bench-allreduce. The exit
status is 1 if, with --check, prediction / measurement is off by more than --tolerance, and 77 if
there are no hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from compare import CASES, ROOT, across_hosts, run, show

# The payload of an Ethernet frame of 1514 bytes, which tbf counts, excludes the headers of Ethernet
# (14), IP (20) and TCP with time stamps (32).
PAYLOAD = (1514 - 14 - 20 - 32) / 1514
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Rate of the links, steps per epoch, epochs. tbf saves up to 96 KB of unused rate
# (tests/program/hosts.sh). `net` reduces 87 KB per step: at 1gbit the saved rate would cover all of it, and at
# 100mbit it accumulates while nothing is sent, so a step may take less than predicted.
LENGTHS = {"net": ("100mbit", 40, 8), "wide": ("1gbit", 2, 7)}


def bits_per_second(rate: str) -> float:
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    sys.exit(f"plan_check.py: '{rate}' is not a rate such as 1gbit or 100mbit")


def latency_seconds(args: argparse.Namespace, launch: list[str], env: dict[str, str]) -> float:
    """The latency of one message: a ring of n ranks sends 2 (n-1) messages one after another."""
    command = [*launch, f"{args.build}/bench-allreduce", "-b", "8", "-e", "8", "-n", "50"]
    times = []
    for _ in range(args.runs):
        text = run([*command, "-w", "50", "--no-peer"], env, args.timeout)
        row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["8"])
        times.append(float(row[4]) * 1e-6)
    return min(times) / (2 * (args.hosts - 1))


def compare(args: argparse.Namespace, name: str, launch: list[str], env: dict[str, str],
            bandwidth: float, latency: float) -> float:
    """The ratio of the least prediction to the least measurement."""
    case = CASES[name]
    _, steps, epochs = LENGTHS[name]
    common = ["--model", name, "--batch-size", str(args.batch_size), "--threads", "1"]
    common += ["--device", "cpu", "--optimizer", case["optimizer"]]
    if args.bucket_kib:
        common += ["--bucket-kib", str(args.bucket_kib)]
    with tempfile.TemporaryDirectory(prefix="gyre-plan-") as folder:
        planned, trained = (os.path.join(folder, file) for file in ("plan.json", "train.jsonl"))
        plan = [*launch, f"{args.build}/gyre", "plan", *common, "--ranks", str(args.hosts)]
        plan += ["--bandwidth", f"{bandwidth}B", "--latency", f"{latency}s"]
        plan += ["--algorithm", "ring", "--json", planned]
        train = [*launch, f"{args.build}/gyre", "train", *common, "--data", args.data]
        train += ["--factors", "off"]  # as the plan does not model factors
        train += ["--lr", case["lr"], "--limit", str(steps * args.batch_size * args.hosts)]
        train += ["--epochs", str(epochs), "--no-eval", "--metrics", trained]
        print(f"{name}:\n  {show(plan)}\n  {show(train)}", flush=True)
        print(f"  {'run':>3} {'compute ms':>10} {'exposed ms':>10} {'step ms':>10} | measured: "
              f"{'exposed ms':>10} {'step ms':>10}", flush=True)  # fmt: skip
        predicted, measured = [], []
        for i in range(args.runs):
            pathlib.Path(trained).unlink(missing_ok=True)
            run(plan, env, args.timeout)
            run(train, env, args.timeout)
            prediction = json.loads(pathlib.Path(planned).read_text())
            step = prediction["plans"][0]
            compute = sum(prediction["compute"][part] for part in ("forward", "backward", "update"))
            events = [json.loads(line) for line in pathlib.Path(trained).read_text().splitlines()]
            epoch = min((event for event in events if event["event"] == "epoch"),
                        key=lambda event: event["train_seconds"])  # fmt: skip
            predicted.append(step["step_seconds"])
            measured.append(epoch["train_seconds"] / steps)
            print(f"  {i + 1:>3} {1e3 * compute:>10.2f} {1e3 * step['exposed_seconds']:>10.2f} "
                  f"{1e3 * predicted[-1]:>10.2f} |           "
                  f"{1e3 * epoch['exposed_comm_seconds'] / steps:>10.2f} "
                  f"{1e3 * measured[-1]:>10.2f}", flush=True)  # fmt: skip
    return min(predicted) / min(measured)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--build", default=str(ROOT / "build"), help="folder of gyre and bench-allreduce")
    add("--launch", help="the launcher, with its options (default: mpirun across the hosts)")
    add("--data", default="fashion-mnist", help="data set name, or directory")
    add("--case", action="append", choices=LENGTHS, help="net, wide (default: both)")
    add("--rate", help="rate of every link, instead of each case's own")
    add("--runs", type=int, default=3, help="runs of each side")
    add("--batch-size", type=int, default=64, help="images per rank and step")
    add("--bucket-kib", type=int, help="size of a bucket (default: auto)")
    add("--timeout", type=float, default=300, help="seconds that one run may take")
    add("--tolerance", type=float, default=0.25, help="allowed deviation of the ratio from 1")
    add("--check", action="store_true", help="exit with status 1 if a ratio is off by more")
    args = parser.parse_args()
    hosts = os.environ.get("GYRE_HOSTS", "").split()
    if len(hosts) < 2:
        print("plan_check.py: skipped: start it with tests/program/hosts.sh 2", file=sys.stderr)
        return 77
    args.hosts = len(hosts)
    launch = args.launch.split() if args.launch else across_hosts(hosts)
    env = dict(os.environ)
    good = True
    for name in args.case or LENGTHS:
        rate = args.rate or LENGTHS[name][0]
        subprocess.run([str(ROOT / "tests/program/hosts.sh"), "rate", rate], check=True)
        bandwidth = bits_per_second(rate) * PAYLOAD / 8
        latency = latency_seconds(args, launch, env)
        print(f"{len(hosts)} hosts, {rate}: {bandwidth / 1e6:.1f} MB/s of payload, "
              f"{latency * 1e6:.0f} us; load {os.getloadavg()[0]:.2f}")  # fmt: skip
        ratio = compare(args, name, launch, env, bandwidth, latency)
        met = abs(ratio - 1.0) <= args.tolerance
        print(f"{'met' if met else 'MISSED'}: {name}: prediction / measurement {ratio:.2f}, "
              f"goal within {100 * args.tolerance:.0f} %")  # fmt: skip
        good = good and met
    return 0 if good or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
