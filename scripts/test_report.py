#!/usr/bin/env python3
"""Parts of scripts/test.sh: what tests need, and what became of them.

    scripts/test_report.py targets --preset PRESET -R REGEX
        prints the targets that the tests need which ctest selects by these arguments
    scripts/test_report.py summary PRESETS CCACHE_LOG
        prints a table of presets, the longest tests and the compiler cache's hits, and then each failed
        test's output once more; PRESETS has lines `PRESET BUILD_SECONDS TEST_SECONDS JUNIT_FILE`, in which
        `-` as the file stands for a failed build. Exit code 1 if anything failed.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

LONGEST = 10


def targets(arguments: list[str]) -> int:
    listing = json.loads(subprocess.check_output(["ctest", "--show-only=json-v1", *arguments], text=True))
    if not listing["tests"]:
        print(f"gyre: no test matches: ctest {' '.join(arguments)}", file=sys.stderr)
    needed = set()
    for test in listing["tests"]:
        properties = {p["name"]: p["value"] for p in test["properties"]}
        folder = properties["WORKING_DIRECTORY"]
        required = properties.get("REQUIRED_FILES", [])
        words = [*commands(folder)[test["name"]].replace('"', " ").split(), *required]
        names = {os.path.relpath(os.path.join(folder, word), root_of(folder)) for word in words}
        # A test that is given the build folder may need anything there, unless it says what.
        needed |= {"all"} if "." in names and not required else names & outputs(folder)
    print(*sorted(needed), sep="\n", end="\n" if needed else "")
    return 0


@functools.cache
def commands(folder: str) -> dict[str, str]:
    """The tests' commands, as CMake wrote them: ctest does not list those whose program is not built yet."""
    text = "".join(file.read_text() for file in sorted(root_of(folder).rglob("CTestTestfile.cmake")))
    return dict(re.findall(r"^add_test\(\[=*\[(.*?)\]=*\] (.*)\)$", text, re.MULTILINE))


@functools.cache
def outputs(folder: str) -> set[str]:
    """The files that ninja can make there."""
    text = subprocess.check_output(["ninja", "-C", root_of(folder), "-t", "targets", "all"], text=True)
    return {line.rsplit(": ", 1)[0] for line in text.splitlines()}


def root_of(folder: str) -> pathlib.Path:
    """The build folder that this folder belongs to."""
    return next(root for root in (pathlib.Path(folder), *pathlib.Path(folder).parents) if (root / "build.ninja").exists())


def state(case: xml.Element) -> str:
    skipped = case.find("skipped")
    if skipped is not None:  # also where ctest could not start the test
        return "skipped" if (skipped.get("message") or "").startswith("SKIP_") else "failed"
    return "passed" if case.get("status") == "run" else "failed"


def summary(presets: str, cache_log: str) -> int:
    rows, tests = [], []
    for line in pathlib.Path(presets).read_text().splitlines():
        preset, build, test, file = line.split(maxsplit=3)
        cases = [] if file == "-" else xml.parse(file).getroot().findall("testcase")
        tests += [(preset, case) for case in cases]
        states = [state(case) for case in cases]
        rows.append((preset, int(build), int(test), *map(states.count, ("passed", "failed", "skipped")), file == "-"))

    print(f"\n{'preset':10} {'build s':>8} {'tests s':>8} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for preset, build, test, passed, failed, skipped, broken in rows:
        print(f"{preset:10} {build:8} {test:8} {passed:7} {failed:7} {skipped:8}{'   the build failed' if broken else ''}")
    print(f"{'sum':10} {sum(r[1] for r in rows):8} {sum(r[2] for r in rows):8}")
    print("\nlongest tests, in seconds")
    for preset, case in sorted(tests, key=lambda t: -float(t[1].get("time", 0)))[:LONGEST]:
        print(f"{float(case.get('time')):8.0f}  {preset} {case.get('name')}")
    if os.path.exists(cache_log):
        words = pathlib.Path(cache_log).read_text().split()
        hits = words.count("direct_cache_hit") + words.count("preprocessed_cache_hit")
        print(f"\ncompiler cache: {hits} hits, {words.count('cache_miss')} misses")

    failed = [(preset, case) for preset, case in tests if state(case) == "failed"]
    for preset, case in failed:
        print(f"\n{preset}: output of {case.get('name')}")
        print(case.findtext("system-out") or "")
    broken = [row[0] for row in rows if row[-1]]
    if failed or broken:
        print("\nfailed:")
        for preset in broken:
            print(f"    {preset}: the build; its messages are above")
        for preset, case in failed:
            print(f"    {preset}: {case.get('name')}, run again by: scripts/test.sh --only '^{case.get('name')}$' {preset}")
    passed, skipped = sum(r[3] for r in rows), sum(r[5] for r in rows)
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(targets(sys.argv[2:]) if sys.argv[1] == "targets" else summary(*sys.argv[2:]))
