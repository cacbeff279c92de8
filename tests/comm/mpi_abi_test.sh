#!/usr/bin/env bash
# Ranks of MPICH 5, over the standard binary interface of MPI 5.0, train to the same bytes as ranks of Open MPI: a sum
# of two terms has one order. MPICH comes from PyPI (scripts/setup.sh --all).
#   tests/comm/mpi_abi_test.sh BUILD_DIR
set -euo pipefail
gyre=$(cd "$1" && pwd)/gyre
mpich=${XDG_CACHE_HOME:-$HOME/.cache}/gyre/mpich
export GYRE_MPI_LIBRARY=$mpich/lib/libmpi_abi.so.1
if [ ! -x "$mpich/bin/mpiexec" ] || [ ! -e "$GYRE_MPI_LIBRARY" ]; then
    echo "skipped: there is no MPICH in $mpich (scripts/setup.sh --all installs it from PyPI)"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "mpi-abi: $*" >&2
    exit 1
}

# A file's tensors: what follows its header, which names the communicator.
tensors() {
    python3 -c 'import sys
file = open(sys.argv[1], "rb").read()
data = file[8 + int.from_bytes(file[:8], "little"):]
assert len(data) > 1000
sys.stdout.buffer.write(data)' "$1"
}

"$gyre" info >"$work/info"
grep -E '^MPI +MPICH Version: +5.* \('"$GYRE_MPI_LIBRARY"'\)' "$work/info" || fail "gyre info does not name MPICH: $(cat "$work/info")"

train=("$gyre" train --data fashion-mnist --limit 512 --batch-size 64 --epochs 1 --threads 1 --no-eval -q)
number=0
for flags in "" "--comm-dtype bf16" "--shard-optimizer on --optimizer adam" "--factors on --model wide"; do
    number=$((number + 1))
    read -ra more <<<"$flags"
    "$mpich/bin/mpiexec" -n 2 "${train[@]}" "${more[@]}" --save "$work/mpich$number"
    env -u GYRE_MPI_LIBRARY mpirun --oversubscribe --bind-to none -np 2 "${train[@]}" "${more[@]}" --save "$work/open$number"
    for library in mpich open; do
        tensors "$work/$library$number/last.safetensors" >"$work/$library"
    done
    cmp "$work/mpich" "$work/open" || fail "weights differ with flags '$flags'"
done

# A rank that ends takes the job with it, in bounded time.
code=0
timeout 120 "$mpich/bin/mpiexec" -n 2 sh -c '[ "$PMI_RANK" = 0 ] || set -- "$@" --limit 100; exec "$@"' sh "${train[@]}" \
    >"$work/differ" 2>&1 || code=$?
[ "$code" -ne 0 ] && [ "$code" -ne 124 ] || fail "ranks that differ ended with $code: $(cat "$work/differ")"
grep -q -- '--limit' "$work/differ" || fail "ranks that differ do not say in what: $(cat "$work/differ")"
echo "the same bytes over MPICH and Open MPI in $number trainings"
