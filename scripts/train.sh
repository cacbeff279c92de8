#!/usr/bin/env bash
# From a clean clone to a trained net: installs what is missing, builds, and trains with two ranks.
#   scripts/train.sh [ARGUMENTS OF gyre train ...]
#   GYRE_RANKS=4 scripts/train.sh --model wide --optimizer adam --epochs 3
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
ranks=${GYRE_RANKS:-2}

"$root/scripts/setup.sh"
log=$root/build/build.log
mkdir -p "$root/build"
# Without a GPU its kernels, which take minutes to compile, are left to scripts/test.sh.
cuda=AUTO
if ! compgen -G "/dev/nvidia[0-9]*" >/dev/null && [ ! -e /dev/dxg ] && [ ! -e /dev/nvhost-gpu ]; then
    cuda=OFF
fi
if ! (cd "$root" && cmake --preset release -DGYRE_CUDA=$cuda && cmake --build --preset release --target gyre) >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "gyre: the build failed; the whole log is in $log" >&2
    exit 1
fi

exec "$root/scripts/launch.sh" -np "$ranks" -- "$root/build/gyre" train "$@"
