#!/usr/bin/env bash
# Starts a program as N ranks that find each other through torchrun's environment variables.
#   tests/comm/launch_ranks.sh N PROGRAM [ARGUMENT ...]
# Exits with the code of the lowest rank whose code is not 0.
set -uo pipefail

export WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1
shift
# Chooses a port below the ephemeral ones that nobody listens on.
while :; do
    MASTER_PORT=$((20000 + RANDOM % 10000))
    (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null || break
done
export MASTER_PORT

pids=()
for ((rank = 0; rank < WORLD_SIZE; ++rank)); do
    RANK=$rank "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid"
    rank_code=$?
    code=$((code != 0 ? code : rank_code))
done
exit "$code"
