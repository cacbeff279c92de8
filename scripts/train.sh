#!/usr/bin/env bash
# From a clean clone to a trained net: installs what is missing, builds, trains with two ranks, and draws
# the curves of the training, build/run.svg.
#   scripts/train.sh [ARGUMENTS OF gyre train ...]
#   GYRE_RANKS=4 scripts/train.sh --model wide --optimizer adam --epochs 3
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
ranks=${GYRE_RANKS:-2}

"$root/scripts/setup.sh"
log=$root/build/build.log
mkdir -p "$root/build"
# What only tests need is left to scripts/test.sh, and so are, without a GPU, its kernels; unless that has
# run: its build has all.
configure=(--preset train)
if grep -qs '^GYRE_TESTS:[A-Z]*=ON' "$root/build/CMakeCache.txt"; then
    configure=(--preset release)
elif ! compgen -G "/dev/nvidia[0-9]*" >/dev/null && [ ! -e /dev/dxg ] && [ ! -e /dev/nvhost-gpu ]; then
    configure+=(-DGYRE_CUDA=OFF)
fi
if ! (cd "$root" && cmake "${configure[@]}" && cmake --build --preset release --target gyre) >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "gyre: the build failed; the whole log is in $log" >&2
    exit 1
fi

# The curves of the training, unless it writes its own.
curves=$root/build/run
words=("$@")
case " $* " in
*" --metrics"* | *" --json"* | *" --help "* | *" -h "*) curves= ;;
*)
    rm -f "$curves.jsonl"
    words+=(--metrics "$curves.jsonl")
    ;;
esac
"$root/scripts/launch.sh" -np "$ranks" -- "$root/build/gyre" train "${words[@]}" &
job=$!
signalled='' status=0
trap 'signalled=1; kill -TERM "$job" 2>/dev/null || true' INT TERM HUP
while :; do
    wait "$job" && code=0 || code=$?
    [ "$code" -eq 127 ] || status=$code # 127: waited for already
    [ -n "$signalled" ] || break        # a signal ends a wait, not the job
    signalled=''
done
if [ "$status" -eq 0 ] && [ -n "$curves" ]; then
    if command -v gnuplot >/dev/null; then
        "$root/build/gyre" plot "$curves.jsonl" -o "$curves.svg" || true
    else
        echo "gyre: for a picture of it: apt-get install gnuplot-nox, and build/gyre plot build/run.jsonl -o build/run.svg"
    fi
fi
exit "$status"
