#!/usr/bin/env bash
# Configures and builds a preset, and shows its progress: in place on a terminal, every 10 % elsewhere.
#   scripts/build.sh PRESET [TARGET ...]     presets: release, ci, quick, train, package, debug, asan, tsan, odr, clang, coverage
# The complete output goes to build.log in the preset's build folder.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
targets=()
[ $# -eq 1 ] || targets=(--target "${@:2}")

case $preset in
release | ci | quick | train) folder=build ;;
*) folder=build-$preset ;;
esac
log=$folder/build.log
mkdir -p "$folder"
# Processor seconds of a preset's complete build, and its steps, measured on two cores at 2.1 GHz.
declare -A whole=([quick]="520 280" [release]="1180 350" [ci]="1000 350" [train]="75 60" [asan]="790 340" [tsan]="650 290" [odr]="200 180" [clang]="310 80")

# Shows the progress of ninja from its output.
show() {
    local line finished all percent shown=0 estimate cores terminal='' started=$SECONDS
    [ ! -t 1 ] || terminal=1
    cores=$(nproc)
    while IFS= read -r line; do
        [[ $line =~ ^\[([0-9]+)/([0-9]+)\]\  ]] || continue
        finished=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
        percent=$((100 * finished / all))
        if [ "$finished" -eq 1 ]; then
            estimate=''
            if [ -n "${whole[$preset]-}" ]; then
                read -r seconds steps <<<"${whole[$preset]}"
                estimate=$((seconds * all / steps / cores))
                estimate=", in about $((estimate / 60)) min $((estimate % 60)) s on $cores cores"
            fi
            echo "$preset: $all build steps$estimate"
        fi
        if [ -n "$terminal" ]; then
            printf '\r\033[K%s: %d %% built, %d s ' "$preset" "$percent" $((SECONDS - started))
        elif [ $((percent / 10)) -gt "$shown" ]; then
            shown=$((percent / 10))
            echo "$preset: $((10 * shown)) % built, $((SECONDS - started)) s"
        fi
    done
    [ -z "$terminal" ] || printf '\r\033[K'
}

if ! cmake --preset "$preset" >"$log" 2>&1 ||
    ! NINJA_STATUS='[%f/%t] ' cmake --build --preset "$preset" "${targets[@]}" 2>&1 | tee -a "$log" | show; then
    tail -n 40 "$log" >&2
    echo "gyre: the build failed; the complete log is in $PWD/$log" >&2
    exit 1
fi
