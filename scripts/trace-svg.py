#!/usr/bin/env python3
"""Draws one step of a trace written by gyre train --trace as SVG, with the ranks below each other.

    scripts/trace-svg.py TRACE.json OUT.svg [--step N]      N: number of the traced step, from 1; default 2
"""

from __future__ import annotations

import argparse
import html
import json
import sys

WIDTH, LEFT, ROW, GAP, TOP = 980, 120, 26, 14, 40
# The prefix of a span's name, and its class, which is also its text in the legend.
KINDS = (("forward", "forward"), ("backward", "backward"), ("wait for", "waiting"), ("bucket", "collective"),
         ("statistics", "collective"), ("", "gather, loss, update"))  # fmt: skip
COLORS = {"forward": "#5b8ff9", "backward": "#f6903d", "waiting": "#e8684a", "collective": "#5ad8a6",
          "gather, loss, update": "#9aa5b8"}  # fmt: skip
STYLE = """text { font: 12px system-ui, sans-serif; fill: #222 } .in { fill: #111; font-size: 10px } .axis { fill: #666; font-size: 10px }
.lane { fill: #8882 } @media (prefers-color-scheme: dark) { text { fill: #ddd } .in { fill: #111 } .axis { fill: #aaa } }"""


def kind_of(name: str) -> str:
    return next(kind for start, kind in KINDS if name.startswith(start))


def draw(events: list[dict], number: int) -> str:
    spans = [e for e in events if e["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    steps = {rank: [e for e in spans if e["pid"] == rank and e["name"] == "step"] for rank in names}
    if not names or any(len(of_rank) < number for of_rank in steps.values()):
        sys.exit(f"the trace has no step {number}; it has {min(map(len, steps.values()), default=0)}")
    chosen = [of_rank[number - 1] for of_rank in steps.values()]
    begin = min(e["ts"] for e in chosen)
    end = max(e["ts"] + e["dur"] for e in chosen)
    scale = (WIDTH - LEFT - 10) / (end - begin)
    height = TOP + len(names) * (2 * ROW + GAP) + 30
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
           f"<style>{STYLE}</style>"]  # fmt: skip
    x = LEFT
    for kind, color in COLORS.items():
        out.append(f'<rect x="{x}" y="8" width="12" height="12" rx="2" fill="{color}"/><text x="{x + 17}" y="18">{kind}</text>')
        x += 40 + 7 * len(kind)
    for row, rank in enumerate(sorted(names)):
        y = TOP + row * (2 * ROW + GAP)
        labels = []  # over all bars, which may be narrower than the label of the one before
        out.append(f'<text x="0" y="{y + 17}">rank {rank}</text>')
        for track, label in enumerate(("computes", "communicates")):
            at = y + track * ROW
            out.append(f'<text x="{LEFT - 8}" y="{at + 17}" text-anchor="end" class="axis">{label}</text>'
                       f'<rect class="lane" x="{LEFT}" y="{at + 2}" width="{WIDTH - LEFT - 10}" height="{ROW - 4}"/>')
            for e in spans:
                left, right = max(e["ts"], begin), min(e["ts"] + e["dur"], end)
                if e["pid"] != rank or min(e["tid"], 1) != track or e["name"] == "step" or right <= left:
                    continue
                wide = max((right - left) * scale, 0.4)
                name = html.escape(e["name"])
                out.append(f'<g><title>{name}: {e["dur"]:.0f} us</title><rect x="{LEFT + (left - begin) * scale:.1f}" y="{at + 2}" '
                           f'width="{wide:.1f}" height="{ROW - 4}" rx="2" fill="{COLORS[kind_of(e["name"])]}"/>')
                short = name.replace("forward ", "").replace("backward ", "").replace("wait for bucket", "wait")
                if wide > 6.2 * len(short) + 6:
                    labels.append(f'<text class="in" x="{LEFT + (left - begin) * scale + 3:.1f}" y="{at + 17}">{short}</text>')
                out.append("</g>")
        out += labels
    length = end - begin
    unit = next(u for u in (10**k * m for k in range(9) for m in (1, 2, 5)) if length / u <= 12)
    for i in range(int(length / unit) + 1):
        x = LEFT + i * unit * scale
        anchor = "end" if x > WIDTH - 40 else "middle"
        out.append(f'<text class="axis" x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}">{i * unit / 1000:g} ms</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("out")
    parser.add_argument("--step", type=int, default=2)
    args = parser.parse_args()
    try:
        with open(args.trace) as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{args.trace}: no trace that gyre train --trace has written: {error}")
    picture = draw(events, args.step)
    with open(args.out, "w") as file:
        file.write(picture)


if __name__ == "__main__":
    main()
