#!/usr/bin/env bash
# Checks and measures gyre on this machine's GPU in less than 10 minutes; see --help.
#   scripts/gpu-check.sh [--data NAME|DIR] [BUILD_DIR] [ARCHIVE]     default: build, gpu-check-DATE.tar.gz
exec python3 "$(dirname "${BASH_SOURCE[0]}")/gpu_check" "$@"
