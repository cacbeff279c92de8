#!/usr/bin/env bash
# Copies what a build needs to run on a machine without gyre's packages into a folder: the programs,
# without debugging symbols, and their shared libraries in DIR/lib. scripts/gpu-check.sh takes it.
#   scripts/pack.sh [BUILD_DIR] [DIR]             default: build, build/pack
set -euo pipefail

if [ $# -gt 2 ] || [ "${1-}" = -h ] || [ "${1-}" = --help ]; then
    sed -n '2,4s/^# //p' "$0"
    [ $# -le 2 ] && exit 0 || exit 2
fi
build=${1:-$(dirname "${BASH_SOURCE[0]}")/../build}
out=${2:-$build/pack}
programs=(gyre unit_tests emulation_tests bench-kernels)

mkdir -p "$out/lib"
for program in "${programs[@]}"; do
    if [ ! -x "$build/$program" ]; then
        echo "pack: $build/$program is missing: build it first" >&2
        exit 1
    fi
    strip -o "$out/$program" "$build/$program"
    # The C library and the compiler's belong to the machine.
    ldd "$build/$program" | awk '$2 == "=>" && $3 ~ "^/" { print $3 }' |
        grep -v -E '/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so' |
        xargs -r cp -L -t "$out/lib"
done
if ! grep -q '^GYRE_MARCH:STRING=portable' "$build/CMakeCache.txt"; then
    echo "pack: built for this machine's processor; another kind needs the preset portable" >&2
fi
echo "packed $(du -sh "$out" | cut -f1) in $out: scripts/gpu-check.sh $out OUT_DIR"
