#!/usr/bin/env bash
# Installs the missing Debian packages that gyre needs.
#   scripts/setup.sh          for building, training and most tests
#   scripts/setup.sh --all    also, if available, a compiler cache, and what some tests would otherwise be
#                             skipped without: Arm's compiler and emulator, clang, what makes packages,
#                             systems and shells to try them in, and from PyPI a disassembler of GPU code and MPICH
# It works as root or with sudo on Debian 12 and later and Ubuntu 24.04; elsewhere it lists what is missing.
set -euo pipefail

packages=(
    g++ cmake ninja-build                                       # build
    openmpi-bin libopenmpi-dev                                  # ranks
    libgloo-dev                                                 # ranks without MPI
    libcli11-dev libfmt-dev nlohmann-json3-dev                  # command line, text, JSON
    zlib1g-dev liblzma-dev                                      # compressed data files
    libssl-dev                                                  # codes of messages between ranks
    libpng-dev libjpeg-dev libwebp-dev                          # folders of pictures
    libboost-context-dev                                        # fibers of the GPU emulator
    catch2 libbenchmark-dev python3                             # tests, benchmarks
    iproute2                                                    # simulated hosts, for tests
    dataset-fashion-mnist                                       # the default data set
)

# Optional packages are installed together with missing ones, but not by themselves.
nice=(gnuplot-nox ccache) # plots of trainings; what was compiled once need not be compiled again

# Runs a command as root; fails if it cannot become root.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    # If sudo asks for a password, it is usable only on a terminal.
    elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        sudo "$@"
    else
        return 1
    fi
}

# Prints those of the packages that are not installed.
missing() {
    local package
    for package in "$@"; do
        # This also succeeds if another package provides this one.
        if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
            echo "$package"
        fi
    done
}

install_packages() {
    echo "gyre: installing $*"
    if ! command -v apt-get >/dev/null || ! as_root true; then
        echo "gyre: these packages are missing and cannot be installed from here: $*" >&2
        return 1
    fi
    if ! {
        as_root apt-get -o Acquire::Retries=1 update -qq &&
            as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
                --no-install-recommends "$@" >/dev/null
    }; then
        echo "gyre: apt-get could not install these packages (see above): $*" >&2
        return 1
    fi
}

mapfile -t needed < <(missing "${packages[@]}")
if [ ${#needed[@]} -gt 0 ]; then
    install_packages "${needed[@]}" "${nice[@]}"
fi
[ "${1-}" = --all ] || exit 0

# Tests that need these are skipped without them, and report that; without ccache builds take longer.
optional=(ccache mmdebstrap dpkg-dev file zsh fish groff-base)
if [ "$(uname -m)" = x86_64 ]; then
    optional+=(qemu-user g++-aarch64-linux-gnu)
fi
# On their own, as older systems lack this version.
clang=(clang-19 clang-tidy-19 libclang-rt-19-dev)
for group in optional clang; do
    declare -n packages_of=$group
    mapfile -t needed < <(missing "${packages_of[@]}")
    if [ ${#needed[@]} -gt 0 ]; then
        install_packages "${needed[@]}" || true
    fi
done
# Installs packages of PyPI into a separate folder, where the tests look for them, unless it has this file. The
# system's Python packages and the source tree are not changed.
from_pypi() {
    local tools=${XDG_CACHE_HOME:-$HOME/.cache}/gyre/$1 file=$2
    ! compgen -G "$tools/$file" >/dev/null || return 0
    if [ -n "$(missing python3-venv)" ]; then
        install_packages python3-venv || true
    fi
    if ! { [ -x "$tools/bin/pip" ] || python3 -m venv "$tools"; } ||
        ! "$tools/bin/pip" install -q --disable-pip-version-check --timeout 20 --retries 1 "${@:3}"; then
        echo "gyre: ${*:3} could not be installed (see above)" >&2
    fi
}
if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then # for tests/kernels/sass_gate.py
    from_pypi cuda-tools 'lib/python3*/site-packages/nvidia/*/bin/nvdisasm' nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump
fi
# For tests/comm/mpi_abi_test.sh.
from_pypi mpich lib/libmpi_abi.so.1 mpich==5.0.2
if [ "$(uname -m)" = x86_64 ]; then
    # Without libfabric, which PyPI lacks and ranks of one host do not need.
    from_pypi intel-mpi lib/libmpi_abi.so.1 --no-deps impi-rt==2021.19.0
fi
