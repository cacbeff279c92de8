#!/usr/bin/env bash
# mpirun with the settings gyre needs, on this host and across hosts, and with an end in bounded time.
# Works as root too.
#   scripts/launch.sh -np 4 build/gyre train ...
#   scripts/launch.sh --host a:2,b:2 [OPTION ...] [--] build/gyre train ...
#     --host HOST[:RANKS],…    where to run, and how many ranks there (default: here; 1 each)
#     --hostfile FILE          the same from a file of Open MPI's
#     -np RANKS                how many ranks in all (default: as many as the hosts have); on this host
#                              alone there may be more than processors
#     --interface NAME|NET     the network to use, such as eth0 or 10.0.0.0/8; any: all there are
#                              (default: the one that leads to the other hosts, if that is clear)
#     --grace SECONDS          for all ranks to end, once one here has ended or Ctrl-C was pressed
#                              (default 20); then mpirun is killed, which other hosts notice
#     --show                   prints what would be run, and ends
#     --mca, -x, --bind-to, --map-by, --wdir, --rankfile    as mpirun has them
# All hosts need the same files under the same paths. Exported variables GYRE_… reach all ranks. Any
# setting below may be overridden: by --mca, or by its variable in the environment.
# Exit codes: the first failing rank's (128 + signal if one killed it); 2: wrong use; 4: a host could
# not be reached or was lost, or the job had to be killed; 130: stopped by Ctrl-C or SIGTERM.
set -euo pipefail

self=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")
complain() {
    echo "launch: $1 (see --help)" >&2
    exit 2
}

# Runs mpirun, or Open MPI's daemon on another host, and sees to its end; then sets `status`,
# `interrupted` and `killed`. It, its ranks on this host and its connections to others are one
# session, which can be killed as a whole: where a host has vanished, both can wait for minutes.
leader='' status=0 interrupted='' killed='' stopping_since=''
# shellcheck disable=SC2317 # called by a trap
stop() {
    interrupted=1
    stopping_since=${stopping_since:-$SECONDS}
    kill -TERM "$leader" 2>/dev/null || true
}
kill_session() {
    local stat line fields processes=()
    for stat in /proc/[0-9]*/stat; do
        if read -r line 2>/dev/null <"$stat"; then
            read -r -a fields <<<"${line##*) }"
            if [ "${fields[3]}" = "$leader" ]; then
                processes+=("${line%% *}")
            fi
        fi
    done
    if [ ${#processes[@]} -gt 0 ]; then
        kill -KILL "${processes[@]}" 2>/dev/null || true
    fi
}
# Whether a rank on this host has ended, or, once the start is over, a connection to another host:
# the rest of the job should then end too.
declare -A watched=()
part_has_ended() {
    local list pid children=() environment
    for list in "/proc/$leader/task/"*/children; do
        read -r -a children <"$list" || true # there is no end of line
        for pid in "${children[@]}"; do
            if [ -z "${watched[$pid]:-}" ] && mapfile -d '' environment <"/proc/$pid/environ"; then
                if [ $((SECONDS - started)) -gt 30 ] ||
                    [[ " ${environment[*]}" == *" OMPI_COMM_WORLD_RANK="* ]]; then
                    watched[$pid]=1
                fi
            fi
        done
    done
    for pid in "${!watched[@]}"; do
        # That of a zombie is empty.
        if ! mapfile -d '' environment <"/proc/$pid/environ" || [ ${#environment[@]} -eq 0 ]; then
            return 0
        fi
    done
    return 1
}
supervise() {
    local name=$1 started=$SECONDS
    if setpriv --pdeathsig TERM true 2>/dev/null; then # even if this script is killed
        set -- setpriv --pdeathsig TERM "$@"
    fi
    setsid "$@" </dev/null &
    leader=$!
    trap stop INT TERM HUP
    while kill -0 "$leader" 2>/dev/null; do
        sleep 0.2 &
        wait $! || true
        if [ -z "$stopping_since" ] && part_has_ended 2>/dev/null; then
            stopping_since=$SECONDS
        fi
        if [ -n "$stopping_since" ] && [ $((SECONDS - stopping_since)) -ge "$grace" ]; then
            echo "launch: on $(uname -n), $name has not ended $grace s after it should; killing it" >&2
            killed=1
            kill_session
            break
        fi
    done
    wait "$leader" || status=$?
    kill_session
}

# On other hosts: SECONDS DAEMON ARGUMENTS ...
if [ "${1:-}" = --guard ]; then
    grace=$2
    supervise "${@:3}"
    exit "$status"
fi

hosts=() ranks='' allocated=${SLURM_JOB_ID:-} interface='' grace=20 show=
command=(mpirun)
own_binding='' own_mapping=''
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        sed -n '2,21s/^# \?//p' "$self"
        exit 0
        ;;
    --show)
        show=1
        shift
        continue
        ;;
    --)
        shift
        break
        ;;
    -*) ;;
    *) break ;;
    esac
    words=2
    case $1 in
    --mca) words=3 ;;
    esac
    if [ $# -lt "$words" ]; then
        complain "$1 needs a value"
    fi
    case $1 in
    --host | -H)
        IFS=, read -r -a hosts <<<"$2"
        command+=(--host "$2")
        ;;
    --interface) interface=$2 ;;
    --grace) grace=$2 ;;
    --bind-to)
        own_binding=1
        command+=("$1" "$2")
        ;;
    --map-by | --rankfile)
        own_mapping=1
        command+=("$1" "$2")
        ;;
    -np | -n)
        ranks=$2
        command+=(-np "$2")
        ;;
    --hostfile)
        allocated=1
        command+=("$1" "$2")
        ;;
    --mca | -x | --wdir) command+=("${@:1:words}") ;;
    *) complain "unknown option $1" ;;
    esac
    shift "$words"
done
if [ $# -eq 0 ]; then
    complain "nothing to run"
fi
if ! [[ ${ranks:=1} =~ ^[1-9][0-9]*$ ]]; then
    complain "-np $ranks is no number of ranks"
fi
if ! [[ $grace =~ ^[0-9]+$ ]]; then
    complain "--grace $grace is no number of seconds"
fi
if ! command -v mpirun >/dev/null; then
    echo "launch: there is no mpirun here (Debian: openmpi-bin)" >&2
    exit 4
fi

# Sets a parameter of the ranks, or of the launcher too, which Open MPI 5 has under another name.
settings=()
set_default() {
    if [ -z "${!1+set}" ]; then
        export "$1=$2"
        settings+=("$1=$2")
    fi
}
set_ranks() {
    set_default "OMPI_MCA_$1" "$2"
}
set_launcher() {
    set_default "OMPI_MCA_$1" "$2"
    set_default "PRTE_MCA_$1" "$2"
}

# A host that is gone is noticed after 4 + 3 * 2 s, instead of 8 minutes; a shorter outage is none.
set_launcher oob_tcp_keepalive_time 4
set_launcher oob_tcp_keepalive_intvl 2
set_launcher oob_tcp_keepalive_probes 3
# The same care on the other hosts as on this one.
if [[ $self != *[[:space:]]* ]]; then
    set_default OMPI_MCA_orte_launch_agent "$self --guard $grace orted"
fi
# odls_base_sigkill_timeout stays at 1 s: with 0, Ctrl-C would leave no time for a clean stop.
# Nobody is there to type a password.
if command -v ssh >/dev/null; then
    set_default OMPI_MCA_plm_rsh_agent "ssh -o BatchMode=yes -o ConnectTimeout=10"
    set_default PRTE_MCA_plm_ssh_agent "ssh -o BatchMode=yes -o ConnectTimeout=10"
fi

# The network that leads to all other hosts, as ADDRESS/BITS, which holds on all of them.
find_network() {
    local host address route device source net found=''
    for host in "${hosts[@]}"; do
        host=${host%%:*}
        address=$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }') || return 0
        route=$(ip -o -4 route get "$address" 2>/dev/null) || return 0
        [[ $route =~ \ dev\ ([^ ]+) ]] || return 0
        device=${BASH_REMATCH[1]}
        if [ "$device" = lo ]; then # this host
            continue
        fi
        [[ $route != *" via "* && $route =~ \ src\ ([^ ]+) ]] || return 0
        source=${BASH_REMATCH[1]}
        net=$(ip -o -4 address show dev "$device" | awk -v a="$source/" 'index($4, a) == 1 { print $4 }')
        if [ -z "$net" ] || [[ $net == */32 ]] || [ "${found:-$net}" != "$net" ]; then
            return 0
        fi
        found=$net
    done
    echo "$found"
}
if [ -z "$interface" ] && [ ${#hosts[@]} -gt 1 ] && command -v ip >/dev/null; then
    interface=$(find_network)
fi
if [ -n "$interface" ] && [ "$interface" != any ]; then
    set_ranks btl_tcp_if_include "$interface"
    set_launcher oob_tcp_if_include "$interface"
fi

# Ranks wait by polling: with more of them than processors, they must let others go first. The other
# hosts are taken to be like this one.
slots_of_one=1
declare -A slots=()
for host in "${hosts[@]}"; do
    name=${host%%:*} number=1
    if [[ $host =~ :([0-9]+)$ ]]; then
        number=${BASH_REMATCH[1]}
    fi
    slots[$name]=$((${slots[$name]:-0} + number))
    slots_of_one=$((slots[$name] > slots_of_one ? slots[$name] : slots_of_one))
done
if [ ${#hosts[@]} -eq 0 ] && [ -z "$allocated" ] && [ "$ranks" -gt "$(nproc)" ]; then
    slots_of_one=$ranks
    command+=(--oversubscribe)
fi
if [ "$slots_of_one" -gt "$(nproc)" ]; then
    set_ranks mpi_yield_when_idle 1
fi

if [ -z "$own_mapping" ]; then
    command+=(--map-by slot) # ranks of a host stay together: neighbours in the ring
fi
if [ -z "$own_binding" ]; then
    command+=(--bind-to none) # a rank has more threads than one
fi
for name in $(compgen -e GYRE_ || true); do
    command+=(-x "$name")
done
command+=("$@")

if [ "$(id -u)" -eq 0 ]; then # Open MPI wants to be told twice
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
if [ -n "$show" ]; then
    printf '%q ' env "${settings[@]}" "${command[@]}"
    echo
    exit 0
fi

supervise "${command[@]}"
if [ -n "$interrupted" ]; then
    exit 130
elif [ -n "$killed" ] || [ "$status" -gt 192 ]; then # mpirun's own codes
    exit 4
fi
exit "$status"
