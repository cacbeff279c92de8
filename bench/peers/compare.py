#!/usr/bin/env python3
"""Times gyre against PyTorch (torch_ddp.py) on this machine's CPU, in up to four forms.

All train on the same images, in turn (torch's forms, gyre, torch's forms, gyre, ...), with the same batch
per rank, one thread and one core per rank: DDP over gloo; the same with channels last; the same with
torch.compile; and one process with as many threads, and images in a step, as the others together. The
first epoch is a warm-up and not counted, and neither evaluates on test images. Speeds are images/s over
all ranks; memory is the peak resident memory of the largest rank. A ratio above 1 means that gyre is
faster (speed) or larger (memory).

    tests/program/hosts.sh 2 python3 bench/peers/compare.py --rate 1gbit --check

This puts one rank of each on each of two simulated hosts on this machine, whose link has that rate.

    python3 bench/peers/compare.py --isa avx2 --check

This limits both to AVX2 on a processor that has more, through their environment. --check compares with
the goals below; the exit status is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

import torch_ddp

ROOT = pathlib.Path(__file__).resolve().parents[2]
# model: the case's name unless given; precision: fp32 unless given; images: of the training set, per
# epoch (0: all); speed: the least ratio gyre / torch, by gyre's instruction set.
CASES = {
    "net": {"images": 30000, "epochs": 3, "optimizer": "sgd", "lr": "0.01",
            "speed": {"AVX-512": 8.0, "AVX2": 7.0}},
    "wide": {"images": 1920, "epochs": 2, "optimizer": "adam", "lr": "0.001",
             "speed": {"AVX-512": 2.5, "AVX2": 2.0}},
    "resnet": {"images": 3840, "epochs": 2, "optimizer": "sgd", "lr": "0.01",
               "speed": {"AVX-512": 1.8, "AVX2": 1.8}},
    # Both compute in bfloat16, torch by autocast.
    "resnet-bf16": {"model": "resnet", "precision": "bf16", "images": 3840, "epochs": 2, "optimizer": "sgd",
                    "lr": "0.01", "speed": {}},
}  # fmt: skip
# The environment that limits torch, MKL, oneDNN and gyre to an instruction set.
TORCH_ISA = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
             "ONEDNN_MAX_CPU_ISA": "AVX2", "GYRE_CPU": "avx2"},
}  # fmt: skip
ACROSS_HOSTS = 1.5  # the least speed ratio of either case over a link of 1 Gbit/s
MEMORY_GOAL = 1.0  # the greatest ratio gyre / torch
MIB = 2**20


def show(command: list[str]) -> str:
    return " ".join(shlex.quote(word) for word in command)


def across_hosts(hosts: list[str]) -> list[str]:
    """mpirun with its options for the hosts of tests/program/hosts.sh."""
    command = ["mpirun", "--allow-run-as-root", "--host", ",".join(hosts), "--map-by", "slot"]
    command += ["--bind-to", "none", "--mca", "btl_tcp_if_include", "eth0"]
    return command + ["--mca", "oob_tcp_if_include", "eth0"]


def run(command: list[str], env: dict[str, str], timeout: float, again: int = 0) -> str:
    """The standard output of a command, which must succeed within `timeout` seconds, perhaps only when run again."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"compare.py: {error}")
    if done.returncode != 0 and again > 0:
        print(f"  exit status {done.returncode}, run again: {show(command)}", flush=True)
        return run(command, env, timeout, again - 1)
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-2000:]
        sys.exit(f"compare.py: exit status {done.returncode} from {show(command)}\n{tail}")
    return done.stdout


def events(text: str) -> list[dict]:
    """The JSON lines of a text; other lines are skipped."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def figures(lines: list[dict]) -> dict:
    """Speed in the epochs after the first, last loss, and memory of a run, from its events."""
    epochs = [line for line in lines if line["event"] == "epoch"]
    end = next(line for line in lines if line["event"] == "end")
    speeds = [epoch["images_per_second"] for epoch in epochs[1:]]
    return {
        "images_per_second": statistics.harmonic_mean(speeds),
        "train_loss": epochs[-1]["train_loss"],
        "peak_memory_bytes": end["peak_memory_bytes"],
        "events": lines,
    }


# Forms of the same training in torch.
PEERS = {"ddp": [], "channels-last": ["--channels-last"], "compile": ["--compile"], "one process": []}


def torch_command(args: argparse.Namespace, case: dict, name: str, python: str, peer: str) -> list[str]:
    command = [python, str(pathlib.Path(torch_ddp.__file__)), "--python", python]
    command += ["--data", args.data, "--model", case.get("model", name), "--optimizer", case["optimizer"]]
    command += ["--bf16"] if case.get("precision") == "bf16" else []
    form = args.adam if case["optimizer"] == "adam" else "default"
    command += ["--lr", case["lr"], "--form", form]
    if case["optimizer"] == "sgd":
        command += ["--momentum", "0.5"]
    one = peer == "one process"
    command += ["--batch-size", str(args.batch_size * (args.ranks if one else 1)), "--limit", str(case["images"])]
    command += ["--epochs", str(case["epochs"]), "--skip-first-epoch", "--ranks", str(1 if one else args.ranks)]
    command += ["--threads", str(args.ranks)] if one else []
    return command + PEERS[peer] + (["--bucket-view"] if args.bucket_view else [])


def gyre_command(args: argparse.Namespace, case: dict, name: str, out: str) -> list[str]:
    command = [*shlex.split(args.mpirun), "-np", str(args.ranks), args.gyre, "train"]
    command += ["--data", args.data, "--model", case.get("model", name), "--optimizer", case["optimizer"]]
    command += ["--precision", case["precision"]] if "precision" in case else []
    command += ["--lr", case["lr"]]
    if case["optimizer"] == "sgd":
        command += ["--momentum", "0.5"]
    if case["images"]:
        command += ["--limit", str(case["images"])]
    command += ["--batch-size", str(args.batch_size), "--epochs", str(case["epochs"])]
    command += ["--mean", str(torch_ddp.MEAN), "--std", str(torch_ddp.STD), "--seed", "1"]
    return command + ["--threads", "1", "--device", "cpu", "--no-eval", "--metrics", out]


def compare(args: argparse.Namespace, name: str, python: str, env: dict[str, str]) -> list[dict]:
    """Does all runs of one case against one interpreter's torch: a result for each form of it."""
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="gyre-compare-") as folder:
        out = os.path.join(folder, "gyre.jsonl")
        own = gyre_command(args, case, name, out)
        peers = {peer: torch_command(args, case, name, python, peer) for peer in args.peer}
        print("\n  ".join([f"{name}:", *map(show, peers.values()), show(own)]), flush=True)
        theirs: dict[str, list[dict]] = {peer: [] for peer in peers}
        ours = []
        for i in range(args.runs):
            for peer, command in peers.items():
                theirs[peer].append(figures(events(run(command, env, args.timeout, again=2))))
            pathlib.Path(out).unlink(missing_ok=True)
            run(own, env, args.timeout)
            ours.append(figures(events(pathlib.Path(out).read_text())))
            speeds = [f"{peer} {runs[-1]['images_per_second']:.0f}" for peer, runs in (theirs | {"gyre": ours}).items()]
            print(f"  run {i + 1}: {', '.join(speeds)} images/s", flush=True)
    return [result(args, name, peer, theirs[peer], ours, [show(peers[peer]), show(own)]) for peer in peers]


def result(args: argparse.Namespace, name: str, peer: str, theirs: list[dict], ours: list[dict], commands: list[str]) -> dict:
    """The figures of gyre's runs against those of one form of torch."""
    end = theirs[0]["events"][-1]
    device = next(line for line in ours[0]["events"] if line["event"] == "start")["device"]
    isa = re.search(r"CPU with ([^,]+),", device)[1]
    if args.isa == "avx2" and (isa != "AVX2" or end["isa"] != "AVX2"):
        sys.exit(f"compare.py: not AVX2 on both sides: torch says {end['isa']}, gyre {isa}")
    speeds = [[r["images_per_second"] for r in runs] for runs in (theirs, ours)]
    memory = [statistics.median(r["peak_memory_bytes"] for r in runs) for runs in (theirs, ours)]
    return {
        "case": name,
        "peer": peer,
        "torch": end["torch"],
        "blas": end["blas"],
        "isa": f"{end['isa']}, {isa}",
        "gyre_isa": isa,
        "form": f"{end['optimizer']} {end['form']}",
        "speed_ratio": statistics.median(b / a for a, b in zip(*speeds)),
        "memory_ratio": memory[1] / memory[0],
        "memory_bytes": memory,
        "speeds": speeds,
        "losses": [runs[-1]["train_loss"] for runs in (theirs, ours)],
        "commands": commands,
        "torch_runs": theirs,
        "gyre_runs": ours,
    }


def table(results: list[dict]) -> str:
    rows = [["case", "peer", "torch", "BLAS", "torch, gyre ISA", "optimiser", "torch images/s", "gyre images/s", "ratio",
             "torch MiB", "gyre MiB", "ratio", "last losses"]]  # fmt: skip
    for r in results:
        spread = [f"{statistics.median(s):.0f} ({min(s):.0f}-{max(s):.0f})" for s in r["speeds"]]
        memory = [f"{m / MIB:.0f}" for m in r["memory_bytes"]]
        rows.append([r["case"], r["peer"], r["torch"], r["blas"], r["isa"], r["form"], *spread,
                     f"{r['speed_ratio']:.2f}", *memory, f"{r['memory_ratio']:.2f}",
                     " ".join(f"{loss:.3f}" for loss in r["losses"])])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def cpu_model() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """The repository's commit, with a + if there are uncommitted changes."""
    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    name = git("rev-parse", "--verify", "--quiet", "--short=12", "HEAD")
    return name + ("+" if git("status", "--porcelain") else "") if name else "none"


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check(results: list[dict]) -> bool:
    """Prints whether each goal is met; returns whether all are."""
    good = True
    for r in results:
        if r["peer"] != "ddp":
            continue
        goals = CASES[r["case"]]["speed"]
        goal = ACROSS_HOSTS if torch_ddp.made_hosts() else goals.get(r["gyre_isa"], 1.0)
        for what, met, line in [
            ("speed", r["speed_ratio"] >= goal, f"{r['speed_ratio']:.2f}, goal >= {goal}"),
            ("memory", r["memory_ratio"] <= MEMORY_GOAL,
             f"{r['memory_ratio']:.2f}, goal <= {MEMORY_GOAL}"),
        ]:  # fmt: skip
            verdict = "met" if met else "MISSED"
            print(f"{verdict}: {r['case']} {what} ratio against torch {r['torch']}: {line}")
            good = good and met
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="Times gyre against PyTorch DDP on the CPU.")
    add = parser.add_argument
    add("--isa", choices=TORCH_ISA, default="native", help="instruction set of both sides")
    add("--gyre", help="the gyre binary (default: build/gyre)")
    add("--python", action="append",
        help="interpreter with torch; give it more than once to compare with several")  # fmt: skip
    add("--mpirun", help="the launcher, with its options (default: mpirun; across hosts with "
        "their names and their network)")  # fmt: skip
    add("--rate", help="rate of every link, such as 1gbit; only under tests/program/hosts.sh")
    add("--data", default="fashion-mnist", help="data set name, or directory of the .gz files")
    add("--case", action="append", choices=CASES, help="net, wide, resnet, resnet-bf16 (default: the first three)")
    add("--peer", action="append", choices=PEERS, help="torch's form (default: all, across hosts ddp; goals are for ddp)")
    add("--runs", type=int, default=5, help="runs of each side")
    add("--ranks", type=int, help="number of ranks (default: 2; across hosts one on each)")
    add("--batch-size", type=int, default=64, help="images per rank and step")
    add("--limit", type=int, help="images per epoch, instead of each case's own")
    add("--epochs", type=int, help="epochs including the warm-up, instead of each case's own")
    add("--adam", choices=["auto", "default", "foreach", "fused"], default="auto",
        help="torch's form of Adam; auto: fused if torch has it on the CPU")  # fmt: skip
    add("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view=True")
    add("--timeout", type=float, default=900, help="seconds that one run may take")
    add("--check", action="store_true", help="exit with status 1 if a goal is missed")
    add("--json", help="write all figures to this file")
    args = parser.parse_args()

    hosts = torch_ddp.made_hosts()
    if args.rate and not hosts:
        parser.error("--rate needs hosts: start this with tests/program/hosts.sh 2")
    args.ranks = args.ranks or len(hosts) or 2
    args.peer = args.peer or (["ddp"] if hosts else list(PEERS))
    args.mpirun = args.mpirun or show(across_hosts(hosts) if hosts else ["mpirun"])
    args.gyre = args.gyre or str(ROOT / "build/gyre")
    for case in CASES.values():
        case["images"] = case["images"] if args.limit is None else args.limit
        case["epochs"] = args.epochs or case["epochs"]
        if case["epochs"] < 2 or args.runs < 1:
            parser.error("at least 2 epochs (the first is the warm-up) and 1 run are needed")
    if not os.access(args.gyre, os.X_OK):
        sys.exit(f"compare.py: no gyre binary at {args.gyre}: build it, or name one with --gyre")
    pythons = []
    for wanted in args.python or [None]:
        python = torch_ddp.find_python(wanted)
        if not python:
            sys.exit(f"compare.py: {torch_ddp.no_torch(wanted)}")
        pythons.append(python)

    env = dict(os.environ) | TORCH_ISA[args.isa]
    if os.geteuid() == 0:  # Open MPI needs both to run as root
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    host = {"cpu": cpu_model(), "cores": cores(), "system": platform.platform()}
    host |= {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}
    host |= {"commit": commit(), "load_at_start": os.getloadavg()[0]}
    print(f"{host['cpu']}, {host['cores']} cores, {host['system']}")
    print(f"{host['date']}, commit {host['commit']}, load {host['load_at_start']:.2f}")
    if hosts:
        print(f"{len(hosts)} hosts simulated on this machine, links: {args.rate or 'unchanged'}")
    if args.rate:
        subprocess.run([torch_ddp.HOSTS, "rate", args.rate], check=True)
    if host["cores"] < args.ranks:
        print(f"note: {args.ranks} ranks share {host['cores']} cores")
    if host["load_at_start"] > 0.5:
        print("note: other work is running here; the figures will be unsteady")

    cases = args.case or [name for name, case in CASES.items() if "precision" not in case]
    results = [r for c in cases for p in pythons for r in compare(args, c, p, env)]
    print(f"\nmedian (least-greatest) of {args.runs} runs; ratios gyre / torch, "
          f"speed ratio: median over the pairs of runs\n{table(results)}")  # fmt: skip
    if any(r["blas"].startswith("libblas.so.3") for r in results):
        print("note: a torch here ran on the reference BLAS, which is slow and not a fair peer for "
              "wide: install libopenblas0-pthread")  # fmt: skip
    if args.json:
        text = json.dumps({"host": host, "results": results}, indent=1)
        pathlib.Path(args.json).write_text(text + "\n")
    return 0 if not args.check or check(results) else 1


if __name__ == "__main__":
    sys.exit(main())
