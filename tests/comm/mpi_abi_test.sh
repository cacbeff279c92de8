#!/usr/bin/env bash
# Ranks of MPICH 5 and of Intel MPI, over the standard binary interface of MPI 5.0, train to the same bytes as ranks of
# Open MPI: a sum of two terms has one order. Both come from PyPI (scripts/setup.sh --all); one of them will do.
#   tests/comm/mpi_abi_test.sh BUILD_DIR
set -euo pipefail
gyre=$(cd "$1" && pwd)/gyre
unset GYRE_MPI_LIBRARY
cache=${XDG_CACHE_HOME:-$HOME/.cache}/gyre
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

train=("$gyre" train --data fashion-mnist --limit 512 --batch-size 64 --epochs 1 --threads 1 --no-eval -q)
options=("" "--comm-dtype bf16" "--shard-optimizer on --optimizer adam" "--factors on --model wide")

# The trainings over the library of the folder $1, whose version begins with $2, against those over Open MPI.
compare() {
    local library=$1/lib/libmpi_abi.so.1 number code=0
    GYRE_MPI_LIBRARY=$library "$gyre" info >"$work/info"
    grep -E "^MPI +$2.* \($library\)" "$work/info" || fail "gyre info does not name $library: $(cat "$work/info")"
    for number in "${!options[@]}"; do
        read -ra more <<<"${options[number]}"
        GYRE_MPI_LIBRARY=$library "$1/bin/mpiexec" -n 2 "${train[@]}" "${more[@]}" --overwrite --save "$work/other"
        tensors "$work/other/last.safetensors" >"$work/tensors"
        cmp "$work/tensors" "$work/open$number" || fail "weights differ over $library with '${options[number]}'"
    done
    # A rank that ends takes the job with it, in bounded time.
    GYRE_MPI_LIBRARY=$library timeout 120 "$1/bin/mpiexec" -n 2 sh -c \
        '[ "$PMI_RANK" = 0 ] || set -- "$@" --limit 100; exec "$@"' sh "${train[@]}" >"$work/differ" 2>&1 || code=$?
    [ "$code" -ne 0 ] && [ "$code" -ne 124 ] || fail "ranks that differ ended with $code: $(cat "$work/differ")"
    grep -q -- '--limit' "$work/differ" || fail "ranks that differ do not say in what: $(cat "$work/differ")"
}

found=()
for folder in mpich intel-mpi; do
    [ ! -x "$cache/$folder/bin/mpiexec" ] || [ ! -e "$cache/$folder/lib/libmpi_abi.so.1" ] || found+=("$folder")
done
if [ ${#found[@]} -eq 0 ]; then
    echo "skipped: neither MPICH nor Intel MPI is in $cache (scripts/setup.sh --all installs them from PyPI)"
    exit 77
fi
for number in "${!options[@]}"; do
    read -ra more <<<"${options[number]}"
    mpirun --oversubscribe --bind-to none -np 2 "${train[@]}" "${more[@]}" --save "$work/open"
    tensors "$work/open/last.safetensors" >"$work/open$number"
    rm -r "$work/open"
done
for folder in "${found[@]}"; do
    case $folder in
    mpich) compare "$cache/mpich" 'MPICH Version: +5' ;;
    intel-mpi) compare "$cache/intel-mpi" 'Intel\(R\) MPI Library' ;;
    esac
done
echo "the same bytes over ${found[*]} and Open MPI in ${#options[@]} trainings each"
