#!/usr/bin/env bash
# Runs an nvcc command and keeps ptxas' report of each kernel's registers, stack and spills next to the
# object, in OBJECT.resources, for tests/kernels/resources.cmake. The build calls this script.
set -uo pipefail

object=
previous=
for argument in "$@"; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done

messages=$("$@" 2>&1)
status=$?
grep -v -e '^ptxas info' -e '^    [0-9]* bytes stack frame' <<<"$messages" | grep . >&2
if [ $status -eq 0 ] && [ -n "$object" ]; then
    grep -e '^ptxas info' -e '^    [0-9]* bytes stack frame' <<<"$messages" >"$object.resources"
fi
exit $status
