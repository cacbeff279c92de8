#!/usr/bin/env bash
# Installs missing packages, builds, and runs tests.
#   scripts/test.sh                  the quick tests: ten minutes in total on two cores without a GPU
#   scripts/test.sh --ci             what CI runs: also with the sanitizers, the checker of kernels, other
#                                    processors, and the kernels compiled for the newest GPU
#   scripts/test.sh --all            the same with the kernels compiled and run for all GPUs
#   scripts/test.sh PRESET ...       the tests of these presets: quick, ci, release, debug, asan, tsan, odr, clang
#   scripts/test.sh --only REGEX [PRESET ...]
#                                    the tests whose names match, after building only what they need
# It goes on to the next preset if tests fail, and ends with a table of times and what failed.
set -euo pipefail
cd "$(dirname "$0")/.."
only=''
case ${1-} in
--ci) presets=(ci asan tsan odr clang) ;;
--all) presets=(release asan tsan odr clang) ;;
--only)
    only=${2:?scripts/test.sh --only needs a regular expression for names of tests}
    presets=("${@:3}")
    [ ${#presets[@]} -gt 0 ] || presets=(quick)
    ;;
-*)
    sed -n '2,12s/^# \?//p' "$0"
    [ "$1" = --help ] || [ "$1" = -h ]
    exit
    ;;
*) presets=("${@:-quick}") ;;
esac
case ${1-} in
--ci | --all) scripts/setup.sh --all ;;
*) scripts/setup.sh ;;
esac

if [[ ${1-} = --ci || ${1-} = --all ]] && ! command -v clang++-19 >/dev/null; then
    echo "clang: not run, as there is no clang++-19 (Debian 12: clang-19 clang-tidy-19 libclang-rt-19-dev)"
    unset 'presets[-1]'
fi
places=$((3 * $(nproc))) # tests/CMakeLists.txt says how many of them a test takes
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
export CCACHE_STATSLOG=$results/ccache
status=0
if [[ ${1-} = --ci || ${1-} = --all ]]; then # what needs no build fails soonest
    for preset in "${presets[@]}"; do
        cmake --preset "$preset" >/dev/null
    done
    ctest --preset "${presets[0]}" -L '^source$'
fi
for preset in "${presets[@]}"; do
    tests=(--preset "$preset" ${only:+-R "$only"})
    started=$SECONDS
    if [ -n "$only" ]; then
        cmake --preset "$preset" >/dev/null
        mapfile -t targets < <(scripts/test_report.py targets "${tests[@]}")
    fi
    if [ -z "$only" ] || [ ${#targets[@]} -gt 0 ]; then
        if ! scripts/build.sh "$preset" ${only:+"${targets[@]}"}; then
            echo "$preset $((SECONDS - started)) 0 -" >>"$results/presets"
            status=1
            break
        fi
    fi
    built=$SECONDS
    run=(ctest "${tests[@]}" --parallel "$places" --no-tests=error --output-junit "$results/$preset.xml")
    # g++ 12's ThreadSanitizer cannot place its memory if the system randomises addresses widely.
    if [ "$preset" = tsan ] && setarch -R true 2>/dev/null; then
        run=(setarch -R "${run[@]}")
    fi
    echo "$preset: running up to $places tests at a time"
    "${run[@]}" || status=1
    echo "$preset $((built - started)) $((SECONDS - built)) $results/$preset.xml" >>"$results/presets"
done
scripts/test_report.py summary "$results/presets" "$CCACHE_STATSLOG" || status=1
exit "$status"
