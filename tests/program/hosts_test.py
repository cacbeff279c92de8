#!/usr/bin/env python3
"""gyre across several hosts, made of this machine by hosts.sh, with the commands for real hosts.

    tests/program/hosts_test.py BUILD_DIR [FIRST LAST | losses | rings | failures]    default: all checks

Exit codes: 0; 1: a check failed; 2: wrong use; 77: hosts cannot be made here, with the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

TESTS = pathlib.Path(__file__).resolve().parent
HOSTS = str(TESTS / "hosts.sh")
# The command of docs/hosts.md. Without a network's name mpirun may take one that not all hosts have; by its
# keepalive it notices a lost host after 4 + 3 * 2 s.
MPIRUN = ["mpirun", "--allow-run-as-root", "--map-by", "slot", "--bind-to", "none"]
for network in ("btl_tcp_if_include", "oob_tcp_if_include"):
    MPIRUN += ["--mca", network, "eth0"]
for setting, value in (("time", "4"), ("intvl", "2"), ("probes", "3")):
    MPIRUN += ["--mca", f"oob_tcp_keepalive_{setting}", value]
OUT = pathlib.Path("/run/out")  # of these hosts' own world
RANKS = ("gyre", "bench-allreduce")
PROGRAMS = ("mpirun", "prterun", "orted", "prted", *RANKS)
os.environ["GYRE_SECRET"] = secrets.token_hex(32)  # of ranks without MPI
PARAMETERS = 21840  # of `net`
STEPS = 50
SAME_LOSSES = 8 / 2**23  # relative: the last bits of a smooth net's losses


class Check:
    """One check: what went wrong in it, and what it measured."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.measured = ""

    def fail(self, text: str) -> None:
        self.failures.append(text)

    def status(self, found: int, wanted: int | None) -> None:
        """None: any code but 0, as mpirun has codes of its own."""
        if found != wanted and (wanted is not None or found == 0):
            self.fail(f"exit code {found} instead of {'another' if wanted is None else wanted}")

    def says(self, pattern: str) -> None:
        """The log of this check has a line with the pattern."""
        if not re.search(pattern, (OUT / "log").read_text(errors="replace"), re.MULTILINE):
            self.fail(f'no "{pattern}" in the output')

    def nothing_left(self, seconds: float = 3) -> None:
        """No rank is there more than so many seconds from now, on any host. A daemon of Open MPI that is left is
        noted and ended: with version 4.1 one sometimes stays for minutes on a host without a network, and
        mpirun sometimes crashes at a second Ctrl-C and leaves one."""
        deadline = time.monotonic() + seconds
        while (left := job_processes()) and time.monotonic() <= deadline:
            time.sleep(0.1)
        for pid, name in left.items():
            if name in RANKS:
                self.fail(f"left behind: {pid} {name}")
            else:
                self.measured += f"; Open MPI left {name}"
            kill(pid)

    def same_losses(self, *files: str) -> None:
        one, other = (losses_in(OUT / file) for file in files)
        if not one or len(one) != len(other):
            self.fail("the losses differ: these are not the same steps")
            return
        worst = max(abs(b - a) / a for a, b in zip(one, other, strict=True))
        self.measured = f"largest relative difference of losses {worst:g}"
        if not worst <= SAME_LOSSES:
            self.fail("the losses differ")

    def wait_for_steps(self, file: pathlib.Path, more_than: int) -> None:
        for _ in range(150):
            if len(losses_in(file)) > more_than:
                return
            time.sleep(0.1)
        self.fail("training did not go on")


def job_processes() -> dict[int, str]:
    found = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name = (process / "comm").read_text().strip()
            if name in PROGRAMS:
                found[int(process.name)] = name
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def losses_in(file: pathlib.Path) -> list[float]:
    """Of the steps in a JSON log, which may still be written."""
    losses = []
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last line, half of it
                event = json.loads(line)
                if event["event"] == "step":
                    losses.append(event["loss"])
    return losses


def first_hosts(count: int, ranks: int = 1) -> str:
    """The list for --host."""
    return ",".join(f"host{number}:{ranks}" for number in range(1, count + 1))


def exit_code(process: subprocess.Popen) -> int:
    """As a shell has it."""
    code = process.wait()
    return code if code >= 0 else 128 - code


def start(command: list[str], log: str = "log") -> subprocess.Popen:
    with (OUT / log).open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def run(seconds: int, command: list[str]) -> int:
    return exit_code(start(["timeout", "-k", "2", str(seconds), *command]))


def hosts(*words: str) -> str:
    return subprocess.run([HOSTS, *words], check=True, capture_output=True, text=True).stdout.strip()


class Gyre:
    """The checks."""

    def __init__(self, build: pathlib.Path) -> None:
        self.build = build
        self.gyre = str(build / "gyre")
        self.training = [self.gyre, "train", "--data", "fashion-mnist", "--threads", "1"]
        # Such a net's losses are the same for any order of its sums, but for their last bits.
        self.fifty_steps = [*self.training, "--model", str(TESTS / "smooth.model"),
                            "--limit", str(60 * STEPS), "--global-batch", "60", "--epochs", "1",
                            "--no-eval", "--lr", "0.01", "--log-interval", "1"]  # fmt: skip
        # The hosts share their processors with whatever else runs here: so timed ranks are real-time
        # processes where that is allowed.
        real_time = ["chrt", "--rr", "1"]
        allowed = subprocess.run([*real_time, "true"], capture_output=True).returncode == 0
        self.urgent = real_time if allowed else []

    def to(self, file: str) -> list[str]:
        return [*self.fifty_steps, "--metrics", str(OUT / file)]

    def one_host(self, check: Check) -> None:
        check.status(run(60, self.to("1.jsonl")), 0)
        if len(losses_in(OUT / "1.jsonl")) != STEPS:
            check.fail(f"these are not {STEPS} steps")

    def several_hosts(self, check: Check, count: int, ranks: int) -> None:
        names = [f"host{number}" for number in range(1, count + 1)]
        before = [hosts("bytes", name) for name in names]
        file = f"{count}.jsonl"
        check.status(run(60, [*MPIRUN, "--host", first_hosts(count, ranks), *self.to(file)]), 0)
        for name, then in zip(names, before, strict=True):
            now = hosts("bytes", name)
            # The gradients at least once each way (2 (n-1)/n times on a ring).
            least = STEPS * PARAMETERS * 4
            if any(int(b) - int(a) <= least for a, b in zip(then.split(), now.split(), strict=True)):
                check.fail(f"{name} sent or received less than its gradients: {then} to {now}")
        check.same_losses("1.jsonl", file)

    def start_gloo(self, command: list[str]) -> list[subprocess.Popen]:
        """Rank 1 on host2, then rank 0 on host1."""
        meet = ["--init-method", "tcp://host1:22225", "--world-size", "2", "--rank"]
        bound = ["timeout", "-k", "2", "60"]
        return [start([*bound, HOSTS, "on", "host2", *command, *meet, "1"], "log.1"),
                start([*bound, *command, *meet, "0"])]  # fmt: skip

    def without_mpi(self, check: Check) -> None:
        for rank in self.start_gloo(self.to("gloo.jsonl")):
            check.status(exit_code(rank), 0)
        check.same_losses("1.jsonl", "gloo.jsonl")

    def launch_on_each(self, check: Check) -> None:
        """gyre launch on host1 and host2, two ranks each."""
        ranks = []
        for number, where in ((1, [HOSTS, "on", "host2"]), (0, [])):
            launch = [self.gyre, "launch", "-n", "2", "--nnodes", "2", "--node-rank", str(number),
                      "--master-addr", "host1", "--"]  # fmt: skip
            ranks.append(start(["timeout", "-k", "2", "60", *where, *launch, *self.to("launch.jsonl")[1:]],
                               f"log.{number}"))  # fmt: skip
        for rank in ranks:
            check.status(exit_code(rank), 0)
        check.same_losses("1.jsonl", "launch.jsonl")

    def without_mpi_or_secret(self, check: Check) -> None:
        """Neither rank begins to wait."""
        meet = ["--init-method", "tcp://host1:22225", "--world-size", "2", "--rank"]
        for rank in ("0", "1"):
            check.status(run(10, ["env", "-u", "GYRE_SECRET", *self.training, *meet, rank]), 4)
        check.says("which other hosts reach, without a secret")

    def without_mpi_or_cable(self, check: Check) -> None:
        ranks = self.start_gloo(self.endless(timeout=6))
        check.wait_for_steps(OUT / "run.jsonl", 5)
        begin = time.monotonic()
        hosts("cable", "host2", "out")
        for rank in ranks:
            check.status(exit_code(rank), 4)
        check.measured = f"ended {time.monotonic() - begin:.1f} s after it"
        check.says("not arrived|late|no answer|host2")
        hosts("cable", "host2", "in")

    def launchers_without_cable(self, check: Check) -> None:
        """gyre launch on host1 and host2: host1 trains on alone while host2 cannot be reached."""
        shutil.rmtree(OUT / "launched", ignore_errors=True)
        training = [*self.endless(timeout=6)[1:], "--save", str(OUT / "launched"), "--resume", "auto"]
        launchers = []  # behind a timeout that passes a signal on once
        for number, where in ((1, [HOSTS, "on", "host2"]), (0, [])):
            launch = [self.gyre, "launch", "-n", "1", "--nnodes", "1:2", "--node-rank", str(number), "--master-addr",
                      "host1", "--rejoin-timeout", "1", "--max-restarts", "9", "--"]  # fmt: skip
            bound = ["timeout", "--foreground", "-k", "20", "180"]
            launchers.append(start([*bound, *where, *launch, *training], f"log.{number}"))
        check.wait_for_steps(OUT / "run.jsonl", 5)
        for cable, line, times in (("out", "1 of 2 hosts train", 1), ("in", "2 of 2 hosts train", 2)):
            begin = time.monotonic()
            hosts("cable", "host2", cable)
            while (OUT / "log.0").read_text(errors="replace").count(line) < times:
                if time.monotonic() - begin > 60:
                    check.fail(f'no "{line}" on host1')
                    break
                time.sleep(0.1)
            check.measured += f"cable {cable}: {time.monotonic() - begin:.1f} s; "
        check.wait_for_steps(OUT / "run.jsonl", len(losses_in(OUT / "run.jsonl")) + 5)
        launchers[1].send_signal(signal.SIGTERM)
        begin = time.monotonic()
        for launcher in launchers:
            check.status(exit_code(launcher), 130)
        check.measured += f"end: {time.monotonic() - begin:.1f} s"

    def ring(self, check: Check, ranks: int) -> None:
        """A reduction of 32 MiB over links of 1 Gbit/s takes what a ring takes, 2 (n-1)/n S/B, within
        25 %. It may try five times."""
        size = 32 << 20
        formula = 2 * (ranks - 1) / ranks * size * 8 / 1e9
        for attempt in range(1, 6):
            (OUT / "log").write_text("")
            command = [*self.urgent, *MPIRUN, "--host", first_hosts(ranks),
                       str(self.build / "bench-allreduce"), *"-b 32M -e 32M -n 3 -w 1 --no-peer".split()]  # fmt: skip
            check.status(run(20, command), 0)
            lines = (line.split() for line in (OUT / "log").read_text().splitlines())
            seconds = next((float(w[4]) / 1e6 for w in lines if w and w[0] == str(size)), 0.0)
            ratio = seconds / formula
            check.measured = (f"attempt {attempt}: {seconds:.3f} s, formula {formula:.3f} s, "
                              f"ratio {ratio:.2f}")  # fmt: skip
            if 0.75 <= ratio <= 1.25:
                return
        check.fail("not within 25 %")

    def tree(self, check: Check, ranks: int) -> None:
        """A sum in the tree over the ranks sends as much as a ring, 2 (n-1)/n S, and some for headers."""
        size, sums = 32 << 20, 2
        before = [int(number) for number in hosts("bytes", "host1").split()]
        command = [*MPIRUN, "--host", first_hosts(ranks), str(self.build / "bench-allreduce"),
                   *f"-b 32M -e 32M -n {sums - 1} -w 1 --no-peer --comm mpi --in-tree".split()]  # fmt: skip
        check.status(run(30, command), 0)
        check.says("Out of bounds values : 0 OK")
        formula = 2 * (ranks - 1) / ranks * size * sums
        now = [int(number) for number in hosts("bytes", "host1").split()]
        ratios = [(b - a) / formula for a, b in zip(before, now, strict=True)]
        check.measured = f"received {ratios[0]:.2f} and sent {ratios[1]:.2f} of a ring's bytes"
        if not all(1.0 <= ratio <= 1.2 for ratio in ratios):
            check.fail("not between 1 and 1.2")

    def endless(self, timeout: int) -> list[str]:
        """A training that only a failure or a signal ends. timeout: of its watchdog."""
        (OUT / "run.jsonl").unlink(missing_ok=True)
        return [*self.training, "--epochs", "1000", "--no-eval", "--log-interval", "10",
                "--timeout", str(timeout), "--metrics", str(OUT / "run.jsonl")]  # fmt: skip

    def start_training(self, check: Check, count: int, timeout: int = 60):
        """One over several hosts, which runs when this returns."""
        job = start([*MPIRUN, "--host", first_hosts(count), *self.endless(timeout)])
        check.wait_for_steps(OUT / "run.jsonl", 5)
        return job

    def end_training(self, check: Check, job: subprocess.Popen, seconds: int, wanted: int | None) -> None:
        """Waits at most so long for its end."""
        try:
            job.wait(seconds)
        except subprocess.TimeoutExpired:
            check.fail(f"mpirun has not ended after {seconds} s")
            job.kill()
        check.status(exit_code(job), wanted)

    def kill_gyre_on(self, check: Check, host: str) -> None:
        pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
        mine = [pid for pid in map(int, pids.split()) if job_processes().get(pid) == "gyre"]
        if mine:
            kill(mine[0])
        else:
            check.fail(f"gyre does not run on {host}")

    def kill_rank(self, check: Check) -> None:
        job = self.start_training(check, 3)
        begin = time.monotonic()
        self.kill_gyre_on(check, "host2")
        self.end_training(check, job, 10, 137)
        check.measured = f"ended {time.monotonic() - begin:.1f} s after it"
        check.says("rank 1 .*on node host2 exited on signal 9")

    def pull_cable(self, check: Check) -> None:
        job = self.start_training(check, 3, timeout=12)
        begin = time.monotonic()
        hosts("cable", "host3", "out")
        self.end_training(check, job, 20, None)
        check.measured = f"ended {time.monotonic() - begin:.1f} s after it"
        check.says("Remote daemon: .* on node host3")
        check.nothing_left(15)  # on the lost host too, by itself
        check.measured += f", the lost host by {time.monotonic() - begin:.1f} s"
        hosts("cable", "host3", "in")

    def pull_cable_and_kill_rank(self, check: Check) -> None:
        """The job ends itself before mpirun has noticed the lost host. mpirun then waits for that host for
        minutes: its ranks have ended, and a second Ctrl-C ends mpirun."""
        job = self.start_training(check, 3, timeout=12)
        begin = time.monotonic()
        hosts("cable", "host3", "out")
        self.kill_gyre_on(check, "host1")
        while "gyre" in (left := job_processes()).values() and time.monotonic() - begin <= 20:
            time.sleep(0.1)
        if "gyre" in left.values():
            check.fail("ranks have not ended 20 s after it")
        check.measured = f"ranks ended {time.monotonic() - begin:.1f} s after it"
        for _ in range(2):
            job.send_signal(signal.SIGINT)
            time.sleep(0.5)
        self.end_training(check, job, 5, None)
        check.nothing_left(15)
        hosts("cable", "host3", "in")

    def short_outage(self, check: Check) -> None:
        job = self.start_training(check, 3)
        hosts("cable", "host2", "out")
        time.sleep(5)
        steps = len(losses_in(OUT / "run.jsonl"))
        hosts("cable", "host2", "in")
        check.wait_for_steps(OUT / "run.jsonl", steps + 5)
        job.terminate()
        self.end_training(check, job, 10, None)
        if not re.search(r'"event":"end".*"interrupted":true', (OUT / "run.jsonl").read_text()):
            check.fail("no clean end in the log of steps")

    def kill_mpirun(self, check: Check) -> None:
        job = self.start_training(check, 2)
        job.kill()
        self.end_training(check, job, 1, 137)
        check.nothing_left(8)

    def unknown_host(self, check: Check) -> None:
        check.status(run(20, [*MPIRUN, "--host", "host1:1,host9:1", self.gyre, "info"]), None)
        check.says("host9")

    def kill_hosts(self, check: Check) -> None:
        """These hosts themselves: killed in the worst way, they leave nothing behind."""

        def sleeps() -> bool:
            for process in pathlib.Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if (process / "cmdline").read_bytes() == b"sleep\0001000\0":
                        return True
            return False

        made = start([HOSTS, "2", "sleep", "1000"])
        for _ in range(50):
            if sleeps():
                break
            time.sleep(0.1)
        else:
            check.fail("the hosts were not made")
        made.kill()
        made.wait()
        time.sleep(0.5)
        if sleeps():
            check.fail("processes left")

    def has_gloo(self) -> bool:
        info = subprocess.run([self.gyre, "info"], capture_output=True, text=True).stdout
        return re.search("^Gloo .*compiled in", info, re.MULTILINE) is not None


@contextlib.contextmanager
def links_of(rate: str) -> Iterator[None]:
    """Of all hosts, if any is asked for; two runs at once would disturb each other's timings."""
    if not rate:
        yield
        return
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hosts("rate", rate)
        yield
        hosts("rate", "none")


class Row(NamedTuple):
    part: str
    name: str
    seconds: int  # it may take at most
    function: Callable[[Check], None]
    rate: str = ""  # of the links; empty: the machine's


def table(on: Gyre) -> list[Row]:
    ring = "1gbit"
    rows = [
        Row("losses", "one host: 50 steps", 65, on.one_host),
        Row("losses", "2 hosts: data crosses the wire, the losses are one host's", 65,
            lambda c: on.several_hosts(c, 2, 1)),
        Row("losses", "2 hosts of 2 ranks: the same", 65, lambda c: on.several_hosts(c, 2, 2)),
        Row("losses", "3 hosts: the same", 65, lambda c: on.several_hosts(c, 3, 1)),
        Row("losses", "4 hosts: the same", 65, lambda c: on.several_hosts(c, 4, 1)),
        Row("losses", "2 hosts without MPI, over Gloo: the same", 65, on.without_mpi),
        Row("losses", "2 hosts of 2 ranks without MPI, by gyre launch on each: the same", 65,
            on.launch_on_each),
        Row("failures", "without MPI and a secret: refused", 10, on.without_mpi_or_secret),
        Row("failures", "without MPI, a pulled cable ends both ranks", 40, on.without_mpi_or_cable),
        Row("failures", "gyre launch on each of 2 hosts: trains on without one whose cable is pulled", 180,
            on.launchers_without_cable),
        Row("losses", "4 hosts: a sum in the tree over the ranks sends a ring's bytes", 35,
            lambda c: on.tree(c, 4)),
        Row("rings", "2 hosts, 1 Gbit/s: a reduction takes a ring's time", 60,
            lambda c: on.ring(c, 2), ring),
        Row("rings", "3 hosts, 1 Gbit/s: the same", 60, lambda c: on.ring(c, 3), ring),
        Row("rings", "4 hosts, 1 Gbit/s: the same", 60, lambda c: on.ring(c, 4), ring),
        Row("failures", "a killed rank ends the job, and is named", 30, on.kill_rank),
        Row("failures", "a pulled cable ends the job, and the host is named", 45, on.pull_cable),
        Row("failures", "a pulled cable and a failed rank end all ranks", 45, on.pull_cable_and_kill_rank),
        Row("failures", "a link that is gone for 5 s does not end the job; SIGTERM does", 40,
            on.short_outage),
        Row("failures", "a killed mpirun takes its job along", 30, on.kill_mpirun),
        Row("failures", "a host that cannot be reached is named", 20, on.unknown_host),
        Row("failures", "killed hosts leave nothing behind", 10, on.kill_hosts),
    ]  # fmt: skip
    gloo = on.has_gloo()
    return [row for row in rows if gloo or "without MPI" not in row.name]


def judge(number: int, row: Row) -> bool:
    check = Check()
    (OUT / "log").write_text("")
    with links_of(row.rate):
        begin = time.monotonic()
        row.function(check)
        check.nothing_left()
        seconds = time.monotonic() - begin
    if seconds > row.seconds:
        check.fail(f"took longer than {row.seconds} s")
    facts = f"{seconds:.1f} s" + (f"; {check.measured}" if check.measured else "")
    if not check.failures:
        print(f"ok {number} - {row.name} ({facts})", flush=True)
        return True
    print(f"not ok {number} - {row.name} ({facts}): {'; '.join(check.failures)}")
    for line in (OUT / "log").read_text(errors="replace").splitlines()[-40:]:
        print(f"    # {line}")
    sys.stdout.flush()
    return False


def main(arguments: list[str]) -> int:
    build = pathlib.Path(arguments[0]).resolve() if arguments else None
    if build is None or not all(os.access(build / name, os.X_OK) for name in ("gyre", "bench-allreduce")):
        print("hosts_test: needs a folder with gyre and bench-allreduce", file=sys.stderr)
        return 2
    if not os.environ.get("GYRE_HOSTS"):
        os.execv(HOSTS, [HOSTS, "4", sys.executable, __file__, str(build), *arguments[1:]])
    # On host1 of four hosts from here on.
    OUT.mkdir(parents=True, exist_ok=True)
    part = arguments[1] if arguments[1:] in (["losses"], ["rings"], ["failures"]) else ""
    wanted = [] if part else arguments[1:]
    first, last = int(wanted[0]) if wanted else 1, int(wanted[1]) if len(wanted) > 1 else 99
    results = [judge(number, row) for number, row in enumerate(table(Gyre(build)), 1)
               if first <= number <= last and part in ("", row.part)]  # fmt: skip
    print(f"{sum(results)} of {len(results)} checks passed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
