"""Runs steps one after another, each within its own time limit, and keeps their output.

A step is data: a name, seconds, commands, and a function that judges their output. Every command is a
separate process group, all of which ends with the command or the step's time. Whatever happens (a command
hangs or dies, SIGTERM, SIGINT or SIGHUP arrives), the summary is the last output on stdout and one
archive has everything. The archive is rewritten after each step: SIGKILL loses only the current step.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import shlex
import signal
import subprocess
import tarfile
import time
from typing import Callable

PASS, FAIL, SKIPPED = "PASS", "FAIL", "SKIPPED"
KILL_AFTER = 2.0  # seconds from SIGTERM to SIGKILL
MOST_BYTES = 2 << 20  # of a file in the archive; longer files lose their middle


@dataclasses.dataclass
class Command:
    words: list[str]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    least: float = 0.0  # seconds that must be left; it is not started with fewer


@dataclasses.dataclass
class Ran:
    """The commands of a step, each with its exit code: 124 if it ran out of time, None if no time was left to start it."""

    name: str
    log: pathlib.Path
    commands: list[tuple[list[str], int | None]]

    @property
    def codes(self) -> list[int | None]:
        return [code for _, code in self.commands]

    @property
    def timed_out(self) -> bool:
        return any(code in (124, None) for code in self.codes)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def good(self) -> bool:
        return all(code == 0 for code in self.codes)


Verdict = tuple[str, str]  # PASS, FAIL or SKIPPED, and a line of text


def all_good(ran: Ran) -> Verdict:
    return PASS, ""


@dataclasses.dataclass
class Step:
    name: str
    seconds: float
    commands: list[Command] | Callable[["Runner"], list[Command]]
    # Called if all commands ended with 0, or always with judge_failures.
    judge: Callable[[Ran], Verdict] = all_good
    skip: str = ""  # why it cannot run here
    judge_failures: bool = False
    optional: bool = False  # running out of time is not a failure


class Stopped(BaseException):
    def __init__(self, number: int):
        self.number = number


class Runner:
    """folder: for logs and files of the steps, all of which go to the archive. scale: factor for the steps'
    limits; budget: seconds for all steps together. probe: runs after the first failed step, to see whether
    the device still works; beside: runs during all steps, started first."""

    def __init__(self, folder: pathlib.Path, archive: pathlib.Path, title: str, scale: float = 1.0,
                 budget: float = 1e9, probe: Command | None = None, beside: Command | None = None):
        self.folder, self.archive, self.title = folder, archive, title
        self.scale, self.budget = scale, budget
        self.probe, self.beside = probe, beside
        self.begin = time.monotonic()
        self.results: list[tuple[str, str, float, str]] = []  # verdict, name, seconds, text
        self.broken = ""  # the step after which the probe failed
        self.starting, self.stopped = False, 0  # whether a process, which must not be lost, is starting; signal

    def failed(self) -> list[str]:
        return [name for verdict, name, _, _ in self.results if verdict == FAIL]

    def run(self, steps: list[Step]) -> int:
        """Returns 0; 1: a step failed; 128 + the number of the signal that ended it."""
        def stop(number: int, _frame: object) -> None:
            for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(each, signal.SIG_IGN)
            self.stopped = number
            if not self.starting:
                raise Stopped(number)

        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, stop)
        helper, ended_by = None, 0
        try:
            if self.beside:
                helper = self.start(self.beside, subprocess.DEVNULL)
                if self.stopped:
                    raise Stopped(self.stopped)
            for step in steps:
                self.run_step(step)
                self.pack()
        except Stopped as stopped:
            ended_by = stopped.number
        finally:
            for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(each, signal.SIG_IGN)
            if helper:
                self.end(helper, now=True)
            if ended_by:
                done = {name for _, name, _, _ in self.results}
                name = signal.Signals(ended_by).name
                for step in steps:
                    if step.name not in done:
                        self.results.append((FAIL, step.name, 0.0, f"not done: {name} ended the check"))
            self.pack()
            print("\n" + self.summary(), flush=True)
        return 128 + ended_by if ended_by else 1 if self.failed() else 0

    def run_step(self, step: Step) -> None:
        begin = time.monotonic()
        left = self.budget - (begin - self.begin)
        seconds = min(step.seconds * self.scale, left)
        print(f"== {step.name} (at most {max(seconds, 0):.0f} s)", flush=True)
        log = self.folder / f"{step.name}.log"
        try:
            verdict, text = self.outcome(step, log, begin + seconds)
        except Stopped:
            self.results.append((FAIL, step.name, time.monotonic() - begin, "ended from outside"))
            raise
        self.results.append((verdict, step.name, time.monotonic() - begin, text))
        print(f"   {verdict}: {text}", flush=True)
        if verdict == FAIL:
            self.show_end(log)
            if self.probe and not self.broken:
                with open(self.folder / f"{step.name}-probe.log", "wb") as out:
                    if self.go(self.probe, out, time.monotonic() + 20 * self.scale) != 0:
                        self.broken = step.name
                        print("   and the device no longer works", flush=True)

    def outcome(self, step: Step, log: pathlib.Path, end: float) -> Verdict:
        if step.skip:
            return SKIPPED, step.skip
        if self.broken:
            return SKIPPED, f"the device has not worked since {self.broken}"
        if end - time.monotonic() < min(1.0, step.seconds * self.scale / 2):
            return (SKIPPED if step.optional else FAIL), "no time was left"
        ran = Ran(step.name, log, [])
        with open(log, "wb") as out:
            for command in step.commands(self) if callable(step.commands) else step.commands:
                if end - time.monotonic() < max(command.least * self.scale, 0.1):
                    ran.commands.append((command.words, None))
                    continue
                ran.commands.append((command.words, self.go(command, out, end)))
        bad = next((code for code in ran.codes if code not in (0, None, 124)), None)
        try:
            if step.judge_failures or (bad is None and not ran.timed_out):
                return step.judge(ran)
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
            return FAIL, f"its results cannot be read: {error!r}"
        if bad is None:
            return (SKIPPED if step.optional else FAIL), "ran out of time"
        return FAIL, f"exit code {bad} of command {ran.codes.index(bad) + 1} of {len(ran.codes)}"

    def start(self, command: Command, out: object) -> subprocess.Popen:
        self.starting = True
        try:
            return subprocess.Popen(command.words, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                    env=os.environ | command.env, start_new_session=True)
        finally:
            self.starting = False

    def go(self, command: Command, out: object, end: float) -> int:
        """Runs the command; returns its exit code, 124 if it ran out of time, 127 if it could not start."""
        words = " ".join([f"{k}={shlex.quote(v)}" for k, v in command.env.items()
                          if k != "LD_LIBRARY_PATH"] + [shlex.quote(w) for w in command.words])
        out.write(f"\n$ {words}\n".encode())
        out.flush()
        begin = time.monotonic()
        try:
            process = self.start(command, out)
        except OSError as error:
            out.write(f"could not be started: {error}\n".encode())
            return 127
        code = 124
        try:
            if self.stopped:
                raise Stopped(self.stopped)
            code = process.wait(max(end - time.monotonic(), 0.05))
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.end(process, now=code != 124)
        out.write(f"exit code {code} after {time.monotonic() - begin:.1f} s\n".encode())
        out.flush()
        return code

    @staticmethod
    def end(process: subprocess.Popen, now: bool) -> None:
        """Ends the process and its remaining children with SIGTERM, a wait and SIGKILL; now: only SIGKILL."""
        for number in [signal.SIGKILL] if now else [signal.SIGTERM, signal.SIGKILL]:
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                pass
            try:
                process.wait(KILL_AFTER)
                if number == signal.SIGTERM:
                    time.sleep(0.05)  # for its children
            except subprocess.TimeoutExpired:
                pass  # SIGKILL follows, or the process hangs in the kernel and cannot be ended

    @staticmethod
    def show_end(log: pathlib.Path) -> None:
        if log.exists():
            with open(log, "rb") as file:
                file.seek(max(0, log.stat().st_size - 1500))
                for line in file.read().decode(errors="replace").splitlines()[-12:]:
                    print(f"   | {line}", flush=True)

    def summary(self) -> str:
        width = max([len(name) for _, name, _, _ in self.results] + [8])
        lines = [f"{self.title}, {os.uname().nodename}, "
                 f"{time.strftime('%Y-%m-%dT%H:%MZ', time.gmtime())}, "
                 f"{time.monotonic() - self.begin:.0f} s"]
        lines += [f"{verdict:7}  {name:{width}}  {seconds:4.0f} s  {text}".rstrip()
                  for verdict, name, seconds, text in self.results]
        return "\n".join(lines + [f"failed steps: {len(self.failed())}; all logs: {self.archive}"])

    def pack(self) -> None:
        """Replaces the archive."""
        (self.folder / "summary.txt").write_text(self.summary() + "\n")
        top = self.archive.name.removesuffix(".tar.gz")
        fresh = self.archive.with_name(f".{self.archive.name}.{os.getpid()}")
        with tarfile.open(fresh, "w:gz", compresslevel=6) as tar:
            for path in sorted(self.folder.rglob("*")):
                if path.is_file():
                    data = self.shortened(path)
                    info = tarfile.TarInfo(f"{top}/{path.relative_to(self.folder)}")
                    info.size, info.mtime = len(data), path.stat().st_mtime
                    tar.addfile(info, io.BytesIO(data))
        os.replace(fresh, self.archive)

    @staticmethod
    def shortened(path: pathlib.Path) -> bytes:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= MOST_BYTES:
                return file.read(MOST_BYTES)
            head = file.read(MOST_BYTES // 2)
            file.seek(size - MOST_BYTES // 2)
            gap = f"\n... {size - MOST_BYTES} bytes left out ...\n".encode()
            return head + gap + file.read(MOST_BYTES // 2)
