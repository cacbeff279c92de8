#!/usr/bin/env python3
"""A long training on 2 ranks with a checkpoint after each epoch, of which a rank is killed every so many epochs.

    tests/program/long_run_test.py BUILD_DIR [--epochs N] [--kill-every N] [--pairs N] [--table FILE]   default: 80, 40, 0

Checks that in each part, which is what one process does between two kills, memory and open files do not grow; that the
folder has the same files after each; and that it ends with the bytes of a training without a kill. With --pairs it runs
the last part again, from the checkpoint and with the log that were there, each time beside the first part of a fresh
training, and checks that the median of the ratios of their times for an epoch is at most 1.03. Exit codes: 0; 1: a check failed; 2: wrong use.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable

from training_job import Job, kill, same, until, write_set

MOST_GROWTH = 2 << 20  # bytes; a leak of one checkpoint per epoch, of 150 KiB, is 4 MiB in the shortest part


def memory_bytes(pid: int) -> int:
    """In memory and not of a file: what the process has asked for."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(text.split("RssAnon:")[1].split()[0])


def descriptors(pid: int, but: pathlib.Path) -> int:
    """Without those of files in a folder, where a checkpoint is being written at times."""
    count = 0
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += not os.readlink(link).startswith(str(but))
        except OSError:  # closed meanwhile
            pass
    return count


def epochs(log: pathlib.Path) -> list[dict]:
    """The events of finished epochs; the last line may be half written."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if '"event":"epoch"' in line]


def tail_of(log: pathlib.Path) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20000))
        return file.read().decode(errors="replace")


class Usage:
    """What the ranks use at a moment: the least of three looks, as a checkpoint is being written at some."""

    def __init__(self, job: Job, pids: list[int], epoch: int) -> None:
        self.memory = [1 << 60] * len(pids)
        self.files = [1 << 30] * len(pids)
        for look in range(3):
            # A look at the log, which grows, costs the ranks' processors something: seldom.
            until(lambda at=epoch + look: f'"event":"epoch","epoch":{at},' in tail_of(job.log), f"epoch {epoch + look}", 600, 0.02)
            self.memory = [min(least, memory_bytes(pid)) for least, pid in zip(self.memory, pids, strict=True)]
            self.files = [min(least, descriptors(pid, job.save)) for least, pid in zip(self.files, pids, strict=True)]


def seconds_of_epoch(job: Job, resume: bool) -> float:
    """The median over those that this training makes."""
    done = len(epochs(job.log))
    job.start(2, "MPI", ["--save", str(job.save), "--metrics", str(job.log), *(["--resume", str(job.save)] if resume else [])])
    code = job.wait(600)
    job.end()
    if code != 0:
        sys.exit(f"a training of a pair failed: {job.said()[-1000:]}")
    return statistics.median(event["seconds"] for event in epochs(job.log)[done:])


def ratio_of_pair(common: pathlib.Path, make_job: Callable[..., Job], part: int, number: int) -> float:
    """The last part to the first; every second pair begins with the other one."""
    last, first = make_job(f"last{number}"), make_job(f"first{number}", part)
    last.save.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(common / "save", last.save)
    shutil.copy(common / "log", last.log)
    order = [(last, True), (first, False)]
    took = {resume: seconds_of_epoch(job, resume) for job, resume in (order if number % 2 else order[::-1])}
    return took[True] / took[False]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--kill-every", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--table", type=pathlib.Path)
    options = parser.parse_args()
    part = options.kill_every
    if options.pairs and options.epochs <= part:
        parser.error("--pairs needs a kill before the last part")
    gyre = str(options.build.resolve() / "gyre")
    wrong: list[str] = []
    most_memory, most_files, folders = 0, 0, set()
    with tempfile.TemporaryDirectory(prefix="f-") as name:
        common = pathlib.Path(name)
        write_set(common / "set")
        (common / "model").write_text("conv 8 k3\nrelu\nmaxpool 2\nlinear 64\nrelu\nlinear classes\n")

        def job(folder: str, epochs: int = options.epochs) -> Job:
            made = Job(common, gyre, common / folder, timeout=60)
            made.base[made.base.index("--epochs") + 1] = str(epochs)
            made.base[made.base.index("--log-interval") + 1] = "1000"
            return made

        killed, whole = job("killed"), job("whole")
        try:
            for end in range(part, options.epochs + part, part):
                begin = end - part
                flags = ["--save", str(killed.save), "--metrics", str(killed.log)]
                flags += ["--resume", str(killed.save)] if begin else []
                if begin and end == options.epochs:
                    shutil.copytree(killed.save, common / "save")
                    shutil.copy(killed.log, common / "log")
                killed.start(2, "MPI", flags)
                pids = killed.pids(2)
                early = Usage(killed, pids, begin + part // 4)
                late = Usage(killed, pids, end - 4)
                growth = max(b - a for a, b in zip(early.memory, late.memory, strict=True))
                more = max(b - a for a, b in zip(early.files, late.files, strict=True))
                most_memory, most_files = max(most_memory, growth), max(most_files, more)
                if growth > MOST_GROWTH:
                    wrong.append(f"epochs {begin} to {end}: memory grew by {growth} bytes")
                if more > 0:
                    wrong.append(f"epochs {begin} to {end}: {more} more open files")
                if end < options.epochs:
                    kill(pids[1])
                    if killed.wait(60) in (0, None):
                        wrong.append(f"a kill after epoch {end} did not end the job")
                elif killed.wait(60) != 0:
                    wrong.append("the last part did not end well: " + killed.said()[-1000:])
                folders.add(tuple(sorted(path.name for path in killed.save.iterdir() if ".gyre." not in path.name)))
            # The last epochs of a training without a kill, in the same minute.
            whole.start(2, "MPI", ["--save", str(whole.save), "--metrics", str(whole.log)])
            if whole.wait(1800) != 0:
                wrong.append("a training without a kill failed: " + whole.said()[-1000:])
        except (TimeoutError, FileNotFoundError, ProcessLookupError) as error:
            print(killed.said()[-2000:])
            wrong.append(str(error))
        finally:
            killed.end()
            whole.end()
        ratios = [] if wrong else [ratio_of_pair(common, job, part, i) for i in range(options.pairs)]
        if ratios and statistics.median(ratios) > 1.03:
            wrong.append(f"the last epochs are slower than the first: {sorted(ratios)}")
        if not wrong:
            if [event["epoch"] for event in epochs(killed.log)] != list(range(1, options.epochs + 1)):
                wrong.append("the log does not have each epoch once")
            if len(folders) != 1:
                wrong.append(f"the folder had different files: {sorted(folders)}")
            wrong += [f"{file} has other bytes than that of a training without a kill"
                      for file in ("last.safetensors", "best.safetensors")
                      if not same(killed.save / file, whole.save / file)]  # fmt: skip
            wrong += [f"a draft is left: {path.name}" for path in killed.save.glob("*.gyre.*")]
    for text in wrong:
        print(text)
    facts = (f"{options.epochs} epochs, killed every {part}: memory grew by {most_memory // 1024} KiB at most in a part, "
             f"open files by {most_files}")  # fmt: skip
    if ratios:
        facts += (f"; in {len(ratios)} pairs, in turn, an epoch of the last {part} took {statistics.median(ratios):.3f} times one of "
                  f"the first {part} of a fresh training (median; {min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
    print(facts)
    if options.table and not wrong:
        begin, end = "<!-- long run: begin -->\n", "<!-- long run: end -->\n"
        text = options.table.read_text()
        text = text.split(begin)[0] + begin + f"{datetime.date.today()}: {facts}.\n" + end + text.split(end)[1]
        options.table.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
