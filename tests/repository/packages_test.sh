#!/usr/bin/env bash
# The packages on bare systems made for the test: the .deb on Debian 12, from the installation by its administrator to a
# net that a user has trained and back to a system without a trace; the archive and the wheel on Debian 12 and 13.
#   tests/repository/packages_test.sh BUILD_DIR
# It needs root, mmdebstrap and a mirror of each system; what it lacks it says, and returns 77 if a system was left out.
set -euo pipefail
build=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
train="train --data fashion-mnist --epochs 2"
status=0

skip() {
    echo "packages: skipped: $*"
    exit 77
}
fail() {
    echo "packages: $*" >&2
    exit 1
}
[ "$(id -u)" -eq 0 ] || skip "it must be root, to make systems of its own"
for tool in mmdebstrap unshare dpkg-shlibdeps; do
    command -v "$tool" >/dev/null || skip "no $tool (scripts/setup.sh --all installs it)"
done
unshare --mount true 2>/dev/null || skip "this machine does not allow mount namespaces"

# make_system SUITE MIRROR COMPONENTS: a bare system in $work/SUITE; fails where the mirror cannot be reached.
make_system() {
    system=$work/$1
    timeout 150 mmdebstrap --variant=apt --include=passwd --skip=cleanup/apt --components="$3" "$1" "$system" "$2" \
        >"$work/log" 2>&1 || {
        tail -n 5 "$work/log" | cut -c -300
        rm -rf --one-file-system "$system"
        echo "packages: $1 is left out, as it could not be made from $2 (see above)"
        status=77
        return 1
    }
    cp /etc/resolv.conf "$system/etc/resolv.conf"
    inside root useradd --create-home user
}
# inside USER COMMAND: runs it in the system, in the user's home.
inside() {
    unshare --mount bash -c '
        mount --bind /proc "$1/proc" && mount --rbind /dev "$1/dev" && mount --rbind /sys "$1/sys" && mount -t tmpfs tmp "$1/tmp" && shift &&
            exec chroot "$@"' - "$system" "$system" su -l "$1" -c "${*:2}"
}
# as_root COMMAND, as_user COMMAND: prints the command and its output.
as_root() {
    echo "# $*"
    inside root "$*"
}
as_user() {
    echo "\$ $*"
    inside user "$*"
}
# install PACKAGE ...: with what they recommend. It fails if apt cannot fetch them.
install() {
    echo "# apt-get install $*"
    timeout 150 unshare --mount chroot "$system" bash -c "cd && DEBIAN_FRONTEND=noninteractive apt-get -q -y install $*" \
        >"$work/log" 2>&1 && return
    code=$?
    cat "$work/log"
    if [ "$code" -eq 124 ] || grep -qE "Failed to fetch|Unable to fetch|Temporary failure|Could not (resolve|connect)" "$work/log"; then
        echo "packages: this system is left out, as packages could not be fetched (see above)"
        status=77
        return 1
    fi
    fail "$1 cannot be installed (see above)"
}
files_of() { (cd "$system" && find . -xdev \( -path ./proc -o -path ./dev -o -path ./tmp \) -prune -o -print | sort); }

for kind in DEB TGZ; do
    cpack --config "$build/CPackConfig.cmake" -G "$kind" -B "$work/packages" >"$work/log" 2>&1 || {
        cat "$work/log"
        fail "cpack -G $kind failed"
    }
done
deb=$(basename "$work"/packages/*.deb)
archive=$(basename "$work"/packages/*.tar.gz)
wheel=$(basename "$("$(dirname "${BASH_SOURCE[0]}")/../../scripts/wheel.py" "$build" "$work/packages")")

# run_wheel NAME
run_wheel() {
    echo "== $1, wheel"
    install python3-venv || return 0
    cp "$work/packages/$wheel" "$system/home/user"
    as_user "python3 -m venv env && env/bin/pip install -q $wheel"
    as_user "env/bin/gyre launch -n 2 -- $train --save wheel"
}

# run_archive NAME: before and after Open MPI is there.
run_archive() {
    echo "== $1, archive"
    local program=${archive%.tar.gz}/bin/gyre
    cp "$work/packages/$archive" "$system/home/user"
    as_user "tar -xzf $archive"
    as_user "$program launch -n 2 -- $train --save run"
    install openmpi-bin || return 0
    as_user "mpirun --oversubscribe -np 2 $program eval --weights run/best.safetensors --data fashion-mnist"
}

debian_12() {
    make_system bookworm http://deb.debian.org/debian main || return 0
    echo "== Debian 12, .deb"
    cp "$work/packages/$deb" "$system/root"
    install "./$deb" || return 0
    as_user "gyre launch -n 2 -- $train --save run"
    as_user "mpirun --oversubscribe -np 2 gyre eval --weights run/best.safetensors --data fashion-mnist"
    as_user "rm -r run"
    files_of >"$work/with"
    as_root "apt-get -qq -y purge gyre >/dev/null"
    files_of >"$work/without"
    # Only the package's own files go, and none stays.
    inside root "dpkg-deb -c $deb" | sed -E 's/.* (\.\/[^ ]*[^ /])\/?$/\1/' | sort >"$work/own"
    if grep -i gyre "$work/without" | grep -v "^./root/$deb\$"; then
        fail "these files stayed"
    fi
    if comm -23 "$work/with" "$work/without" | grep -vxFf "$work/own" | grep -v "^./var/lib/dpkg/info/gyre"; then
        fail "these files of others went"
    fi
    echo "removed without a trace"
    rm -rf --one-file-system "$system"
}

# archive_on NAME SUITE MIRROR COMPONENTS
archive_on() {
    make_system "${@:2}" || return 0
    install dataset-fashion-mnist || return 0
    run_wheel "$1"
    run_archive "$1"
    rm -rf --one-file-system "$system"
}

debian_12
archive_on "Debian 12" bookworm http://deb.debian.org/debian main
archive_on "Debian 13" trixie http://deb.debian.org/debian main
exit "$status"
