"""A training of some ranks as a job with a folder of its own, for tests that disturb it."""

from __future__ import annotations

import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable

HOSTS = str(pathlib.Path(__file__).resolve().with_name("hosts.sh"))
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
# docs/hosts.md says why.
MPIRUN_HOSTS = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--map-by", "slot"]
for network in ("btl_tcp_if_include", "oob_tcp_if_include"):
    MPIRUN_HOSTS += ["--mca", network, "eth0"]
for setting, value in (("time", "4"), ("intvl", "2"), ("probes", "3")):
    MPIRUN_HOSTS += ["--mca", f"oob_tcp_keepalive_{setting}", value]
IMAGES, BATCH, EPOCHS = 120, 8, 3
STEPS = IMAGES // BATCH  # of an epoch
TIMEOUT = 12  # seconds of any wait: a slow checkpoint is written twice in it, and mpirun notices a lost host in 10 s
INIT_TIMEOUT = 15  # seconds for the start


def write_set(folder: pathlib.Path) -> None:
    """A data set in the format of MNIST: three classes of noisy images, 12 x 12, of different brightness."""
    folder.mkdir()
    draw = random.Random(7)
    for part, count in (("train", IMAGES), ("t10k", 4000)):
        labels = bytes(i % 3 for i in range(count))
        pixels = b"".join(bytes(80 * label + draw.randrange(60) for _ in range(144)) for label in labels)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 12, 12) + pixels)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels)


def until(condition: Callable[[], bool], what: str, seconds: float = 60, pause: float = 0.005) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"no sign of {what} in {seconds:g} s")
        time.sleep(pause)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def name_of(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class Job:
    """A training in a folder of its own."""

    def __init__(self, common: pathlib.Path, gyre: str, folder: pathlib.Path, timeout: int = TIMEOUT) -> None:
        self.folder, self.gyre = folder, gyre
        self.save = folder / "run"
        self.log = folder / "log.jsonl"
        self.output = folder / "output"
        self.tmp = folder / "t"
        self.tmp.mkdir(parents=True)
        self.mark = ("GYRE_FAULTS_JOB", str(folder))
        self.base = ["train", "--threads", "1", "--shards", "4", "--global-batch", str(BATCH), "--optimizer", "adam"]
        self.base += ["--timeout", str(timeout), "--init-timeout", str(INIT_TIMEOUT), "--log-interval", "1"]
        self.base += ["--epochs", str(EPOCHS), "--data", str(common / "set"), "--model", str(common / "model")]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, ranks: int, transport: str, flags: list[str], hosts: bool = False, pause_ms: int = 0,
              prefix: list[str] | None = None) -> None:  # fmt: skip
        """Each rank leaves the number of its process in pid.RANK. prefix: of each rank's command."""
        for path in self.folder.glob("pid.*"):
            path.unlink()
        shutil.rmtree(self.folder / "meeting", ignore_errors=True)
        own = {self.mark[0]: self.mark[1], "GYRE_TEST_WRITE_PAUSE_MS": str(pause_ms)}
        environment = {**os.environ, **own, "OMPI_MCA_orte_tmpdir_base": str(self.tmp), "TMPDIR": str(self.tmp)}
        number = "$OMPI_COMM_WORLD_RANK" if transport == "MPI" else "$RANK_OF_TEST"
        write = [*(prefix or []), "bash", "-c", f"cd {self.folder}; echo $$ > pid.{number}.draft; "
                 f'mv pid.{number}.draft pid.{number}; exec "$@"', "rank"]  # fmt: skip
        command = [*write, self.gyre, *self.base, *flags]
        if transport == "MPI":
            where = ["--host", ",".join(f"host{n + 1}:1" for n in range(ranks))] if hosts else ["-n", str(ranks)]
            forwarded = [word for name in own for word in ("-x", name)]
            commands = [[*(MPIRUN_HOSTS if hosts else MPIRUN), *where, *forwarded, *command]]
        else:
            url = "tcp://host1:22225" if hosts else f"file://{self.folder}/meeting"
            commands = []
            for rank in range(ranks):
                on = [HOSTS, "on", f"host{rank + 1}"] if hosts else []
                commands.append([*on, "env", f"RANK_OF_TEST={rank}", *command, "--init-method", url, "--world-size",
                                 str(ranks), "--rank", str(rank)])  # fmt: skip
        if hosts:
            del environment["OMPI_MCA_orte_tmpdir_base"], environment["TMPDIR"]  # each host has its own
        with self.output.open("ab") as output:
            self.processes = [
                subprocess.Popen(words, cwd=self.folder, env=environment, stdout=output, stderr=output,
                                 stdin=subprocess.DEVNULL, start_new_session=True)
                for words in commands
            ]  # fmt: skip

    def pids(self, ranks: int) -> list[int]:
        until(lambda: len(list(self.folder.glob("pid.[0-9]"))) == ranks, "the ranks' processes")
        return [int((self.folder / f"pid.{rank}").read_text()) for rank in range(ranks)]

    def wait(self, seconds: float, but: int = 0) -> int | None:
        """The exit code of mpirun or rank 0; nothing: not all have ended. but: the process that is not waited for."""
        end = time.monotonic() + seconds
        for process in self.processes:
            if process.pid == but:
                continue
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
        return self.processes[0].returncode

    def left(self) -> list[int]:
        """Processes of this job."""
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if "=".join(self.mark).encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:
                pass
        return found

    def ranks_left(self) -> list[int]:
        """Those that are gyre's: with Open MPI 4.1 a daemon sometimes stays on a host without a network."""
        return [pid for pid in self.left() if name_of(pid) == "gyre"]

    def end(self) -> None:
        for pid in self.left():
            kill(pid)
        for process in self.processes:
            kill(process.pid)
            process.wait()

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def logged(self, pattern: str) -> bool:
        return self.log.exists() and re.search(pattern, self.log.read_text(errors="replace")) is not None


def same(left: pathlib.Path, right: pathlib.Path) -> bool:
    return left.exists() and left.read_bytes() == right.read_bytes()
