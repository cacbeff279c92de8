#!/usr/bin/env bash
# Packs a build into one file for a check on a GPU machine that lacks gyre's packages: the programs,
# without debugging symbols, and their shared libraries. scripts/gpu-check.sh takes it as BUILD_DIR.
#   scripts/pack.sh [BUILD_DIR] [FILE.tar.xz]     default: build, build/gyre-pack.tar.xz
# The file must stay small (20 MiB): configure only for that kind of GPU, for example with
#   cmake --preset release -DCMAKE_CUDA_ARCHITECTURES=90-real
set -euo pipefail

if [ $# -gt 2 ] || [ "${1-}" = -h ] || [ "${1-}" = --help ]; then
    sed -n '2,6s/^# //p' "$0"
    [ $# -le 2 ] && exit 0 || exit 2
fi
build=${1:-$(dirname "${BASH_SOURCE[0]}")/../build}
out=${2:-$build/gyre-pack.tar.xz}
programs=(gyre unit_tests bench-kernels bench-allreduce)
most_kib=${GYRE_PACK_MOST_KIB:-20480}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/lib" "$folder/kernels" "$folder/comm"
for program in "${programs[@]}" comm/libgyre_mpi.so comm/libgyre_mpi_abi.so; do
    if [ ! -x "$build/$program" ]; then
        echo "pack: $build/$program is missing; build it first" >&2
        exit 1
    fi
    # Symbol names stay, because bench-kernels identifies its kernels by them.
    strip --strip-debug -o "$folder/$program" "$build/$program"
    # The C library and the compiler's libraries belong to the machine.
    ldd "$build/$program" | awk '$2 == "=>" && $3 ~ "^/" { print $3 }' |
        grep -v -E '/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so' |
        xargs -r cp -L -n -t "$folder/lib"
done
# ptxas' reports of the kernels are for bench-kernels' estimates.
find "$build/kernels" -path '*gyre_cuda_kernels.dir*' -name '*.resources' 2>/dev/null |
    xargs -r cp -t "$folder/kernels"
[ ! -f "$build/kernels/loops.txt" ] || cp "$build/kernels/loops.txt" "$folder/kernels"
# All programs contain the same kernels, which a dictionary as large as two programs finds again.
XZ_OPT=--lzma2=preset=1,dict=256MiB tar -C "$folder" -cJf "$out" .
kib=$(du -sk --apparent-size "$out" | cut -f1)
if [ "$kib" -gt "$most_kib" ]; then
    find "$folder" -type f -printf '%10k KiB  %P\n' | sort -rn | head -n 8 >&2
    echo "pack: $out has $kib KiB, more than $most_kib; build for one kind of GPU" \
        "(-DCMAKE_CUDA_ARCHITECTURES=90-real)" >&2
    exit 1
fi
echo "packed $kib KiB: scripts/gpu-check.sh $out ARCHIVE"
