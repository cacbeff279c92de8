"""Helper programs that steps start as commands: programs.py NAME [WORD ...]; HELPERS lists the names."""

from __future__ import annotations

import ctypes
import glob
import html
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time


def hold_context() -> int:
    """Keeps the GPU initialised; without persistence mode each process would initialise it again."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(f"no context is held: {error}", file=sys.stderr)
        return 1
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for result in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
                   cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)):
        if result != 0:
            print(f"no context is held: CUDA error {result}", file=sys.stderr)
            return 1
    signal.pause()
    return 0


def escaped(name: str) -> str:
    """A test case's name, escaped for Catch2's selection of cases."""
    return re.sub(r"([\\,\[\]*\"])", r"\\\1", name)


def listed(program: str, words: list[str]) -> list[str]:
    """The names of the selected cases; works with Catch2 version 3 and 2."""
    for flags in (["--list-tests", "--verbosity", "quiet"], ["--list-test-names-only"]):
        run = subprocess.run([program, *words, *flags], capture_output=True, text=True)
        names = [line.strip() for line in run.stdout.splitlines() if line.strip()]
        if names and not any(line.startswith("  ") or line.endswith("test cases") or line.endswith(":")
                             for line in run.stdout.splitlines()):
            return names
    return []


def isolate(report: str, jobs: str, program: str, *words: str) -> int:
    """Runs Catch2 tests in `jobs` processes at a time, and failed ones again, each in its own process: an
    error that persists in a process makes all its later cases fail. Returns 0 if none fails by itself, else 1."""
    names = listed(program, list(words))
    print(f"{len(names)} cases in {jobs} processes", flush=True)
    if not names:
        return 1
    for old in glob.glob(f"{report}-*.xml"):
        os.remove(old)
    parts = [names[first::int(jobs)] for first in range(min(int(jobs), len(names)))]
    processes = [subprocess.Popen([program, ",".join(escaped(name) for name in part), "-r", "xml", "-o",
                                   f"{report}-{i}.xml"]) for i, part in enumerate(parts)]
    codes = [process.wait() for process in processes]
    good = set()
    for path in glob.glob(f"{report}-*.xml"):
        for case in re.split(r"<TestCase name=", pathlib.Path(path).read_text(errors="replace"))[1:]:
            name = re.match(r'"([^"]*)"', case)
            if name and re.search(r'<OverallResult success="true"', case):
                good.add(html.unescape(name[1]))
    failed = [name for name in names if name not in good]
    print(f"{len(names)} cases, {len(failed)} failed, exit codes {codes}", flush=True)
    if any(codes) and not failed:
        print("isolate: a program failed outside its cases", flush=True)
        return 1
    alone = []
    for name in failed:
        print(f"again, alone: {name}", flush=True)
        if subprocess.call([program, escaped(name)]) != 0:
            alone.append(name)
            print(f"FAILED ALONE: {name}", flush=True)
    print(f"failed alone: {len(alone)} of {len(names)}", flush=True)
    return 1 if alone else 0


def stop_rank(which: str, running: str, *job: str) -> int:
    """Starts two ranks and sends the second the signal after a dozen steps: the first must end in time
    with exit code 4 and name it. running: the --metrics file of the first."""
    job_words = [*job, "--init-method", f"tcp://127.0.0.1:{random.randrange(20000, 30000)}",
                 "--world-size", "2"]
    path = pathlib.Path(running)
    path.unlink(missing_ok=True)
    peer = subprocess.Popen([*job_words, "--rank", "1"])
    survivor = subprocess.Popen([*job_words, "--rank", "0", "--metrics", running],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end and survivor.poll() is None:
            if path.exists() and path.read_text().count('"event":"step"') >= 12:
                break
            time.sleep(0.1)
        peer.send_signal(getattr(signal, f"SIG{which}"))
        begin = time.monotonic()
        try:
            text, _ = survivor.communicate(timeout=25)
        except subprocess.TimeoutExpired:
            print(f"the other rank was still there 25 s after SIG{which}")
            return 1
        print(text)
        print(f"SIG{which} to rank 1: exit code {survivor.returncode} of rank 0 after "
              f"{time.monotonic() - begin:.1f} s")
        return 0 if survivor.returncode == 4 and "rank 1 on " in text else 1
    finally:
        for process in (peer, survivor):
            process.kill()
            process.wait()


HELPERS = {"hold-context": hold_context, "isolate": isolate, "stop-rank": stop_rank}

if __name__ == "__main__":
    sys.exit(HELPERS[sys.argv[1]](*sys.argv[2:]))
