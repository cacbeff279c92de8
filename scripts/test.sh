#!/usr/bin/env bash
# Installs what is missing, builds, and runs all tests.
#   scripts/test.sh [PRESET ...]     presets: release (default), debug, asan, tsan, odr
set -euo pipefail
cd "$(dirname "$0")/.."
presets=("${@:-release}")

scripts/setup.sh
for preset in "${presets[@]}"; do
    echo "== $preset: build"
    cmake --preset "$preset" >/dev/null
    cmake --build --preset "$preset" -- --quiet
    echo "== $preset: tests"
    run=(ctest --preset "$preset")
    # ThreadSanitizer of g++ 12 cannot place its memory where addresses are randomised widely.
    if [ "$preset" = tsan ] && setarch -R true 2>/dev/null; then
        run=(setarch -R "${run[@]}")
    fi
    "${run[@]}"
done
