#!/usr/bin/env bash
# Fuzzes each reader of foreign bytes with libFuzzer (clang), from the seeds of tests/fuzz, as many at a time as there are
# cores, and prints a table.
#   scripts/fuzz.sh [SECONDS] [TARGET...]             default: 60 seconds for each target
#   scripts/fuzz.sh --planted [SECONDS] [TARGET...]   plants a bug behind each reader, which must be found
# Inputs that a reader does not survive stay in build-clang/fuzz/TARGET/found; build-clang/fuzz-replay TARGET FILE
# repeats one. Exit code 1 if there are any. It needs clang with its runtime libraries (Debian 12: clang-19
# libclang-rt-19-dev).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
planted=
if [ "${1-}" = --planted ]; then
    planted=$1
    shift
fi
seconds=${1-60}
shift || true
cmake --preset clang >/dev/null
cmake --build --preset clang
build=$PWD/build-clang
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <("$build/fuzz-replay" --targets)
status=0
printf '%-12s %12s %10s %8s  %s\n' target inputs coverage seconds result
printf '%s\n' "${targets[@]}" |
    xargs -P "$(nproc)" -I '{}' tests/fuzz/fuzz_target.sh "$build" '{}' "$seconds" $planted || status=1
exit $status
