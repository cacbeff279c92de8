#!/usr/bin/env bash
# Installs missing packages, builds, and runs the tests.
#   scripts/test.sh                  the quick tests: ten minutes in total on two cores without a GPU
#   scripts/test.sh --all            all tests, as in CI: also with the sanitizers, the checker of kernels,
#                                    other processors, and the kernels compiled for GPUs
#   scripts/test.sh PRESET ...       the tests of these presets: quick (default), release, debug, asan, tsan, odr
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1-}" = --all ]; then
    scripts/setup.sh --all
    presets=(asan tsan release odr)
else
    scripts/setup.sh
    presets=("${@:-quick}")
fi

jobs=$(nproc)
[ "$jobs" -ge 2 ] || jobs=2 # as tests wait more than they compute
for preset in "${presets[@]}"; do
    scripts/build.sh "$preset"
    run=(ctest --preset "$preset" --parallel "$jobs")
    # g++ 12's ThreadSanitizer cannot place its memory if the system randomises addresses widely.
    if [ "$preset" = tsan ] && setarch -R true 2>/dev/null; then
        run=(setarch -R "${run[@]}")
    fi
    echo "$preset: running $jobs tests at a time"
    "${run[@]}"
done
