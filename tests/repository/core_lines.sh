#!/usr/bin/env bash
# Prints how many lines the core has, and fails if they are more than core_lines.txt allows: growth is a
# decision, made by changing that number in the same commit. Tests and examples do not count.
#   tests/repository/core_lines.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
budget=$(grep -E '^[0-9]+$' "$here/core_lines.txt")
total=0
for folder in base kernels comm model data train; do
    lines=$(find "$folder" \( -name tests -o -name example -o -name examples \) -prune -o -type f \
        \( -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' \) -exec cat {} + | wc -l)
    [ "$lines" -gt 0 ] || { echo "core lines: no sources in $folder/" >&2; exit 1; }
    printf '%-8s %6d\n' "$folder" "$lines"
    total=$((total + lines))
done
echo "core     $total of $budget lines"
if [ "$total" -gt "$budget" ]; then
    echo "core lines: over the budget: make the change smaller, or raise the number in $here/core_lines.txt and say why" >&2
    exit 1
fi
