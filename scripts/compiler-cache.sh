#!/usr/bin/env bash
# Runs a compiler through ccache, so that a clone in another folder finds what this one has compiled.
# CMakeLists.txt puts this in front of the compilers where ccache is installed.
CCACHE_BASEDIR=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd -P) CCACHE_NOHASHDIR=1 exec ccache "$@"
