#!/usr/bin/env python3
"""Runs every command of the user's pages as it stands there, on little data.

    tests/repository/docs_test.py BUILD       the folder with gyre; PYTHON=… a Python with torch, if not this one

Commands are the lines of ```sh blocks and, in tables, what the last column has in `…` and begins with
a program's name; ```python blocks are run too. `gyre train` gets --limit and --epochs 1 in place of
its own, so that a line takes about a second. What needs torch is skipped, and said to be, where there
is none. Exit code 1 when a command fails.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("running", "pytorch", "own-data", "own-net", "looking-at-runs",
                                                "checkpoints", "hosts", "slurm")]
PROGRAMS = ("gyre", "mpirun", "torchrun", "python", "accelerate")
SHORTER = """#!/usr/bin/env python3
import os, sys
words = sys.argv[1:]
if (words[:1] == ["train"] or words[:1] == ["launch"] and "train" in words) and "--help" not in words:
    for flag in ("--epochs", "--limit"):
        if flag in words:
            at = words.index(flag)
            del words[at:at + 2]
    words += ["--epochs", "1", "--limit", "640"]
os.execv({gyre!r}, ["gyre", *words])
"""


ITEMS = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```|^\| (?P<row>[^\n]*) \|$", re.MULTILINE | re.DOTALL)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")]


def flag_rows(text: str) -> list[tuple[str, bool]]:
    """Foreign flags with their values, and whether gyre takes them as they are."""
    rows = []
    for item in ITEMS.finditer(text):
        if (item["row"] or "").startswith("`--"):
            theirs, ours = cells(item["row"])
            taken = "`, `" not in theirs or theirs.startswith("`--backend")
            taken = taken and re.match(r"`--[a-z-]+( [^` ]+)?`( \(|$)", ours) is not None
            rows += [(flag, taken) for flag in re.findall(r"`([^`]+)`", theirs)]
    return rows


def write_png(path: pathlib.Path, height: int, width: int, value: int) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = b"".join(b"\0" + bytes([(value + row) % 256]) * width for row in range(height))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
                     + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))  # fmt: skip


def write_npy(path: pathlib.Path, shape: tuple[int, ...], values: bytes) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + values)


def write_own_data(work: pathlib.Path) -> None:
    """The sets that docs/own-data.md speaks of, with few images."""
    for part, count in (("train", 8), ("test", 4)):
        for number, name in enumerate(("cat", "dog")):
            for i in range(count):
                write_png(work / "pets" / part / name / f"{i}.png", 20 + i, 30, 100 * number)
        write_npy(work / "arrays" / f"{part}_images.npy", (count, 28, 28), bytes(range(count)) * 784)
        write_npy(work / "arrays" / f"{part}_labels.npy", (count,), bytes([0, 1] * (count // 2)))
    (work / "cifar-10-batches-bin").mkdir()
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        records = b"".join(bytes([label]) + bytes([25 * label]) * 3072 for label in range(10))
        (work / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(records)


def main() -> int:
    build = pathlib.Path(sys.argv[1]).resolve()
    python = os.environ.get("PYTHON", sys.executable)
    has_torch = subprocess.run([python, "-c", "import torch, safetensors"],
                               capture_output=True).returncode == 0  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gyre-docs-") as folder:
        work = pathlib.Path(folder)
        (work / "bin").mkdir()
        shim = work / "bin" / "gyre"
        shim.write_text(SHORTER.format(gyre=str(build / "gyre")))
        shim.chmod(0o755)
        (work / "scripts").symlink_to(ROOT / "scripts")
        # Fashion-MNIST is the test machines' data set; here it answers to MNIST's name as well.
        for name in ("mnist", "fashion-mnist"):
            for place in ("/usr/share/datasets/fashion-mnist", "/usr/local/share/datasets/fashion-mnist"):
                if os.path.isdir(place) and not (work / name).exists():
                    (work / name).symlink_to(place)
        write_own_data(work)
        environment = dict(os.environ, GYRE_DATA=str(work), OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(work / "cache"))
        # As root, and on machines with few cores; Open MPI 4 and 5.
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_mpi_yield_when_idle",
                     "OMPI_MCA_rmaps_base_oversubscribe"):  # fmt: skip
            environment[name] = "1"
        environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        environment["PATH"] = f"{work / 'bin'}:{pathlib.Path(python).parent}:{os.environ['PATH']}"
        counts = {"passed": 0, "failed": 0, "skipped": 0}

        def judge(what: str, command: list[str], expected: tuple[int, str] = (0, "")) -> None:
            try:
                done = subprocess.run(command, cwd=work, env=environment, capture_output=True,
                                      text=True, timeout=120)  # fmt: skip
                code, output = done.returncode, done.stdout + done.stderr
            except subprocess.TimeoutExpired as error:
                code, output = -1, f"no end within {error.timeout} s"
            good = code == expected[0] and expected[1] in output
            counts["passed" if good else "failed"] += 1
            print(f"{'ok    ' if good else 'FAILED'} {what}", flush=True)
            if not good:
                print(f"exit code {code}, expected {expected}; output:\n{output[-3000:]}")

        def skip(what: str) -> None:
            counts["skipped"] += 1
            print(f"skipped (no Python with torch, safetensors and the launcher): {what}", flush=True)

        for page in PAGES:
            text = page.read_text()
            for item in ITEMS.finditer(text):  # in their order: later ones read files of earlier ones
                if item["language"] == "sh":
                    judge(item["code"].strip(), ["bash", "-e", "-c", item["code"] + "\nwait"])
                elif item["language"] == "python" and not has_torch:
                    skip(f"the Python of {page.name}; gyre's own weights stand in for what it saves")
                    for name in re.findall(r'save_file\(.*, "(.*)"\)', item["code"]):
                        shutil.copy(work / "run" / "best.safetensors", work / name)
                elif item["language"] == "python":
                    judge(f"the Python of {page.name}", [python, "-c", item["code"]])
                elif item["row"]:
                    command = re.fullmatch(r"`([^`]+)`", cells(item["row"])[-1])
                    if command is None or not command[1].startswith(PROGRAMS):
                        continue
                    program = command[1].split()[0]
                    if program not in ("gyre", "mpirun") and not (
                        has_torch and shutil.which(program, path=environment["PATH"])):
                        skip(command[1])
                    else:
                        judge(command[1], ["bash", "-c", command[1]])
            for flag, taken in flag_rows(text) if page.name == "pytorch.md" else []:
                # What is answered is refused with an answer; what is taken runs.
                if "tcp://" in flag:
                    flag += " --rank 0 --world-size 1"
                judge(f"gyre train {flag}: {'taken' if taken else 'answered'}",
                      ["bash", "-c", f"gyre train {flag}"],
                      (0, "") if taken else (2, flag.split()[0]))  # fmt: skip
        print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
        return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
