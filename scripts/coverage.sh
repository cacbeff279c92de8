#!/usr/bin/env bash
# Prints how many lines of gyre's code the tests run, by folder and in total, and the files with the most lines that
# they do not run. Code of the GPU alone is left out: here no GPU runs it, and the emulator has tests of its own.
#   scripts/coverage.sh           builds the preset coverage, runs its tests, prints
#   scripts/coverage.sh --print   prints what the last tests have run
# A process that ends at once, as ranks do whose job fails, writes no counts: what it ran last counts as not run.
# It needs gcovr (Debian's package).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v gcovr >/dev/null || {
    echo "scripts/coverage.sh: there is no gcovr: install the package gcovr" >&2
    exit 1
}
if [ "${1-}" != --print ]; then
    scripts/setup.sh
    scripts/build.sh coverage
    find build-coverage -name '*.gcda' -delete
    ctest --preset coverage --parallel "$((2 * $(nproc)))" || echo "scripts/coverage.sh: not all tests have passed" >&2
fi
gcovr --root . --json-summary build-coverage/coverage.json -j "$(nproc)" --exclude-throw-branches \
    --filter '(base|comm|data|kernels|model|train)/' \
    --exclude 'kernels/(cuda|cudnn|gpu|emulation|cuda_info)' --exclude 'comm/nccl/' --gcov-ignore-parse-errors \
    build-coverage >/dev/null
python3 - <<'END'
import collections
import json

with open("build-coverage/coverage.json") as file:
    files = json.load(file)["files"]
folders = collections.defaultdict(lambda: [0, 0])
for entry in files:
    for folder in (entry["filename"].split("/")[0], "all"):
        folders[folder][0] += entry["line_covered"]
        folders[folder][1] += entry["line_total"]
for folder in sorted(folders, key=lambda name: (name == "all", name)):
    run, lines = folders[folder]
    print(f"{folder:10} {run:6} of {lines:6} lines: {100 * run / lines:5.1f} %")
print("most lines that no test has run:")
for entry in sorted(files, key=lambda e: e["line_covered"] - e["line_total"])[:10]:
    print(f'{entry["line_total"] - entry["line_covered"]:6} of {entry["line_total"]:5}  {entry["filename"]}')
END
