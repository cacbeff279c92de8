#!/usr/bin/env python3
"""Kills ranks of a training again and again, and measures how soon it trains a step that it had not trained before.

    bench/kills.py GYRE [--ranks 2] [--every 4] [--save-every 1s] [--seed 1] [-- FLAGS OF gyre train]

`gyre launch --max-restarts` starts the ranks again, and they resume from a checkpoint in memory (/dev/shm). At random times, every
so many seconds on average, a random rank gets a SIGKILL; in three of ten cases another one follows within 0.3 s, so that both are
killed at once, or one while the ranks end or start again. The time is that from the (last) kill to the first line of the log of metrics
with a later step than before. Then the same training runs undisturbed, and the weights, the losses of all steps and the hashes of
the receipts are compared.

Exit codes: 0; 1: the results differ, or a run failed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time


def last_step(log: pathlib.Path) -> tuple[int, int]:
    """Epoch and step of the last step in a log that is being written."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().splitlines()
    except OSError:
        return (0, 0)
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:  # one half of a line
            continue
        if isinstance(event, dict) and event.get("event") == "step":
            return (event["epoch"], event["step"])
    return (0, 0)


def losses_in(log: pathlib.Path) -> list[tuple]:
    """The loss of each step, in the order of the lines."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [(event["epoch"], event["step"], event["loss"]) for event in events if event["event"] == "step"]


def hashes_in(receipt: pathlib.Path) -> dict[int, str]:
    """By step. Which steps have one follows from the clock, but for the ends of epochs."""
    events = [json.loads(line) for line in receipt.read_text().splitlines()]
    return {event["step"]: event["hash"] for event in events if event["event"] == "state"}


def children_of(process: int) -> list[int]:
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gyre")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=float, default=4.0, help="seconds from a new step to the next kill, on average")
    parser.add_argument("--save-every", default="1s")
    parser.add_argument("--seed", type=int, default=1)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    flags = sys.argv[len(own) + 2 :] or ["--model", "resnet", "--data", "fashion-mnist", "--limit", "20000", "--epochs", "2"]
    options = parser.parse_args(own)
    chosen = random.Random(options.seed)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = pathlib.Path(name)
        training = ["train", *flags, "--threads", "1", "--log-interval", "1", "-q", "--save-every", options.save_every]

        def launch(run: str, *more: str) -> subprocess.Popen:
            return subprocess.Popen(
                [options.gyre, "launch", "-n", str(options.ranks), "--max-restarts", "1000000", "--", *training,
                 "--save", str(folder / run), "--metrics", str(folder / f"{run}.jsonl"), *more],
                stderr=subprocess.DEVNULL)  # fmt: skip

        def wait_for(step: tuple[int, int], job: subprocess.Popen) -> bool:
            """Waits until a later step is recorded; False: the job has ended."""
            while last_step(folder / "killed.jsonl") <= step:
                if job.poll() is not None:
                    return False
                time.sleep(0.01)
            return True

        begin = time.monotonic()
        job = launch("killed", "--resume", "auto")
        seconds = []
        going = wait_for((0, 0), job)
        while going:
            end = time.monotonic() + chosen.uniform(0, 2 * options.every)
            while time.monotonic() < end and job.poll() is None:
                time.sleep(0.01)
            ranks = children_of(job.pid)
            if job.poll() is not None or len(ranks) != options.ranks:
                break
            subprocess.run(["kill", "-KILL", str(chosen.choice(ranks))], check=False)
            twice = chosen.random() < 0.3
            if twice:
                time.sleep(chosen.uniform(0, 0.3))
                if ranks := children_of(job.pid):
                    subprocess.run(["kill", "-KILL", str(chosen.choice(ranks))], check=False)
            killed = time.monotonic()
            time.sleep(0.05)  # until the others have noticed
            reached = last_step(folder / "killed.jsonl")
            going = wait_for(reached, job)
            if going:
                seconds.append(time.monotonic() - killed)
                print(f"kill {len(seconds)}{' of two' if twice else ''} at epoch {reached[0]}, step {reached[1]}: "
                      f"{seconds[-1]:.2f} s", flush=True)  # fmt: skip
        codes = [job.wait()]
        disturbed = time.monotonic() - begin
        begin = time.monotonic()
        codes.append(launch("whole").wait())
        whole = time.monotonic() - begin
        weights = [str(folder / run / "last.safetensors") for run in ("killed", "whole")]
        same = codes == [0, 0] and subprocess.run([options.gyre, "diff", *weights]).returncode == 0
        if same:
            losses, hashes = ([read(folder / run) for run in ("killed", "whole")] for read in (
                lambda run: losses_in(run.with_suffix(".jsonl")), lambda run: hashes_in(run / "receipt.jsonl")))  # fmt: skip
            common = set(hashes[0]) & set(hashes[1])
            same = losses[0] == losses[1] and bool(common) and all(hashes[0][step] == hashes[1][step] for step in common)
            print(f"the losses of {len(losses[1])} steps, and {len(common)} hashes of the receipts")
    if seconds:
        print(f"{len(seconds)} kills: from a kill to the next new step {statistics.median(seconds):.2f} s (median), "
              f"{min(seconds):.2f} to {max(seconds):.2f} s")  # fmt: skip
    print(f"disturbed {disturbed:.1f} s, undisturbed {whole:.1f} s; exit codes {codes}; "
          f"{'the same results' if same else 'NOT THE SAME RESULTS'}")  # fmt: skip
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
