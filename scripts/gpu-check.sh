#!/usr/bin/env bash
# Checks gyre on this machine's GPU, and measures it, in less than 8 minutes.
#   scripts/gpu-check.sh [--data NAME|DIR] [BUILD_DIR] [OUT_DIR]
#                                                 default: build, gpu-check-DATE
# BUILD_DIR is taken as it is where it has a gyre, or else built. It may come from another machine:
# shared libraries that are missing here go to BUILD_DIR/lib; cuDNN, cuBLAS and NCCL are also found
# in the packages of python3. Each step has a log in OUT_DIR, and its own time limit.
#   --data: default: mnist, or else fashion-mnist, in $GYRE_DATA, data-cache, /usr/share/datasets, …
#   GYRE_GPU_CHECK_DEVICE=emulated: tries this script without a GPU, on very little data
# Exit codes: 0; 1: a step failed; 2: wrong use, or the build failed; 77: no GPU here.
set -u

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
device=${GYRE_GPU_CHECK_DEVICE:-cuda}
data=
words=()
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        sed -n '2,11s/^# \?//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --data)
        if [ $# -lt 2 ]; then
            echo "gpu-check: --data needs a name or a folder" >&2
            exit 2
        fi
        data=$2
        shift
        ;;
    -*)
        echo "gpu-check: unknown flag $1 (see --help)" >&2
        exit 2
        ;;
    *) words+=("$1") ;;
    esac
    shift
done
if [ ${#words[@]} -gt 2 ] || { [ "$device" != cuda ] && [ "$device" != emulated ]; }; then
    echo "gpu-check: at most BUILD_DIR and OUT_DIR; GYRE_GPU_CHECK_DEVICE is cuda or emulated" >&2
    exit 2
fi
build=${words[0]:-$root/build}
out=${words[1]:-gpu-check-$(date +%Y%m%d-%H%M%S)}

if [ "$device" = cuda ] && ! timeout 20 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    echo "gpu-check: no GPU on $(uname -n): nvidia-smi is missing or lists none; nothing was checked" >&2
    exit 77
fi
if ! mkdir -p "$out"; then
    echo "gpu-check: $out cannot be written" >&2
    exit 2
fi
out=$(cd "$out" && pwd)

if [ ! -x "$build/gyre" ]; then
    echo "building in $build (log: $out/build.log)"
    architecture=90
    if [ "$device" = cuda ] && cmake --version | grep -Eq ' (3\.(2[4-9]|[3-9][0-9])|[4-9])'; then
        architecture=native
    fi
    if ! (cd "$root" && cmake --preset release -B "$build" \
        -DCMAKE_CUDA_ARCHITECTURES=$architecture && cmake --build "$build") >"$out/build.log" 2>&1; then
        tail -n 20 "$out/build.log" >&2
        echo "gpu-check: the build failed; the whole log is in $out/build.log" >&2
        exit 2
    fi
fi
build=$(cd "$build" && pwd)

# ---- where libraries and data are

libraries=$build/lib
if command -v python3 >/dev/null; then
    found=$(python3 -c 'import glob, sys
print(":".join(d for p in sys.path if p for d in sorted(glob.glob(p + "/nvidia/*/lib"))))' 2>/dev/null)
    libraries=$libraries${found:+:$found}
fi
libraries=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
# Only gyre's programs get these libraries: python3 and the system's tools have their own.
for program in gyre unit_tests bench-kernels; do
    # shellcheck disable=SC2016  # $@ is the wrapper's
    printf '#!/usr/bin/env bash\nLD_LIBRARY_PATH=%q exec %q "$@"\n' "$libraries" "$build/$program" >"$tools/$program"
    chmod +x "$tools/$program"
done
gyre=$tools/gyre

has_images() { compgen -G "$1/train-images*" >/dev/null; }
find_data() {
    local wanted folder name
    if [ -n "$data" ] && has_images "$data"; then
        (cd "$data" && pwd)
        return
    fi
    local -a places=()
    IFS=: read -r -a places <<<"${GYRE_DATA:-}"
    places+=("$root/data-cache" "$HOME/.cache/gyre" /usr/local/share/datasets /usr/share/datasets)
    if [ -z "$data" ]; then
        for folder in "${places[@]}"; do
            if has_images "$folder"; then
                echo "$folder"
                return
            fi
        done
    fi
    for wanted in ${data:-mnist fashion-mnist}; do
        for folder in "${places[@]}"; do
            name=$folder/$wanted
            if has_images "$name"; then
                echo "$name"
                return
            fi
        done
    done
}
data=$(find_data)

# ---- steps: start NAME SECONDS, then go COMMAND... (its output goes to the log), then a verdict

results=()
failures=0
name='' log='' step_end=0 step_start=0 code=0
# Together at most 8 minutes; the emulator, on a busy machine, may take longer.
start() {
    local seconds=$2
    if [ "$device" = emulated ]; then
        seconds=$((3 * seconds))
    fi
    name=$1 log=$out/$1.log step_start=$SECONDS step_end=$((SECONDS + seconds))
    : >"$log"
    echo "== $name (at most $seconds s)"
}
go() {
    local left=$((step_end - SECONDS)) code=0
    {
        printf '\n$'
        printf ' %q' "$@"
        printf '\n'
    } >>"$log"
    if [ $left -le 0 ]; then
        code=124
    else
        timeout -k 3 "$left" "$@" >>"$log" 2>&1 </dev/null || code=$?
    fi
    echo "exit code $code" >>"$log"
    return $code
}
verdict() { # PASS|FAIL|SKIPPED TEXT
    if [ "$1" = FAIL ]; then
        failures=$((failures + 1))
    fi
    results+=("$(printf '%-7s  %-14s %4d s  %s' "$1" "$name" $((SECONDS - step_start)) "$2")")
    echo "   $1: $2"
}
failed() { # EXIT_CODE WHAT
    if [ "$1" -eq 124 ] || [ "$1" -eq 137 ]; then
        verdict FAIL "$2: ran out of time (see $log)"
    else
        verdict FAIL "$2: exit code $1 (see $log)"
    fi
}
has() {
    if [ -x "$build/$1" ]; then
        return 0
    fi
    verdict SKIPPED "$build has no $1"
    return 1
}
has_data() {
    if [ -n "$data" ]; then
        return 0
    fi
    verdict SKIPPED "no data set: give --data, or run scripts/get-mnist.sh"
    return 1
}

# json LOG KEY: the last value of this key in a file of JSON lines.
json() { grep -o "\"$2\":[^,}]*" "$1" 2>/dev/null | tail -n 1 | cut -d: -f2; }
# losses FILE: the losses of the steps, as they were written.
losses() { grep '"event":"step"' "$1" 2>/dev/null | grep -o '"loss":[^,}]*' | cut -d: -f2; }
# differences A B [MOST]: number of steps, and the largest relative difference; fails above 1e-4.
differences() {
    paste <(losses "$1") <(losses "$2") | awk -v allowed="${3:-1e-4}" '
        NF != 2 { bad = 1 }
        { d = $1 - $2; if (d < 0) d = -d; if ($1 > 1) d /= $1; if (!(d <= most)) most = d }
        END { printf "%d steps, %.1e", NR, most; exit bad || NR == 0 || !(most <= allowed) }'
}

# What is done; the emulator gets little of it, and has no libraries: ours stands in for cuDNN's.
library=cudnn
train=(--device cuda)
epochs=3 fifty=(--limit 3200) repeated=(--limit 6400) kernels=(--check)
torch=(--batch-sizes 64 --steps 100)
if [ "$device" = emulated ]; then
    library=ours
    train=(--device emulated)
    epochs=1 fifty=(--limit 320) repeated=(--limit 64)
    kernels=(--check --device=emulated --batches=2 --benchmark_filter=net)
    torch=(--device cpu --gyre-device emulated --kernels ours --case net --limit 8 --batch-sizes 4
        --steps 2 --warmup 1 --repeats 1 --epochs 2)
fi

start device 10
if [ "$device" = cuda ]; then
    go nvidia-smi
fi
code=0
go "$gyre" info || code=$?
if [ $code -eq 0 ]; then
    gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    verdict PASS "${gpu:-no GPU, device $device}; data ${data:-none}"
else
    failed $code "gyre info"
fi

start unit 70
if has unit_tests; then
    code=0
    go "$tools/unit_tests" || code=$?
    if [ $code -ne 0 ]; then
        failed $code "unit tests"
    elif [ "$device" = cuda ] && grep -q "skipped: the backends on a GPU" "$log"; then
        verdict FAIL "the tests on the GPU were skipped: the program saw none"
    else
        verdict PASS "$(grep -E 'assertions|All tests' "$log" | tail -n 1)"
    fi
fi

# Small trainings with gyre's own kernels: both nets, an uneven last batch, odd extents, TF32.
printf '%s\n' 'conv 6 k3 s2 p1' relu 'conv 10 k5 s2 p2' 'maxpool 2' relu 'dropout 0.3' \
    'linear 33' relu 'linear classes' >"$tools/odd.txt"
sanitizer=$(command -v compute-sanitizer || compgen -G '/usr/local/cuda*/bin/compute-sanitizer' |
    head -n 1)
sanitize() { # TOOL
    local tool=$1 code=0 runs=0 flags
    for flags in "--model net --limit 160" "--model net --limit 64 --tf32" \
        "--model $tools/odd.txt --limit 70 --batch-size 35 --optimizer adam" \
        "--model wide --limit 24 --batch-size 12 --optimizer adam"; do
        # shellcheck disable=SC2086  # the flags are several words
        go env LD_LIBRARY_PATH="$libraries" "$sanitizer" --tool "$tool" --error-exitcode 99 \
            "$build/gyre" train "${train[@]}" --kernels ours --data "$data" \
            --epochs 1 --no-eval $flags || code=$?
        if grep -q "Device not supported" "$log"; then
            verdict SKIPPED "compute-sanitizer does not support this device"
            return
        fi
        if [ $code -ne 0 ]; then
            failed $code "$tool on gyre train $flags"
            return
        fi
        runs=$((runs + 1))
    done
    verdict PASS "$runs trainings, $(grep -c 'ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards' "$log") reports without errors"
}
can_sanitize() {
    if [ "$device" != cuda ]; then
        verdict SKIPPED "the device is emulated"
    elif [ -z "$sanitizer" ]; then
        verdict SKIPPED "compute-sanitizer is not on this machine"
    else
        return 0
    fi
    return 1
}
for step in memcheck:40 racecheck:40 initcheck:25; do
    start "${step%:*}" "${step#*:}"
    if can_sanitize && has_data; then
        sanitize "${step%:*}"
    fi
done
start memcheck-unit 20
if can_sanitize && has unit_tests; then
    code=0
    go env LD_LIBRARY_PATH="$libraries" "$sanitizer" --tool memcheck --error-exitcode 99 \
        "$build/unit_tests" \
        "cross entropy: loss*,gather picks*,optimisers follow*,dropout draws*" || code=$?
    if [ $code -eq 0 ]; then
        verdict PASS "$(grep -E 'assertions|All tests' "$log" | tail -n 1)"
    elif grep -q "Device not supported" "$log"; then
        verdict SKIPPED "compute-sanitizer does not support this device"
    else
        failed $code "unit tests under memcheck"
    fi
fi

start kernels 90
if has bench-kernels; then
    code=0
    go "$tools/bench-kernels" "${kernels[@]}" --benchmark_out="$out/kernels.json" || code=$?
    missed=$(grep -c '^MISSED:' "$log")
    timed=$(grep -c '/manual_time .* us ' "$log")
    if [ $code -eq 0 ]; then
        verdict PASS "$timed timings, all results right, goals missed: $missed"
    elif [ $code -eq 3 ]; then
        verdict FAIL "$timed timings, all results right, goals missed: $missed (grep MISSED $log)"
    elif grep -q WRONG "$log"; then
        verdict FAIL "$(grep -c 'ERROR OCCURRED' "$log") wrong results (grep WRONG $log)"
    else
        failed $code "bench-kernels"
    fi
fi

start accuracy 40
if has_data; then
    code=0 small=()
    if [ "$device" = emulated ]; then
        small=(--limit 256)
    fi
    for kind in cpu ours library; do
        case $kind in
        cpu) flags=(--device cpu) ;;
        ours) flags=("${train[@]}" --kernels ours) ;;
        *) flags=("${train[@]}" --kernels "$library") ;;
        esac
        go "$gyre" train --data "$data" --epochs $epochs "${flags[@]}" ${small[@]+"${small[@]}"} \
            --log-interval 1000000 --json "$out/accuracy-$kind.jsonl" || code=$?
    done
    if [ $code -ne 0 ]; then
        failed $code "training"
    else
        text=$(for kind in cpu ours library; do
            printf '%s %s %s\n' $kind "$(json "$out/accuracy-$kind.jsonl" test_accuracy)" \
                "$(json "$out/accuracy-$kind.jsonl" images_per_second)"
        done | awk '
            { p[NR] = 100 * $2; text = text sprintf("%s %.2f %% (%.0f images/s)  ", $1, p[NR], $3) }
            END { for (i in p) { d = p[i] - p[1]; if (d < 0) d = -d; if (d > 0.3) bad = 1 }
                  printf "%s", text; exit bad || NR != 3 }')
        # shellcheck disable=SC2181  # the pipe's last command, inside
        if [ $? -eq 0 ]; then
            verdict PASS "$text"
        else
            verdict FAIL "more than 0.3 points apart: $text"
        fi
    fi
fi

start losses 20
if has_data; then
    code=0
    common=(train --data "$data" --epochs 1 --no-eval --log-interval 1 "${fifty[@]}")
    go "$gyre" "${common[@]}" --device cpu --json "$out/losses-cpu.jsonl" || code=$?
    go "$gyre" "${common[@]}" "${train[@]}" --kernels ours --json "$out/losses-ours.jsonl" || code=$?
    go "$gyre" "${common[@]}" "${train[@]}" --kernels "$library" \
        --json "$out/losses-library.jsonl" || code=$?
    if [ $code -ne 0 ]; then
        failed $code "training"
    else
        worst=PASS
        ours=$(differences "$out/losses-cpu.jsonl" "$out/losses-ours.jsonl") || worst=FAIL
        theirs=$(differences "$out/losses-cpu.jsonl" "$out/losses-library.jsonl") || worst=FAIL
        verdict $worst "against the CPU: ours $ours, library $theirs (at most 1e-4)"
    fi
fi

start repeat 15
if has_data; then
    code=0 equal=0
    for kind in ours library; do
        flags=(--kernels ours)
        if [ $kind = library ] && [ $library = cudnn ]; then
            flags=(--kernels cudnn --deterministic)
        fi
        for i in 1 2; do
            go "$gyre" train --data "$data" --epochs 1 --log-interval 1 "${repeated[@]}" \
                "${train[@]}" "${flags[@]}" --json "$tools/$kind-$i.jsonl" \
                --save "$tools/$kind-$i.safetensors" || code=$?
        done
        losses "$tools/$kind-1.jsonl" >"$tools/$kind-1.txt"
        losses "$tools/$kind-2.jsonl" >"$tools/$kind-2.txt"
        if [ -s "$tools/$kind-1.txt" ] && cmp "$tools/$kind-1.txt" "$tools/$kind-2.txt" >>"$log" 2>&1 &&
            cmp "$tools/$kind-1.safetensors" "$tools/$kind-2.safetensors" >>"$log" 2>&1; then
            equal=$((equal + 1))
        fi
    done
    if [ $code -ne 0 ]; then
        failed $code "training"
    elif [ $equal -eq 2 ]; then
        verdict PASS "2 of 2 pairs of runs equal bit by bit: losses and weights, ours and library"
    else
        verdict FAIL "$equal of 2 pairs of runs (ours, library) equal bit by bit"
    fi
fi

start graph 15
if has_data; then
    code=0 equal=0 pairs=0
    for flags in "" "--optimizer adam --max-grad-norm 5" "--kernels $library --momentum 0.9"; do
        pairs=$((pairs + 1))
        for graph in on off; do
            # shellcheck disable=SC2086  # the flags are several words
            go "$gyre" train --data "$data" --epochs 2 --no-eval --log-interval 1 "${repeated[@]}" \
                --batch-size 24 "${train[@]}" $flags --graph $graph \
                --json "$out/graph-$graph-$pairs.jsonl" || code=$?
            losses "$out/graph-$graph-$pairs.jsonl" >"$tools/graph-$graph.txt"
        done
        if grep -q "without a CUDA graph" "$log"; then
            code=1
        fi
        if [ -s "$tools/graph-on.txt" ] &&
            cmp "$tools/graph-on.txt" "$tools/graph-off.txt" >>"$log" 2>&1; then
            equal=$((equal + 1))
        fi
    done
    if [ $code -ne 0 ]; then
        failed $code "training with and without a graph"
    elif [ $equal -eq $pairs ]; then
        verdict PASS "losses equal bit by bit, $equal of $pairs; images/s with $(json \
            "$out/graph-on-1.jsonl" images_per_second), without $(json "$out/graph-off-1.jsonl" images_per_second)"
    else
        verdict FAIL "losses equal bit by bit: $equal of $pairs"
    fi
fi

# Ranks that share the GPU, as NCCL allows where each claims to be a host of its own.
start nccl 45
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} NCCL_IB_DISABLE=1
nccl_gyre=$gyre limit=1280
if [ "$device" = emulated ]; then # the tests' stand-in
    nccl_gyre=$build/gyre_for_fake_nccl limit=160
    export GYRE_NCCL_LIBRARY=$build/tests/libfake_nccl.so
fi
ranks="$root/tests/launch_ranks.sh"
# stop_rank SIGNAL: the survivor of two ranks must end with exit code 4, in time, and name rank 1.
stop_rank() {
    local begin=$SECONDS code=0 port=$((20000 + RANDOM % 10000)) peer survivor
    local job=("$nccl_gyre" train --data "$data" --epochs 1000000 --no-eval "${train[@]}" --comm nccl
        --share-gpu --timeout 6 --limit "$limit" --log-interval 1 --init-method "tcp://127.0.0.1:$port"
        --world-size 2)
    rm -f "$tools/running.jsonl"
    "${job[@]}" --rank 1 >>"$log" 2>&1 &
    peer=$!
    disown "$peer" # so that bash has no word on its end
    timeout -k 3 40 "${job[@]}" --rank 0 --json "$tools/running.jsonl" >"$tools/survivor" 2>&1 &
    survivor=$!
    while [ $((SECONDS - begin)) -lt 20 ] && [ "$(losses "$tools/running.jsonl" | wc -l)" -lt 12 ]; do
        sleep 0.1
    done
    kill "-$1" "$peer"
    wait "$survivor" || code=$?
    kill -KILL "$peer" 2>/dev/null
    cat "$tools/survivor" >>"$log"
    echo "after SIG$1 to rank 1: exit code $code" >>"$log"
    [ $code -eq 4 ] && grep -q 'rank 1 on ' "$tools/survivor"
}
if ! has_data; then
    :
elif [ ! -x "$nccl_gyre" ] || ! "$nccl_gyre" info | grep -q '^Gloo .*compiled in'; then
    verdict SKIPPED "ranks are started over Gloo here, which this build lacks"
else
    code=0 worst=PASS text=''
    go "$nccl_gyre" info
    for count in 2 4; do
        common=(train --data "$data" --epochs 1 --no-eval --log-interval 1 --limit "$limit"
            --global-batch 32 "${train[@]}" --share-gpu)
        go "$ranks" $count "$nccl_gyre" "${common[@]}" --comm gloo \
            --json "$out/nccl-$count-gloo.jsonl" || code=$?
        for graph in off on; do
            go "$ranks" $count "$nccl_gyre" "${common[@]}" --comm nccl --graph $graph \
                --json "$out/nccl-$count-$graph.jsonl" || code=$?
        done
        losses "$out/nccl-$count-on.jsonl" >"$tools/on.txt"
        losses "$out/nccl-$count-off.jsonl" >"$tools/off.txt"
        cmp "$tools/on.txt" "$tools/off.txt" >>"$log" 2>&1 || worst=FAIL
        text+="$count ranks: $(differences "$out/nccl-$count-gloo.jsonl" \
            "$out/nccl-$count-off.jsonl" 1e-5) from Gloo's; " || worst=FAIL
    done
    stop_rank KILL || worst=FAIL
    stop_rank STOP || worst=FAIL
    if [ $code -ne 0 ]; then
        failed $code "training over NCCL"
    else
        verdict $worst "${text}graph and eager equal bit by bit; a killed and a stopped rank are named (see $log)"
    fi
fi

start torch 50
check='import torch'
if [ "$device" = cuda ]; then
    check='import sys, torch; sys.exit(not torch.cuda.is_available())'
fi
if ! has_data; then
    :
elif ! go python3 -c "$check"; then
    verdict SKIPPED "python3 has no torch that sees the device"
elif ! compgen -G "$data/train-images-idx3-ubyte.gz" >/dev/null; then
    verdict SKIPPED "the comparison reads .gz files only, and $data has none"
else
    code=0
    go python3 "$root/bench/peers/torch_eager.py" --compare --gyre "$gyre" --python python3 \
        --data "$data" --json "$out/torch.json" "${torch[@]}" || code=$?
    if [ $code -eq 0 ]; then
        grep -A 20 '^case ' "$log" | grep -v '^exit code'
        verdict PASS "gyre / torch in images/s: $(grep -o '"ratio": [0-9.]*' "$out/torch.json" |
            awk '{ printf "%.2f ", $2 }')(table in $log)"
    else
        failed $code "torch_eager.py"
    fi
fi

{
    echo
    echo "gyre on $device, $(uname -n), $(date -u +%Y-%m-%dT%H:%MZ), $SECONDS s"
    printf '%s\n' "${results[@]}"
    echo "failed steps: $failures; logs in $out"
} | tee "$out/summary.txt"
[ "$failures" -eq 0 ]
