#!/usr/bin/env bash
# Fuzzes each reader of foreign bytes with libFuzzer (clang), from the seeds of tests/fuzz, and prints a table.
#   scripts/fuzz.sh [SECONDS] [TARGET...]      default: 60 seconds for each target
# Inputs that a reader does not survive stay in build-fuzz/found/; build/fuzz-replay TARGET FILE repeats one. Exit code
# 1 if there are any. It needs clang with its runtime libraries (Debian, Ubuntu: clang libclang-rt-14-dev or later).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1-60}
shift || true
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz
build=$PWD/build-fuzz
"$build/fuzz-replay" --seeds "$build/seeds"
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(ls "$build/seeds")
mkdir -p "$build/found"
status=0
printf '%-12s %12s %10s %8s  %s\n' target inputs coverage seconds result
for target in "${targets[@]}"; do
    mkdir -p "$build/corpus/$target"
    log=$build/fuzz-$target.log
    result="nothing found"
    if ! "$build/fuzz-$target" -max_total_time="$seconds" -rss_limit_mb=2048 -malloc_limit_mb=1024 -timeout=10 -close_fd_mask=1 \
        -artifact_prefix="$build/found/$target-" "$build/corpus/$target" "$build/seeds/$target" >"$log" 2>&1; then
        result="FOUND: see build-fuzz/fuzz-$target.log"
        status=1
    fi
    inputs=$(sed -n 's/^#\([0-9]*\).*/\1/p' "$log" | tail -n 1)
    coverage=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' "$log" | tail -n 1)
    printf '%-12s %12s %10s %8s  %s\n' "$target" "${inputs:-0}" "${coverage:-0}" "$seconds" "$result"
done
exit $status
