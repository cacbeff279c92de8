#!/usr/bin/env bash
# gyre across several hosts, made of this machine by hosts.sh, with the launcher for real hosts.
#   tests/hosts_test.sh BUILD_DIR [FIRST LAST | losses | rest]    default: all checks
# Exit codes: 0; 1: a check failed; 2: wrong use; 77: hosts cannot be made here, with the reason.
set -uo pipefail

tests=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
hosts=$tests/hosts.sh
launch=$tests/../scripts/launch.sh
if [ $# -lt 1 ] || [ ! -x "$1/gyre" ] || [ ! -x "$1/bench-allreduce" ]; then
    echo "hosts_test: needs a folder with gyre and bench-allreduce" >&2
    exit 2
fi
build=$(cd "$1" && pwd)
if [ -z "${GYRE_HOSTS:-}" ]; then
    exec "$hosts" 4 "$tests/hosts_test.sh" "$build" "${@:2}"
fi
first=1 last=99 wanted=''
case ${2:-} in
losses | rest) wanted=$2 ;;
?*) first=$2 last=${3:-99} ;;
esac

# On host1 of four hosts from here on. /run is this world's own.
out=/run/out
mkdir -p "$out"
checks=0 ran=0 failures=0 failed=''

fail() {
    failed="${failed:+$failed; }$1"
}

# check NAME SECONDS FUNCTION [ARGUMENT ...]: the function calls fail() where something is wrong.
check() {
    local name=$1 bound=$2 start=$EPOCHREALTIME seconds
    shift 2
    checks=$((checks + 1))
    if [ "$checks" -lt "$first" ] || [ "$checks" -gt "$last" ] ||
        [ "${wanted:-$part}" != "$part" ]; then
        return
    fi
    ran=$((ran + 1))
    failed='' measured=''
    : >"$out/log"
    "$@"
    nothing_left
    seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    if awk -v s="$seconds" -v b="$bound" 'BEGIN { exit !(s > b) }'; then
        fail "took longer than $bound s"
    fi
    if [ -z "$failed" ]; then
        echo "ok $checks - $name ($seconds s${measured:+; $measured})"
    else
        echo "not ok $checks - $name ($seconds s${measured:+; $measured}): $failed"
        tail -n 40 "$out/log" | sed 's/^/    # /'
        failures=$((failures + 1))
    fi
}

# Processes of jobs, on any host.
job_processes() {
    local pid name
    for pid in /proc/[0-9]*; do
        if read -r name 2>/dev/null <"$pid/comm"; then
            case $name in
            mpirun | prterun | orted | prted | gyre | bench-allreduce) echo "${pid#/proc/} $name" ;;
            esac
        fi
    done
}
# None may be there more than so many seconds (3) after the job's end.
nothing_left() {
    local left deadline=$((SECONDS + ${1:-3}))
    while left=$(job_processes) && [ -n "$left" ] && [ "$SECONDS" -le "$deadline" ]; do
        sleep 0.1
    done
    if [ -n "$left" ]; then
        fail "left behind: ${left//$'\n'/, }"
        # shellcheck disable=SC2086 # one word for each
        kill -KILL ${left//[!0-9$'\n']/} 2>/dev/null
    fi
}

kill_gyre_on() {
    local pid name
    for pid in $(ip netns pids "$1"); do
        if read -r name 2>/dev/null <"/proc/$pid/comm" && [ "$name" = gyre ]; then
            kill -KILL "$pid"
            return
        fi
    done
    fail "gyre does not run on $1"
}

# first_hosts COUNT [RANKS]: the list for --host.
first_hosts() {
    local list='' number
    for ((number = 1; number <= $1; ++number)); do
        list+=,host$number:${2:-1}
    done
    echo "${list#,}"
}

# The number of steps in a log.
steps_in() {
    awk '/"event":"step"/ { ++steps } END { print steps + 0 }' "$1" 2>/dev/null || echo 0
}
# Waits until there are more than $2.
wait_for_steps() {
    for _ in {1..150}; do
        if [ "$(steps_in "$1")" -gt "$2" ]; then
            return
        fi
        sleep 0.1
    done
    fail "training did not go on"
}

# The seconds since $1, a value of EPOCHREALTIME.
since() {
    awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }'
}

require_status() {
    if [ "$1" != "$2" ]; then
        fail "exit code $1 instead of $2"
    fi
}
require_text() {
    if ! grep -qE "$1" "$out/log"; then
        fail "no \"$1\" in the output"
    fi
}

require_same_losses() {
    local difference
    difference=$(awk -F'"loss":' '
        /"event":"step"/ { if (FNR == NR) one[++n] = $2 + 0
                           else { d = ($2 - one[++m]) / one[m]; d = d < 0 ? -d : d; if (d > worst) worst = d } }
        END { print (m == n && n > 0) ? worst + 0 : "other steps" }' "$1" "$2")
    measured="largest relative difference of losses $difference"
    if ! awk -v d="$difference" 'BEGIN { exit !(d ~ /^[0-9]/ && d + 0 <= 8 / 2^23) }'; then
        fail "the losses differ"
    fi
}

training=("$build/gyre" train --data fashion-mnist --threads 1)
# Such a net's losses are the same for any order of its sums, but for their last bits.
fifty_steps=("${training[@]}" --model "$tests/smooth.model" --limit 3000 --global-batch 60
    --epochs 1 --no-eval --lr 0.01 --log-interval 1)
parameters=21840

one_host() {
    timeout -k 2 60 "${fifty_steps[@]}" --json "$out/1.jsonl" >>"$out/log" 2>&1
    require_status $? 0
    if [ "$(steps_in "$out/1.jsonl")" -ne 50 ]; then
        fail "these are not 50 steps"
    fi
}

# same_losses HOSTS RANKS_OF_EACH
same_losses() {
    local number before=() after=() least=$((50 * parameters * 4))
    for ((number = 1; number <= $1; ++number)); do
        before+=("$("$hosts" bytes "host$number")")
    done
    timeout -k 2 60 "$launch" --host "$(first_hosts "$1" "$2")" -- \
        "${fifty_steps[@]}" --json "$out/$1.jsonl" >>"$out/log" 2>&1
    require_status $? 0
    for ((number = 1; number <= $1; ++number)); do
        after=("$("$hosts" bytes "host$number")")
        # The gradients at least once each way (2 (n-1)/n times on a ring).
        if ! awk -v a="${before[number - 1]}" -v b="${after[0]}" -v least="$least" 'BEGIN {
            split(a, from); split(b, to)
            exit !(to[1] - from[1] > least && to[2] - from[2] > least) }'; then
            fail "host$number sent or received less than its gradients: ${before[number - 1]} to ${after[0]}"
        fi
    done
    require_same_losses "$out/1.jsonl" "$out/$1.jsonl"
}

# A reduction of 32 MiB over links of 1 Gbit/s takes what a ring takes, 2 (n-1)/n S/B, within 25 %.
# The hosts share their processors with whatever else runs here: so the ranks are real-time
# processes where that is allowed, and may try five times.
urgent=()
if chrt --rr 1 true 2>/dev/null; then
    urgent=(chrt --rr 1)
fi
ring() {
    local ranks=$1 bytes=$((32 << 20)) seconds attempt
    for attempt in 1 2 3 4 5; do
        timeout -k 2 20 "${urgent[@]}" "$launch" --host "$(first_hosts "$ranks")" -- \
            "$build/bench-allreduce" -b 32M -e 32M -n 3 -w 1 --no-peer >"$out/log" 2>&1
        require_status $? 0
        seconds=$(awk -v s=$bytes '$1 == s { print $5 / 1e6 }' "$out/log")
        measured=$(awk -v n="$ranks" -v s=$bytes -v t="${seconds:-0}" -v a=$attempt 'BEGIN {
            ring = 2 * (n - 1) / n * s * 8 / 1e9
            printf "attempt %d: %.3f s, formula %.3f s, ratio %.2f", a, t, ring, t / ring }')
        if awk -v r="${measured##* }" 'BEGIN { exit !(r >= 0.75 && r <= 1.25) }'; then
            return
        fi
    done
    fail "not within 25 %"
}

patience=60 # of gyre's own watchdog

# Starts a training over several hosts that only a failure or a signal ends, and waits until it runs.
start_training() {
    rm -f "$out/run.jsonl"
    "$launch" "$@" -- "${training[@]}" --epochs 1000 --no-eval --log-interval 10 \
        --timeout "$patience" --json "$out/run.jsonl" >>"$out/log" 2>&1 &
    job=$!
    wait_for_steps "$out/run.jsonl" 5
}
# Waits at most so long for its end.
end_training() {
    local deadline=$((SECONDS + $1)) status=0
    while kill -0 "$job" 2>/dev/null; do
        if [ "$SECONDS" -gt "$deadline" ]; then
            fail "the launcher has not ended after $1 s"
            kill -KILL "$job"
            break
        fi
        sleep 0.1
    done
    wait "$job" || status=$?
    require_status "$status" "$2"
} 2>/dev/null # bash's own word on what was killed

kill_rank() {
    local start
    start_training --host "$(first_hosts 3)"
    start=$EPOCHREALTIME
    kill_gyre_on host2
    end_training 10 137
    measured="ended $(since "$start") s after it"
    require_text "rank 1 .*on node host2 exited on signal 9"
}

# pull_cable TEXT [HOST]: with the rank on HOST killed at once, the job ends itself before mpirun has
# noticed: mpirun then would wait for the lost host for minutes.
pull_cable() {
    local start
    patience=12 # longer than the launcher's
    start_training --host "$(first_hosts 3)" --grace 8
    patience=60
    start=$EPOCHREALTIME
    "$hosts" cable host3 out
    if [ $# -gt 1 ]; then
        kill_gyre_on "$2"
    fi
    end_training 20 4
    measured="ended $(since "$start") s after it"
    require_text "$1"
    nothing_left 15 # on the lost host too, by itself
    measured+=", the lost host by $(since "$start") s"
    "$hosts" cable host3 in
}

short_outage() {
    local steps
    start_training --host "$(first_hosts 3)"
    "$hosts" cable host2 out
    sleep 5
    steps=$(steps_in "$out/run.jsonl")
    "$hosts" cable host2 in
    wait_for_steps "$out/run.jsonl" $((steps + 5))
    kill -TERM "$job"
    end_training 10 130
    if ! grep -q '"event":"end".*"interrupted":true' "$out/run.jsonl"; then
        fail "no clean end in the log of steps"
    fi
}

kill_launcher() {
    start_training --host "$(first_hosts 2)"
    kill -KILL "$job"
    end_training 1 137
    nothing_left 8
}

unknown_host() {
    timeout -k 2 20 "$launch" --host host1:1,host9:1 -- "$build/gyre" info >>"$out/log" 2>&1
    require_status $? 4
    require_text host9
}

# README's commands, without scripts/launch.sh.
bare_mpirun() {
    timeout -k 2 60 mpirun --allow-run-as-root --host host1:2,host2:2 --map-by slot --bind-to none \
        --mca btl_tcp_if_include eth0 "${fifty_steps[@]}" --json "$out/bare.jsonl" \
        >>"$out/log" 2>&1
    require_status $? 0
    require_same_losses "$out/1.jsonl" "$out/bare.jsonl"
}
# gloo STATUS [ARGUMENT ...]: rank 0 on host1, and rank 1 on host2 before it.
gloo() {
    local wanted=$1 method=(--init-method tcp://host1:22225 --world-size 2) peer status=0
    shift
    timeout -k 2 60 "$hosts" on host2 "$@" "${method[@]}" --rank 1 >>"$out/log.1" 2>&1 &
    peer=$!
    timeout -k 2 60 "$@" "${method[@]}" --rank 0 >>"$out/log" 2>&1
    require_status $? "$wanted"
    wait "$peer" || status=$?
    require_status "$status" "$wanted"
}
without_mpi() {
    gloo 0 "${fifty_steps[@]}" --json "$out/gloo.jsonl"
    require_same_losses "$out/1.jsonl" "$out/gloo.jsonl"
}
without_mpi_or_cable() {
    local start
    rm -f "$out/run.jsonl"
    (
        gloo 4 "${training[@]}" --epochs 1000 --no-eval --log-interval 10 --timeout 6 \
            --json "$out/run.jsonl"
        [ -z "$failed" ]
    ) &
    job=$!
    wait_for_steps "$out/run.jsonl" 5
    start=$EPOCHREALTIME
    "$hosts" cable host2 out
    if ! wait "$job"; then
        fail "an exit code is not 4"
    fi
    measured="ended $(since "$start") s after it"
    require_text "not arrived|late|no answer|host2"
    "$hosts" cable host2 in
}

# These hosts themselves: killed in the worst way, they leave nothing behind.
kill_hosts() {
    local made
    "$hosts" 2 sleep 1000 >>"$out/log" 2>&1 &
    made=$!
    for _ in {1..50}; do
        if grep -qsx sleep /proc/[0-9]*/comm && grep -qsz '^1000$' /proc/[0-9]*/cmdline; then
            break
        fi
        sleep 0.1
    done
    kill -KILL "$made"
    wait "$made" 2>/dev/null
    sleep 0.5
    if grep -qsz '^1000$' /proc/[0-9]*/cmdline; then
        fail "processes left"
    fi
}

part=losses
check "one host: 50 steps" 65 one_host
check "2 hosts: data crosses the wire, the losses are one host's" 65 same_losses 2 1
check "2 hosts of 2 ranks: the same" 65 same_losses 2 2
check "3 hosts: the same" 65 same_losses 3 1
check "4 hosts: the same" 65 same_losses 4 1
check "bare mpirun on 2 hosts of 2 ranks: the same" 65 bare_mpirun
if "$build/gyre" info | grep -q "^Gloo .*compiled in"; then
    check "2 hosts without MPI, over Gloo: the same" 65 without_mpi
    part=rest
    check "without MPI, a pulled cable ends both ranks" 40 without_mpi_or_cable
fi
part=rest
"$hosts" rate 1gbit
exec {lock}<"$tests/hosts_test.sh"
flock "$lock" # two runs at once would disturb each other's timings
check "2 hosts, 1 Gbit/s: a reduction takes a ring's time" 60 ring 2
check "3 hosts, 1 Gbit/s: the same" 60 ring 3
check "4 hosts, 1 Gbit/s: the same" 60 ring 4
flock --unlock "$lock"
"$hosts" rate none
check "a killed rank ends the job, and is named" 30 kill_rank
check "a pulled cable ends the job, and the host is named" 45 \
    pull_cable "Remote daemon: .* on node host3"
check "a pulled cable and a failed rank end the job" 45 pull_cable "killing it" host1
check "a link that is gone for 5 s does not end the job; SIGTERM does" 40 short_outage
check "a killed launcher takes its job along" 30 kill_launcher
check "a host that cannot be reached is named" 20 unknown_host
check "killed hosts leave nothing behind" 10 kill_hosts

echo "$((ran - failures)) of $ran checks passed"
[ "$failures" -eq 0 ]
