#!/usr/bin/env python3
"""README.md and docs/*.md name no option that nobody knows.

    tests/doc_flags_test.py BUILD       the folder with gyre

An option is a word --like-this. Known are those of gyre's subcommands (--help), what the scripts, the
benchmarks and the tests' own programs have in their text, the tutorials' names, and THEIRS.
Exit code 1 where one is left, with its page and line.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
# Of other programs that the pages call.
THEIRS = {
    "torchrun, accelerate": "--no-python --no_python --nproc-per-node --use-env --multi_gpu --num_processes --standalone --nnodes",
    "mpirun, Slurm": "--host --map-by --bind-to --mca --mpi --oversubscribe --ntasks --signal --requeue",
    "git, cmake, ctest, apt, nvcc": "--preset --target --build --rm --gpus --depth --fmad --stat",
}


def known_options(gyre: pathlib.Path) -> set[str]:
    def help_of(*words: str) -> str:
        return subprocess.run([gyre, *words, "--help"], capture_output=True, text=True, check=True).stdout

    overview = help_of()
    commands = re.findall(r"^  ([a-z]+)  ", overview.split("Subcommands:")[1], re.MULTILINE)
    if len(commands) < 4:
        sys.exit(f"gyre --help lists only {commands}")
    text = overview + "".join(map(help_of, commands)) + " ".join(THEIRS.values())
    programs = [ROOT / "train" / "cli" / "tutorial_flags.cpp"]
    for folder in ("scripts", "bench"):
        programs += (p for p in (ROOT / folder).rglob("*") if p.suffix in (".sh", ".py", ".cpp"))
    programs += (p for p in (ROOT / "tests").glob("*.py") if p != pathlib.Path(__file__).resolve())
    return set(OPTION.findall(text + "".join(p.read_text() for p in programs)))


def main() -> int:
    known = known_options(pathlib.Path(sys.argv[1]).resolve() / "gyre")
    unknown = named = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for option in OPTION.findall(line):
                named += 1
                if option.replace("_", "-") not in known and option not in known:
                    unknown += 1
                    print(f"{page.relative_to(ROOT)}:{number}: nobody knows {option}: {line.strip()}")
    print(f"{named} options named, {unknown} of them unknown")
    return 1 if unknown or not named else 0


if __name__ == "__main__":
    sys.exit(main())
