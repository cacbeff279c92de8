#!/usr/bin/env python3
"""Faults at every moment of a training: how it ends or continues, and whether it resumes to the same bytes.

    tests/program/faults_test.py BUILD_DIR [--all] [--only TEXT] [--jobs N] [--table FILE]

Without --all: one cell for each fault. --only: the cells with this text in their names, FAULT/MOMENT/RANKS/TRANSPORT.
--jobs: so many cells at a time [3], but for those with a link's fault. --table writes the table of
docs/reliability.md between its marks. Exit codes: 0; 1: a cell failed; 2: wrong use.

Each cell trains anew, waits for the moment, brings the fault, and then checks that the job ends or continues as
expected() says and in its time; that it names the cause; that it leaves no process, and no file in its TMPDIR; that
the training resumes on 2 ranks, and ends with the bytes of one that met no fault; and that no draft of a file is
left then. Where hosts can be made of this machine (hosts.sh), links fail, too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

from training_job import HOSTS, INIT_TIMEOUT, STEPS, TIMEOUT, Job, kill, name_of, same, until, write_set

MOMENTS = ("start", "mid-epoch", "evaluation", "checkpoint", "shutdown")
LATER = MOMENTS[1:]
SIGNALS = {name: getattr(signal, name) for name in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGUSR1")}
FILES = ("data set removed", "data set truncated", "log removed", "checkpoints removed")
CLOCKS = ("clock a day forward", "clock a day back")
LINKS = ("link down", "link 100 times slower", "link flapping")
FAULTS = (*SIGNALS, *FILES, "disk full", "out of memory", *CLOCKS, *LINKS)
# The short form: a cell for each fault, in the order of FAULTS.
SHORT = ("checkpoint/2/Gloo", "mid-epoch/2/MPI", "evaluation/2/MPI", "checkpoint/2/Gloo", "start/2/MPI",
         "mid-epoch/2/Gloo", "evaluation/2/MPI", "mid-epoch/2/Gloo", "mid-epoch/2/MPI", "checkpoint/2/MPI",
         "start/2/Gloo", "evaluation/2/Gloo", "mid-epoch/2/MPI",
         "mid-epoch/2/Gloo", "mid-epoch/2/MPI", "evaluation/2/Gloo")  # fmt: skip
PAUSE_MS = 100  # after each piece of a checkpoint, of which the file has two dozen: a moment lasts seconds
STOP_TIMEOUT = 5  # seconds that a rank waits for the others, where that is waited for
BUSY = 30  # seconds that a busy machine may add to any wait
ANY = tuple(range(-64, 256))

# A clock that a file sets: 86,400 s forward if it has an "f", back otherwise.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) {
    const char *forward = getenv("GYRE_FAULTS_FORWARD"), *back = getenv("GYRE_FAULTS_BACK");
    return forward && !access(forward, F_OK) ? 86400 : back && !access(back, F_OK) ? -86400 : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += jump();
    return result;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


class Cell(NamedTuple):
    fault: str
    moment: str
    ranks: int
    transport: str

    def __str__(self) -> str:
        return "/".join(map(str, self))

    def across_hosts(self) -> bool:
        return self.fault in LINKS


class Expected(NamedTuple):
    codes: tuple[int, ...]  # exit codes of rank 0 or of mpirun, of which one is right; empty: any but 0
    seconds: float  # from the fault to the end of all ranks, besides BUSY
    words: str  # for the table
    says: str = ""  # a pattern of the output


def expected(cell: Cell) -> Expected:
    fault, moment, several = cell.fault, cell.moment, cell.ranks > 1
    last = f"rank {cell.ranks - 1}"
    if fault in ("SIGTERM", "SIGINT") and moment != "start":
        return Expected((0, 130) if moment == "shutdown" else (130,), 10, "later all save and end with exit code 130")
    if fault in ("SIGKILL", "SIGTERM", "SIGINT"):
        # A rank that ends before it has met the others is missed at --init-timeout.
        if moment == "start":
            return Expected((), INIT_TIMEOUT + 5, "ends the job" if fault == "SIGKILL" else "ends the job at the start")
        if moment == "shutdown":
            return Expected(ANY, 5, "ends the job")
        return Expected((), 5, "later its message names the rank", last if several else "")
    if fault == "SIGSTOP" and not several:
        return Expected((0,), 10, "one rank continues after SIGCONT")
    if fault == "SIGSTOP":
        if moment == "shutdown":
            return Expected(ANY, STOP_TIMEOUT + 10, "several end at --timeout")
        return Expected((), INIT_TIMEOUT + STOP_TIMEOUT + 10 if moment == "start" else STOP_TIMEOUT + 10,
                        "several end at --timeout or --init-timeout and name the rank", last)
    if fault == "SIGUSR1":
        return Expected((0,), 60, "saves and continues")
    if fault == "checkpoints removed":
        return Expected((0,), 60, "makes the folder again and continues")
    if fault == "disk full":
        return Expected((0, 3) if moment == "shutdown" else (3,), 30,
                        "ends with exit code 3 and keeps the checkpoint before",
                        "" if moment == "shutdown" else "No space left on device")
    if fault == "out of memory":
        if moment == "start":
            says = "memory|MPI_Init" if cell.transport == "MPI" and several else "memory"
            return Expected((1,), 30, "ends at the start and says so (while MPI starts, in Open MPI's words)", says)
        return Expected(ANY, 60, "later it ends, or continues if it needs no more")
    if fault == "link down":
        if moment == "shutdown":
            return Expected(ANY, INIT_TIMEOUT + TIMEOUT + 10, "ends the job at --timeout")
        return Expected((), INIT_TIMEOUT + TIMEOUT + 10, "ends the job at --timeout and names the host or rank",
                        f"host{cell.ranks}|{last}")
    return Expected((0,), 90, "continues")


def catches(pid: int, number: int) -> bool:
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and int(caught[1], 16) >> (number - 1) & 1 == 1


def reach(job: Job, cell: Cell, pids: list[int]) -> None:
    """Returns within the moment, which lasts long enough, as checkpoints are slow."""
    if cell.moment == "start" and cell.fault == "SIGUSR1":
        until(lambda: catches(pids[-1], signal.SIGUSR1), "the program's beginning")
    elif cell.moment == "start":
        time.sleep(0.05)
    elif cell.moment == "mid-epoch":
        until(lambda: job.logged(rf'"step":{STEPS + STEPS // 2},'), cell.moment)
    elif cell.moment == "evaluation":
        until(lambda: job.logged(rf'"step":{2 * STEPS},'), cell.moment)
    elif cell.moment == "checkpoint":
        until(lambda: job.logged('"event":"epoch"') and (job.save / "last.safetensors.gyre.tmp").exists(), cell.moment)
    else:
        until(lambda: job.logged('"event":"end"'), cell.moment)


def fill(folder: pathlib.Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1 << 12))
        except OSError:
            pass


def flap(host: str) -> None:
    for _ in range(3):
        subprocess.run([HOSTS, "cable", host, "out"], check=True)
        time.sleep(1)
        subprocess.run([HOSTS, "cable", host, "in"], check=True)
        time.sleep(1)


def befall(cell: Cell, job: Job, pids: list[int]) -> None:
    data = pathlib.Path(job.base[job.base.index("--data") + 1])
    if cell.fault in SIGNALS:
        kill(pids[-1], SIGNALS[cell.fault])
        if cell.fault == "SIGSTOP" and cell.ranks == 1:
            time.sleep(1)
            kill(pids[-1], signal.SIGCONT)
    elif cell.fault == "data set removed":
        shutil.rmtree(data)
    elif cell.fault == "data set truncated":
        for path in data.iterdir():
            os.truncate(path, 20)
    elif cell.fault == "log removed":
        job.log.unlink(missing_ok=True)
    elif cell.fault == "checkpoints removed":
        shutil.rmtree(job.save, ignore_errors=True)
    elif cell.fault == "disk full":
        fill(job.save)
    elif cell.fault == "out of memory" and cell.moment != "start":
        try:
            resource.prlimit(pids[-1], resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        except ProcessLookupError:
            pass
    elif cell.fault in CLOCKS:
        (job.folder / ("forward" if "forward" in cell.fault else "back")).touch()
    elif cell.fault == "link down":
        subprocess.run([HOSTS, "cable", f"host{cell.ranks}", "out"], check=True)
    elif cell.fault == "link 100 times slower":
        subprocess.run([HOSTS, "rate", "10mbit"], check=True)
    elif cell.fault == "link flapping":
        flap(f"host{cell.ranks}")


class Checks:
    """What all cells need: a data set, a model, a clock, and a training that meets no fault."""

    def __init__(self, common: pathlib.Path, gyre: str) -> None:
        self.common, self.gyre = common, gyre
        write_set(common / "set")
        (common / "model").write_text("conv 8 k3\nbatchnorm local\nrelu\nmaxpool 2\ndropout 0.3\nlinear 64\nrelu\n"
                                      "linear classes\n")  # fmt: skip
        (common / "clock.c").write_text(CLOCK)
        self.clock = common / "clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self.clock, common / "clock.c"], check=True)
        whole = Job(common, gyre, common / "whole")
        whole.start(2, "MPI", ["--save", str(whole.save)])
        if whole.wait(120) != 0:
            raise AssertionError("a training without a fault fails: " + whole.said())
        self.whole = whole.save

    def run(self, cell: Cell) -> list[str]:
        """What is wrong."""
        wrong: list[str] = []
        with tempfile.TemporaryDirectory(prefix="f-") as name:
            folder = pathlib.Path(name)
            job = Job(self.common, self.gyre, folder / "job", STOP_TIMEOUT if cell.fault == "SIGSTOP" else TIMEOUT)
            mounted = False
            try:
                if cell.fault == "disk full":
                    job.save.mkdir()
                    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(job.save)]
                    mounted = subprocess.run(mount, check=False).returncode == 0
                    if not mounted:
                        return ["skipped: no file system can be mounted here"]
                wrong = self.suffer(cell, job)
                if not wrong and mounted:
                    (job.save / "filler").unlink()
                wrong = wrong or self.resume(job)
            except (TimeoutError, FileNotFoundError) as error:
                wrong.append(f"{error}: {job.said()[-1000:]}")
            finally:
                job.end()
                if mounted:
                    subprocess.run(["umount", "-l", str(job.save)], check=False)
                if cell.across_hosts():
                    subprocess.run([HOSTS, "cable", f"host{cell.ranks}", "in"], check=False)
                    subprocess.run([HOSTS, "rate", "none"], check=False)
        return wrong

    def suffer(self, cell: Cell, job: Job) -> list[str]:
        """A training with the fault."""
        if cell.fault.startswith("data set"):
            shutil.copytree(self.common / "set", job.folder / "set")
            job.base[job.base.index("--data") + 1] = str(job.folder / "set")
        prefix: list[str] = []
        if cell.fault == "out of memory" and cell.moment == "start":
            # Far more than a start takes, and far less than this net.
            prefix = ["bash", "-c", 'ulimit -v 4000000; exec "$@"', "limit"]
            net = job.folder / "large.model"
            net.write_text("linear 200000\nrelu\nlinear 20000\nrelu\nlinear classes\n")
            job.base[job.base.index("--model") + 1] = str(net)
        elif cell.fault in CLOCKS:
            prefix = ["env", f"LD_PRELOAD={self.clock}", f"GYRE_FAULTS_FORWARD={job.folder}/forward",
                      f"GYRE_FAULTS_BACK={job.folder}/back"]  # fmt: skip
        elif cell.fault == "link 100 times slower":
            subprocess.run([HOSTS, "rate", "1gbit"], check=True)
        flags = ["--save", str(job.save), "--save-every", "1", "--metrics", str(job.log)]
        job.start(cell.ranks, cell.transport, flags, cell.across_hosts(), PAUSE_MS, prefix)
        pids = job.pids(cell.ranks)
        if prefix == [] or cell.fault in CLOCKS:
            reach(job, cell, pids)
        befall(cell, job, pids)
        wanted = expected(cell)
        stopped = pids[-1] if cell.fault == "SIGSTOP" and cell.ranks > 1 else 0
        begin = time.monotonic()
        code = job.wait(wanted.seconds + BUSY, but=stopped if cell.transport == "Gloo" else 0)
        took = time.monotonic() - begin
        if stopped:  # a stopped process cannot end by itself
            kill(stopped, signal.SIGCONT)
        wrong = []
        if code is None and cell.transport == "MPI" and "PMIX ERROR" in job.said() and cell.moment == "start":
            # Open MPI 4.1's mpirun sometimes stays if a rank ends while MPI starts.
            job.processes[0].kill()
            shutil.rmtree(job.tmp)
            job.tmp.mkdir()
        elif code is None:
            wrong.append(f"has not ended after {took:.0f} s")
        elif code not in wanted.codes if wanted.codes else code == 0:
            wrong.append(f"exit code {code}, not {wanted.codes or 'another than 0'}")
        if not re.search(wanted.says, job.said()):
            wrong.append(f"does not say '{wanted.says}'")
        left = job.ranks_left if cell.across_hosts() else job.left
        try:
            until(lambda: not left(), "an end of all processes", TIMEOUT + BUSY)
        except TimeoutError:
            wrong.append(f"processes are left: {[f'{pid} {name_of(pid)}' for pid in left()]}")
        job.end()
        if files := list(job.tmp.iterdir()):
            wrong.append(f"left in TMPDIR: {[path.name for path in files]}")
        return [*wrong, job.said()[-2000:]] if wrong else []

    def resume(self, job: Job) -> list[str]:
        wrong = []
        for option, of_all in (("--data", "set"), ("--model", "model")):
            job.base[job.base.index(option) + 1] = str(self.common / of_all)
        job.output.unlink()
        resumes = (job.save / "last.safetensors").exists()
        job.start(2, "MPI", ["--save", str(job.save), *(["--resume", str(job.save)] if resumes else ["--overwrite"])])
        if job.wait(120) != 0:
            wrong.append("does not resume: " + job.said()[-1000:])
        for file in ("last.safetensors", "best.safetensors"):
            if not same(job.save / file, self.whole / file):
                wrong.append(f"{file} has other bytes than that of a training without a fault")
        return wrong + [f"a draft is left: {path.name}" for path in job.save.glob("*.gyre.*")]


def cells() -> list[Cell]:
    moments = {**dict.fromkeys(FAULTS, MOMENTS), **dict.fromkeys((*FILES, "disk full"), LATER)}
    return [
        Cell(fault, moment, ranks, transport)
        for fault in FAULTS
        for moment in moments[fault]
        for ranks in ((2, 4) if fault in LINKS else (1, 2, 4))
        for transport in ("MPI", "Gloo")
    ]


def write_table(path: pathlib.Path, results: dict[Cell, str]) -> None:
    """A row for each fault: what is expected, and how many cells of each moment were so."""
    rows = ["| fault | what gyre does | " + " | ".join(MOMENTS) + " |", "|---" * (2 + len(MOMENTS)) + "|"]
    for fault in FAULTS:
        row = []
        for moment in MOMENTS:
            of = [result for cell, result in results.items() if cell.fault == fault and cell.moment == moment]
            row.append(f"{of.count('ok')} of {len(of)}" if of else "")
        words = dict.fromkeys(expected(cell).words for cell in results if cell.fault == fault)
        rows.append(f"| {fault} | {'; '.join(words)} | {' | '.join(row)} |")
    good = list(results.values()).count("ok")
    rows += ["", f"{good} of {len(results)} cells, {datetime.date.today()}, {os.cpu_count()} processors, "
             + subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
             + "."]  # fmt: skip
    text = path.read_text()
    begin, end = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
    before, after = text.split(begin)[0], text.split(end)[1]
    path.write_text(before + begin + "\n".join(rows) + "\n" + end + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--table", type=pathlib.Path)
    options = parser.parse_args()
    # On host1 of four, in namespaces of their own, which end with whatever is left in them.
    if "GYRE_HOSTS" not in os.environ:
        made = subprocess.run([HOSTS, "4", "true"], capture_output=True, text=True, check=False)
        if made.returncode == 0:
            arguments = [str(path.resolve()) if path else "" for path in (options.build, options.table)]
            again = [arguments[0], "--only", options.only, "--jobs", str(options.jobs)]
            again += ["--all"] if options.all else []
            again += ["--table", arguments[1]] if options.table else []
            os.execv(HOSTS, [HOSTS, "4", sys.executable, __file__, *again])
        print(f"skipped: links' faults: {made.stderr.strip()}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and what they start as well
    os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
    os.environ["GYRE_SECRET"] = os.urandom(32).hex()  # of ranks without MPI on several hosts
    short = {f"{fault}/{rest}" for fault, rest in zip(FAULTS, SHORT, strict=True)}
    chosen = [cell for cell in cells() if options.only in str(cell) and (options.all or str(cell) in short)]
    if "GYRE_HOSTS" not in os.environ:
        chosen = [cell for cell in chosen if not cell.across_hosts()]
    results: dict[Cell, str] = {}
    printing = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="f-") as name:
        checks = Checks(pathlib.Path(name), str(options.build.resolve() / "gyre"))

        def run(cell: Cell) -> None:
            begin = time.monotonic()
            wrong = checks.run(cell)
            results[cell] = "ok" if not wrong else "skipped" if wrong[0].startswith("skipped") else "FAILED"
            with printing:
                print(f"{str(cell):44} {results[cell]} {time.monotonic() - begin:6.1f} s", flush=True)
                for line in wrong:
                    print("    " + line.replace("\n", "\n    "), flush=True)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, (cell for cell in chosen if not cell.across_hosts())))
        for cell in chosen:
            if cell.across_hosts():
                run(cell)
    results = {cell: results[cell] for cell in chosen}
    if options.table:
        write_table(options.table, results)
    failed = list(results.values()).count("FAILED")
    print(f"{len(results)} cells, {failed} failed")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
