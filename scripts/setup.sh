#!/usr/bin/env bash
# Installs the Debian packages that gyre is built, run and tested with, as far as they are missing.
# Works as root or with sudo on Debian 12 and later and Ubuntu 24.04; elsewhere it names what is missing.
set -euo pipefail

packages=(
    g++ cmake ninja-build                                       # build
    openmpi-bin libopenmpi-dev                                  # ranks
    libgloo-dev                                                 # ranks without MPI
    libcli11-dev libfmt-dev nlohmann-json3-dev                  # command line, text, JSON
    zlib1g-dev liblzma-dev                                      # compressed data files
    libpng-dev libjpeg-dev                                      # folders of pictures
    libboost-context-dev                                        # fibers of the GPU emulator
    catch2 libbenchmark-dev python3                             # tests, benchmarks
    iproute2                                                    # hosts made of this machine, for tests
    dataset-fashion-mnist                                       # the default data set
)

# What only makes something nicer is installed along with the rest, and not asked for by itself.
nice=(gnuplot-nox) # pictures of trainings

missing=()
for package in "${packages[@]}"; do
    # Also true where another package provides this one under its own name.
    if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
        missing+=("$package")
    fi
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
missing+=("${nice[@]}")

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo)
    # A sudo that would ask for a password is of use only where somebody can answer.
    if ! command -v sudo >/dev/null || { ! sudo -n true 2>/dev/null && [ ! -t 0 ]; }; then
        as_root=(false)
    fi
fi
if ! command -v apt-get >/dev/null || [ "${as_root[*]}" = false ]; then
    echo "gyre: these packages are missing and cannot be installed from here: ${missing[*]}" >&2
    exit 1
fi
echo "gyre: installing ${missing[*]}"
if ! {
    "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends "${missing[@]}" >/dev/null
}; then
    echo "gyre: apt-get could not install these packages (see above): ${missing[*]}" >&2
    exit 1
fi
