#!/usr/bin/env bash
# Fuzzes one reader of foreign bytes with libFuzzer, from its seeds and what earlier runs have found to reach new code,
# and prints a row of scripts/fuzz.sh's table.
#   tests/fuzz/fuzz_target.sh BUILD TARGET SECONDS             fails if there is an input that it does not survive
#   tests/fuzz/fuzz_target.sh BUILD TARGET SECONDS --planted   plants a bug, and fails if that is not found
set -euo pipefail
build=$1
target=$2
seconds=$3
planted=${4-}
work=$build/fuzz${planted:+-planted}/$target
rm -rf "$work/seeds" "$work/found"
mkdir -p "$work/found" "$work/corpus"
"$build/fuzz-replay" --seeds "$work/seeds" "$target"
log=$work/log
status=0
GYRE_FUZZ_PLANTED=$planted "$build/fuzz-$target" -max_total_time="$seconds" -rss_limit_mb=2048 -malloc_limit_mb=1024 \
    -timeout=10 -close_fd_mask=1 -artifact_prefix="$work/found/" "$work/corpus" "$work/seeds/$target" >"$log" 2>&1 || status=1
inputs=$(sed -n 's/^#\([0-9][0-9]*\).*/\1/p' "$log" | tail -n 1)
coverage=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' "$log" | tail -n 1)
if [ -n "$planted" ]; then
    if grep -q '^the planted bug' "$log" && grep -q 'AddressSanitizer: heap-buffer-overflow' "$log"; then
        status=0 result="the planted bug was found"
    else
        status=1 result="the planted bug was NOT found: see $log"
    fi
elif [ "$status" -eq 0 ]; then
    result="nothing found"
else
    result="FOUND: see $log"
fi
printf '%-12s %12s %10s %8s  %s\n' "$target" "${inputs:-0}" "${coverage:-0}" "$seconds" "$result"
exit "$status"
