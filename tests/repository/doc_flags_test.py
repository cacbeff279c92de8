#!/usr/bin/env python3
"""README.md and docs/*.md name no option that nobody knows, and every option of --help is put to use.

    tests/repository/doc_flags_test.py BUILD       the folder with gyre

An option is a word --like-this. Known are those of gyre's subcommands (--help), what the scripts, the
benchmarks and the tests' own programs have in their text, the tutorials' names, and THEIRS.
Put to use is what a test case gives to its subcommand, or a command of a page that docs_test.py runs; that a
flag is in the list of train_flags_test.cpp is not enough. Nor does docs/architecture.md name a place in the code that is
not there. Exit code 1 where one is left, with its page and line.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

from docs_test import PAGES

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTION = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
# Of other programs that the pages call.
THEIRS = {
    "torchrun, accelerate": "--no-python --no_python --nproc-per-node --use-env --multi_gpu --num_processes --standalone --nnodes",
    "mpirun, Slurm": "--allow-run-as-root --host --map-by --bind-to --mca --mpi --oversubscribe "
                     "--job-name --ntasks --ntasks-per-node --gpus-per-task --cpus-per-task --time --signal --requeue --open-mode --array",
    "git, cmake, ctest, apt, nvcc": "--preset --target --build --rm --gpus --depth --fmad --stat --install "
                                     "--prefix --component --no-install-recommends",
}


def help_texts(gyre: pathlib.Path) -> dict[str, str]:
    def help_of(*words: str) -> str:
        return subprocess.run([gyre, *words, "--help"], capture_output=True, text=True, check=True).stdout

    overview = help_of()
    commands = re.findall(r"^  ([a-z]+)  ", overview.split("Subcommands:")[1], re.MULTILINE)
    if len(commands) < 4:
        sys.exit(f"gyre --help lists only {commands}")
    return {"": overview, **{command: help_of(command) for command in commands}}


def unused_options(texts: dict[str, str]) -> list[str]:
    """Options of --help without a use: a test case, or a command of a page, with the option and its subcommand.

    Most cases have `train` in a helper of theirs, so for `train` the option is enough."""
    uses = []
    for test in (ROOT / "tests").rglob("*"):
        if test.suffix in (".cpp", ".hpp", ".py", ".sh") and test.name not in ("train_flags_test.cpp", "doc_flags_test.py"):  # fmt: skip
            uses += re.split(r"^TEST_CASE|^def ", test.read_text(), flags=re.MULTILINE)
    for page in PAGES:  # blocks that are run, and tables of flags, each of which is
        for block in re.findall(r"^```sh\n.*?^```|^\| `--[^\n]*", page.read_text(), re.MULTILINE | re.DOTALL):
            uses += block.replace("\\\n", " ").splitlines()
    used = {command: {option for use in uses if command in ("", "train") or re.search(rf"\b{command}\b", use)
                      for option in OPTION.findall(use)} for command in texts}  # fmt: skip
    return [f"gyre {command} {option}" for command, text in texts.items()
            for option in re.findall(r"^ +(?:-\w, ?)?(--[a-z][\w-]*)", text, re.MULTILINE)
            if option not in used[command] and option != "--help"]  # fmt: skip


def known_options(texts: dict[str, str]) -> set[str]:
    text = "".join(texts.values()) + " ".join(THEIRS.values())
    programs = [ROOT / "train" / "cli" / "tutorial_flags.cpp"]
    for folder in ("scripts", "bench"):
        programs += (p for p in (ROOT / folder).rglob("*") if p.suffix in (".sh", ".py", ".cpp"))
    programs += (p for p in (ROOT / "tests").rglob("*.py") if p != pathlib.Path(__file__).resolve())
    return set(OPTION.findall(text + "".join(p.read_text() for p in programs)))


def stale_places(page: pathlib.Path) -> list[str]:
    """Rows that name a file, and in the next column what is said to be in it but is not."""
    rows = re.findall(r"^\|.*\| \[([^\]]+)\]\(\.\./\1\) \| `(.+)` \|$", page.read_text(), re.MULTILINE)
    if not rows:
        return [f"{page.name} names no places: did its tables change?"]
    return [f"{page.name}: {file} has no '{name}'" for file, name in rows
            if not (ROOT / file).exists() or name not in (ROOT / file).read_text()]  # fmt: skip


def main() -> int:
    texts = help_texts(pathlib.Path(sys.argv[1]).resolve() / "gyre")
    known = known_options(texts)
    unknown = named = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for option in OPTION.findall(line):
                named += 1
                if option.replace("_", "-") not in known and option not in known:
                    unknown += 1
                    print(f"{page.relative_to(ROOT)}:{number}: nobody knows {option}: {line.strip()}")
    unused = unused_options(texts)
    for option in unused:
        print(f"no test and no command of a page gives {option}")
    stale = stale_places(ROOT / "docs" / "architecture.md")
    print(*stale, sep="\n", end="\n" if stale else "")
    print(f"{named} options named, {unknown} of them unknown; {len(unused)} never put to use; {len(stale)} stale places")
    return 1 if unknown or unused or stale or not named else 0


if __name__ == "__main__":
    sys.exit(main())
