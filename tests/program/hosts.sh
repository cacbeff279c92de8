#!/usr/bin/env bash
# Makes several hosts of this machine: network namespaces with a link each into one switch, with
# names of their own. mpirun starts ranks across them as it does across real hosts, over TCP.
#   tests/program/hosts.sh COUNT [COMMAND ...]    makes host1, host2, …, runs COMMAND on host1 (default: a
#                                         shell), and takes them down with everything that runs there
# Within COMMAND, from any host:
#   tests/program/hosts.sh on HOST COMMAND ...    runs COMMAND on HOST
#   tests/program/hosts.sh rate RATE              shapes all links, both directions: 1gbit, 100mbit; or none
#   tests/program/hosts.sh cable HOST out|in      pulls HOST's cable, or puts it back
#   tests/program/hosts.sh bytes HOST             prints what HOST has received and sent so far
# Needs root, or a system that gives every user namespaces. Nothing outlives COMMAND, whatever ends
# it: mounts, names, files in /run and /dev/shm and processes belong to namespaces without a name
# elsewhere. So any number of these may run at once. /tmp and all other files are the machine's.
# Exit codes: COMMAND's; 2: wrong use; 77: hosts cannot be made here, with the reason; 255: there is
# no such host.
set -euo pipefail

self=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")
network=10.77.0

usage() {
    sed -n '2,15s/^# \?//p' "$self" >&2
    exit 2
}

# Runs a command in the namespaces of a host, or of the switch.
on() {
    local host=$1
    shift
    if [ ! -e "/run/netns/$host" ] || [ -z "${GYRE_HOSTS:-}" ]; then
        echo "hosts: there is no $host here" >&2
        exit 255 # as ssh
    fi
    exec nsenter --net="/run/netns/$host" --uts="/run/uts/$host" \
        env TMPDIR="/run/tmp/$host" "$@"
}

# What Open MPI calls in place of ssh: HOST, then the words of a shell command. Like ssh, it leaves
# what it started alone when it is killed itself.
agent() {
    local host=$1
    shift
    on "$host" setsid --wait /bin/bash -c "$*" </dev/null
}

# tbf counts whole GSO packets of up to 64 KiB: a smaller burst would make links several times
# slower than asked for.
rate() {
    local host number
    for host in $GYRE_HOSTS; do
        number=${host#host}
        if [ "$1" = none ]; then
            (on "$host" tc qdisc del dev eth0 root) 2>/dev/null || true
            (on switch tc qdisc del dev "port$number" root) 2>/dev/null || true
        else
            (on "$host" tc qdisc replace dev eth0 root tbf rate "$1" burst 96kb limit 4mb)
            (on switch tc qdisc replace dev "port$number" root tbf rate "$1" burst 96kb limit 4mb)
        fi
    done
}

# The switch's end goes down: eth0 keeps its address and loses its carrier, as from a pulled cable.
cable() {
    local state other answer
    case $2 in
    out) state=down ;;
    in) state=up ;;
    *) usage ;;
    esac
    (on switch ip link set "port${1#host}" "$state")
    if [ "$state" = up ]; then # both ends take a moment to notice
        for other in $GYRE_HOSTS; do
            for _ in {1..100}; do
                answer=$( (on "$1" env LC_ALL=C timeout 1 bash -c "</dev/tcp/$other/1") 2>&1 || true)
                if [[ $answer == *refused* ]]; then # by a host, so it was reached
                    break
                fi
                sleep 0.05
            done
        done
    fi
}

bytes() {
    # shellcheck disable=SC2016 # awk's fields
    on "$1" awk '$1 == "eth0:" { print $2, $10 }' /proc/net/dev
}

# As process 1 of the new namespaces: makes the hosts, runs the command on the first.
inside() {
    local count=$1 host number hosts=()
    shift
    mount -t tmpfs none /run
    mount -t tmpfs none /dev/shm
    mkdir -p /run/netns /run/uts
    touch /run/netns/switch /run/uts/switch
    mount --bind /proc/self/ns/net /run/netns/switch
    unshare --uts=/run/uts/switch hostname switch
    ip link add hub type bridge
    ip link set hub up
    echo 127.0.0.1 localhost >/run/hosts
    for ((number = 1; number <= count; ++number)); do
        host=host$number
        hosts+=("$host")
        mkdir -p "/run/tmp/$host"
        touch "/run/uts/$host"
        unshare --uts="/run/uts/$host" hostname "$host"
        ip netns add "$host"
        ip link add "port$number" type veth peer name eth0 netns "$host"
        ip link set "port$number" master hub
        ip link set "port$number" up
        ip -n "$host" address add "$network.$number/24" dev eth0
        ip -n "$host" link set eth0 up
        ip -n "$host" link set lo up
        echo "$network.$number $host" >>/run/hosts
    done
    mount --bind /run/hosts /etc/hosts
    printf '#!/bin/sh\nexec "%s" agent "$@"\n' "$self" >/run/agent
    chmod +x /run/agent
    export GYRE_HOSTS="${hosts[*]}"
    export OMPI_MCA_mpi_yield_when_idle=1 # the hosts share the processors
    export OMPI_MCA_plm_rsh_agent=/run/agent PRTE_MCA_plm_ssh_agent=/run/agent # Open MPI 4, 5
    if [ $# -eq 0 ]; then
        set -- bash
    fi
    local status=0
    trap 'exit 143' TERM
    (on host1 "$@") || status=$? # this shell stays, to collect orphans
    exit "$status"
}

# Says why hosts cannot be made, if they cannot.
namespaces=(--net --mount --uts --ipc --pid --fork --kill-child --mount-proc)
if [ "$(id -u)" -ne 0 ]; then
    namespaces+=(--user --map-root-user)
fi
try() {
    local tool problem
    for tool in ip tc unshare nsenter setsid setpriv; do
        if ! command -v "$tool" >/dev/null; then
            echo "hosts: skipped: $tool is missing (Debian: iproute2, util-linux)" >&2
            exit 77
        fi
    done
    if ! problem=$(unshare "${namespaces[@]}" sh -euc '
        mount -t tmpfs none /run
        mkdir /run/netns
        ip netns add a
        ip link add port type veth peer name eth0 netns a
        ip link add hub type bridge
        tc qdisc replace dev port root tbf rate 1gbit burst 96kb limit 4mb' 2>&1); then
        echo "hosts: skipped: namespaces are not allowed here: ${problem%%$'\n'*}" >&2
        exit 77
    fi
}

PATH=$PATH:/usr/sbin:/sbin
case ${1:-} in
on | agent)
    if [ $# -lt 3 ]; then
        usage
    fi
    "$@"
    ;;
rate | bytes)
    if [ $# -ne 2 ]; then
        usage
    fi
    "$@"
    ;;
cable)
    if [ $# -ne 3 ]; then
        usage
    fi
    "$@"
    ;;
inside) "$@" ;;
[1-9] | [1-9][0-9])
    try
    # Killing unshare kills the first process in its namespaces, and with it all others.
    setpriv --pdeathsig KILL unshare "${namespaces[@]}" "$self" inside "$@" <&0 &
    child=$!
    trap 'kill -KILL $child; exit 143' TERM
    trap 'kill -KILL $child; exit 130' INT
    trap 'kill -KILL $child; exit 129' HUP
    status=0
    wait "$child" || status=$?
    exit "$status"
    ;;
*) usage ;;
esac
