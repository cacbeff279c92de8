#!/usr/bin/env bash
# Goes from a clean clone to a trained net: installs missing packages, builds, trains with two ranks, and
# draws the training's curves in build/run.svg.
#   scripts/train.sh [ARGUMENTS OF gyre train ...]
#   GYRE_RANKS=4 scripts/train.sh --model wide --optimizer adam --epochs 3
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
ranks=${GYRE_RANKS:-2}

"$root/scripts/setup.sh"
# Only scripts/test.sh builds the parts for tests; if it has run, its build is used.
if grep -qs '^GYRE_TESTS:[A-Z]*=ON' "$root/build/CMakeCache.txt"; then
    "$root/scripts/build.sh" quick gyre
else
    "$root/scripts/build.sh" train
fi

# Curves are drawn unless the arguments already write metrics elsewhere.
curves=$root/build/run
words=("$@")
case " $* " in
*" --metrics"* | *" --help "* | *" -h "*) curves= ;;
*)
    rm -f "$curves.jsonl"
    words+=(--metrics "$curves.jsonl")
    ;;
esac
# Open MPI wants to be told twice that it may run as root; ranks that outnumber the processors must yield.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
more=()
if [ "$ranks" -gt "$(nproc)" ]; then
    more=(--oversubscribe --mca mpi_yield_when_idle 1)
fi
mpirun --bind-to none "${more[@]}" -np "$ranks" "$root/build/gyre" train "${words[@]}" </dev/null &
job=$!
signalled='' interrupted='' status=0
trap 'signalled=1 interrupted=1; kill -TERM "$job" 2>/dev/null || true' INT TERM HUP
while :; do
    wait "$job" && code=0 || code=$?
    [ "$code" -eq 127 ] || status=$code # 127: already waited for
    [ -n "$signalled" ] || break        # a signal ends the wait, not the job
    signalled=''
done
if [ -n "$interrupted" ]; then
    status=130 # mpirun has a code of its own for a signal
elif [ "$status" -eq 0 ] && [ -n "$curves" ]; then
    if command -v gnuplot >/dev/null; then
        "$root/build/gyre" plot "$curves.jsonl" -o "$curves.svg" || true
    else
        echo "gyre: to draw its curves: apt-get install gnuplot-nox, and build/gyre plot build/run.jsonl -o build/run.svg"
    fi
fi
exit "$status"
