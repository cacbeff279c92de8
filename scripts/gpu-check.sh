#!/usr/bin/env bash
# Checks gyre on this machine's GPU, and measures it, in less than 8 minutes; --help says more.
#   scripts/gpu-check.sh [--data NAME|DIR] [BUILD_DIR] [ARCHIVE]     default: build, gpu-check-DATE.tar.gz
exec python3 "$(dirname "${BASH_SOURCE[0]}")/gpu_check" "$@"
