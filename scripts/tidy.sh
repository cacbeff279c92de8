#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy over all code around the kernels. Exit code 1 if it finds anything.
#   scripts/tidy.sh           configures the preset clang first
#   scripts/tidy.sh --check   for ctest: as it is configured
# Sources are compiled a few at a time (GYRE_UNITY), so that headers are read once for all of them. It needs
# clang-tidy-19 (Debian 12 has it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "${1-}" = --check ] || cmake --preset clang >/dev/null
python3 - <<'END'
# One process for each processor; what they print is printed once, however many sources include a header.
import concurrent.futures
import json
import os
import re
import subprocess
import sys

with open("build-clang/compile_commands.json") as file:
    sources = sorted({entry["file"] for entry in json.load(file) if "/tests/" not in entry["file"]})


def check(source):
    command = ["clang-tidy-19", "--config-file=.clang-tidy", "-p", "build-clang", "--quiet", source]
    return subprocess.run(command, capture_output=True, text=True)


with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    results = list(pool.map(check, sources))
found = []
for result in results:
    for finding in re.split(r"(?m)^(?=\S+:\d+:\d+: (?:warning|error): )", result.stdout):
        if finding.strip() and finding not in found:
            found.append(finding)
failed = [result.stderr for result in results if result.returncode != 0]
print("".join(found) or "\n".join(failed if failed else []), end="")
print(f"clang-tidy: {len(found)} findings in {len(sources)} compilations")
sys.exit(1 if found or failed else 0)
END
