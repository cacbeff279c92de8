#!/usr/bin/env bash
# gyre installed and moved, as a library of another project, as an archive, and as a wheel.
#   tests/repository/install_test.sh BUILD_DIR
set -euo pipefail
build=$(cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
train=(train --data fashion-mnist --limit 200 --epochs 1 --threads 1 --no-eval -q)

step() { echo "== $*"; }
fail() {
    echo "install: $*" >&2
    exit 1
}
# Runs a command without its output, which is printed if it fails.
quietly() {
    "$@" >"$work/log" 2>&1 || {
        cat "$work/log"
        fail "$1 failed"
    }
}

step "installed, and moved"
quietly cmake --install "$build" --prefix "$work/first"
mv "$work/first" "$work/moved"
(cd / && "$work/moved/bin/gyre" --version && "$work/moved/bin/gyre" "${train[@]}")
for file in share/doc/gyre/{LICENSE,docs/hosts.md} lib/cmake/gyre/gyre-config.cmake share/man/man1/gyre.1 \
    share/{bash-completion/completions/gyre,zsh/site-functions/_gyre,fish/vendor_completions.d/gyre.fish}; do
    [ -s "$work/moved/$file" ] || fail "no $file"
done
if grep -rlFe "$root" -e "$build" -e "$work" "$work/moved"; then
    fail "these files name a folder of this machine"
fi

step "a project that uses the library"
mkdir "$work/project"
cp "$work/moved/share/doc/gyre/examples/two_ranks.cpp" "$work/project"
cat >"$work/project/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.22)
project(mine LANGUAGES CXX)
find_package(gyre 0.9 REQUIRED)
add_executable(two_ranks two_ranks.cpp)
target_link_libraries(two_ranks PRIVATE gyre::train)
END
quietly cmake -S "$work/project" -B "$work/project/build" -DCMAKE_PREFIX_PATH="$work/moved"
quietly cmake --build "$work/project/build"
(cd "$work" && mpirun --oversubscribe --bind-to none -np 2 "$work/project/build/two_ranks" fashion-mnist "$work/saved")
[ -s "$work/saved/best.safetensors" ] || fail "the project's training saved nothing"

step "the archive"
quietly cpack --config "$build/CPackConfig.cmake" -G TGZ -B "$work/packages"
mkdir "$work/archive"
tar -xzf "$work"/packages/gyre-*.tar.gz -C "$work/archive" --strip-components 1
(cd / && "$work/archive/bin/gyre" "${train[@]}")
files=("$work/archive/bin/gyre" "$work"/archive/lib/gyre/*.so*)
module=$work/archive/lib/gyre/libgyre_mpi.so
[[ " ${files[*]} " = *" $module "* ]] || fail "no $module"
# It has what it needs but for the libraries of C and C++. Only the module of MPI needs MPI.
for file in "${files[@]}"; do
    for needed in $(objdump -p "$file" | awk '$1 == "NEEDED" { print $2 }'); do
        case $needed in
        libmpi.*) [ "$file" = "$module" ] || fail "$file needs $needed" ;;
        libstdc++.* | libgcc_s.* | libm.* | libc.* | ld-linux*) ;;
        *)
            found=$(ldd "$([ "$file" = "$module" ] && echo "$file" || echo "${files[0]}")" | awk -v name="$needed" '$1 == name { print $3 }')
            [[ $found = "$work/archive/"* ]] || fail "$file needs $needed, which is not the archive's: $found"
            ;;
        esac
    done
done
# Host code is hardened: it runs at random addresses, its tables of functions are read-only, and it checks the
# stack and the bounds of buffers.
for file in "${files[0]}" "$module"; do
    headers=$(readelf -hdlW "$file")
    for sign in 'Type: +DYN' GNU_RELRO BIND_NOW; do
        grep -qE "$sign" <<<"$headers" || fail "$file is not hardened: no $sign in its headers"
    done
    symbols=$(objdump -T "$file")
    grep -q __stack_chk_fail <<<"$symbols" || fail "$file does not check its stack"
done
symbols=$(objdump -T "${files[0]}")
grep -qE '__(read|memcpy|snprintf)_chk' <<<"$symbols" || fail "${files[0]} does not check the bounds of buffers"
# The versions of symbols that Ubuntu 22.04 has, the oldest system that the archive is for.
for bound in GLIBC_2.35 GLIBCXX_3.4.30; do
    for file in "${files[@]}"; do
        symbols=$(objdump -T "$file") # on its own, so that a failure of it is one of the test
        newest=$(grep -oE "\b${bound%%_*}_[0-9.]+" <<<"$symbols" | sort -uV | tail -n 1 || true)
        [ -n "$newest" ] || [ "$file" != "${files[0]}" ] || fail "$file needs no version of $bound's library"
        [ "$(printf '%s\n' "$newest" "$bound" | sort -V | tail -n 1)" = "$bound" ] ||
            fail "$file needs $newest, which is later than $bound"
    done
    echo "all files do with $bound"
done

step "the wheel"
if ! python3 -m venv "$work/venv" >"$work/log" 2>&1; then
    echo "left out: no python3-venv"
    exit
fi
wheel=$("$root/scripts/wheel.py" "$build" "$work")
quietly "$work/venv/bin/pip" install --no-index "$wheel"
(cd / && "$work/venv/bin/gyre" "${train[@]}" && "$work/venv/bin/python" -m gyre "${train[@]}")
quietly "$work/venv/bin/pip" uninstall -y gyre
if find "$work/venv" -iname '*gyre*' | grep .; then
    fail "pip uninstall leaves these files"
fi
basename "$wheel"
