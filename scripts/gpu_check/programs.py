"""Programs that steps start as commands: programs.py NAME [WORD ...]; HELPERS has their names."""

from __future__ import annotations

import ctypes
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time


def hold_context() -> int:
    """Keeps the GPU initialised, which without persistence mode each process would do anew."""
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
    """A test case's name where Catch2 wants a choice of cases."""
    return re.sub(r"([\\,\[\]*\"])", r"\\\1", name)


def isolate(report: str, program: str, *words: str) -> int:
    """Runs Catch2 tests, and those that failed again singly: an error that stays with the process
    makes all later cases fail. 0 where none fails alone; 1."""
    pathlib.Path(report).unlink(missing_ok=True)
    code = subprocess.call([program, *words, "-r", "xml", "-o", report])
    text = pathlib.Path(report).read_text(errors="replace") if os.path.exists(report) else ""
    cases = re.split(r"<TestCase name=", text)[1:]
    names, failed = [], []
    for case in cases:
        name = re.match(r'"([^"]*)"', case)
        if name:
            names.append(name[1])
            if not re.search(r'<OverallResult success="true"', case):
                failed.append(name[1])
    print(f"{len(names)} cases, {len(failed)} failed, exit code {code}", flush=True)
    if code != 0 and not failed:
        print("isolate: the program failed beside its cases", flush=True)
        return 1
    alone = []
    for name in failed:
        for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
            name = name.replace(entity, char)
        print(f"again, alone: {name}", flush=True)
        if subprocess.call([program, escaped(name)]) != 0:
            alone.append(name)
            print(f"FAILED ALONE: {name}", flush=True)
    print(f"failed alone: {len(alone)} of {len(names)}", flush=True)
    return 1 if alone else 0


def stop_rank(which: str, running: str, *job: str) -> int:
    """Two ranks, of which the second gets the signal after a dozen steps: the first must end in time
    with exit code 4 and name it. running: the first one's --json."""
    job_words = [*job, "--init-method", f"tcp://127.0.0.1:{random.randrange(20000, 30000)}",
                 "--world-size", "2"]
    path = pathlib.Path(running)
    path.unlink(missing_ok=True)
    peer = subprocess.Popen([*job_words, "--rank", "1"])
    survivor = subprocess.Popen([*job_words, "--rank", "0", "--json", running],
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
