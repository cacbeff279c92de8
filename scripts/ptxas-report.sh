#!/usr/bin/env bash
# Runs a compiler command of nvcc and keeps what ptxas says of each kernel's registers, stack and
# spills beside the object, in OBJECT.resources, for tests/resources.cmake. The build calls it.
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
