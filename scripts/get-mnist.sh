#!/usr/bin/env bash
# Downloads MNIST (four .gz files, 11 MB) and checks the published MD5 sums.
# Usage: scripts/get-mnist.sh [DIR]    default DIR: data-cache/mnist in the repository, or if gyre is installed, here
# GYRE_MNIST_MIRRORS: base URLs to use instead of the defaults, separated by spaces; file:// works.
set -euo pipefail

if [ $# -gt 1 ] || [ "${1-}" = -h ] || [ "${1-}" = --help ]; then
    sed -n '2,4s/^# //p' "$0"
    [ $# -le 1 ] && exit 0 || exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -f "$root/CMakeLists.txt" ] || root=$PWD
dir=${1:-$root/data-cache/mnist}
default_mirrors="https://ossci-datasets.s3.amazonaws.com/mnist/ \
https://storage.googleapis.com/cvdf-datasets/mnist/"
read -r -a mirrors <<<"${GYRE_MNIST_MIRRORS:-$default_mirrors}"

files=(
    f68b3c2dcbeaaa9fbdd348bbdeb94873:train-images-idx3-ubyte.gz
    d53e105ee54ea40749a09fcbcd1e9432:train-labels-idx1-ubyte.gz
    9fb629c4189551a2d022fa330f9573f3:t10k-images-idx3-ubyte.gz
    ec29112dd5afa0611ce80d1b7f02629c:t10k-labels-idx1-ubyte.gz
)

# has_sum FILE MD5
has_sum() {
    local found
    found=$(md5sum <"$1") && [ "${found%% *}" = "$2" ]
}

# download URL FILE
download() {
    case $1 in
        file://*) cp -- "${1#file://}" "$2" && chmod u+w -- "$2" ;;
        *)
            if command -v curl >/dev/null; then
                curl -fsSL --connect-timeout 20 --retry 2 -o "$2" -- "$1"
            elif command -v wget >/dev/null; then
                wget -q --connect-timeout=20 --tries=3 -O "$2" -- "$1"
            else
                echo "get-mnist: neither curl nor wget found; install one of them" >&2
                return 1
            fi
            ;;
    esac
}

mkdir -p -- "$dir"
# The temporary file is in $dir, so that the final rename is atomic.
part=$(mktemp "$dir/.get-mnist.XXXXXX")
trap 'rm -f -- "$part"' EXIT

failed=()
for entry in "${files[@]}"; do
    sum=${entry%%:*}
    file=${entry#*:}
    if [ -f "$dir/$file" ] && has_sum "$dir/$file" "$sum"; then
        echo "have $dir/$file"
        continue
    fi
    got=no
    for mirror in "${mirrors[@]}"; do
        url=${mirror%/}/$file
        echo "getting $url"
        if ! download "$url" "$part"; then
            echo "get-mnist: cannot download $url" >&2
        elif ! has_sum "$part" "$sum"; then
            echo "get-mnist: $url has the wrong MD5 sum (expected $sum); deleted" >&2
        else
            chmod 644 -- "$part"
            mv -f -- "$part" "$dir/$file"
            got=yes
            break
        fi
        rm -f -- "$part"
    done
    [ "$got" = yes ] || failed+=("$file")
done

if [ ${#failed[@]} -gt 0 ]; then
    {
        echo "get-mnist: missing or damaged: ${failed[*]}"
        echo "Copy these files into $dir by hand, or give a mirror that has them:"
        printf '  GYRE_MNIST_MIRRORS=https://host/folder/ %q %q\n' "$0" "$dir"
    } >&2
    exit 1
fi
echo "MNIST is complete in $dir"
