#!/usr/bin/env python3
"""The real tensorboard package reads what `gyre train --tensorboard` writes: the numbers of --metrics.

    tests/program/tensorboard_test.py BUILD       the folder with gyre; PYTHON=… a Python with tensorboard, if not this one

Exit code 77 where there is no Python with tensorboard.
"""

from __future__ import annotations

import json
import pathlib
import struct
import subprocess
import sys
import tempfile

from python_with import require_modules


def main() -> int:
    require_modules("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    gyre = pathlib.Path(sys.argv[1]).resolve() / "gyre"
    with tempfile.TemporaryDirectory(prefix="gyre-tensorboard-") as folder:
        runs, lines = f"{folder}/runs", f"{folder}/run.jsonl"
        subprocess.run([gyre, "train", "--data", "fashion-mnist", "--limit", "640", "--epochs", "2", "--log-interval", "4",
                        "--metrics", lines, "--tensorboard", runs, "-q"], check=True, timeout=100)  # fmt: skip
        expected: dict[str, list[tuple[int, float]]] = {}
        step = 0
        for event in map(json.loads, open(lines)):
            if event["event"] not in ("step", "epoch"):
                continue
            step = event.get("step", step)
            for key in ("loss", "train_loss", "train_accuracy", "test_loss", "test_accuracy"):
                if key in event:
                    value = struct.unpack("f", struct.pack("f", event[key]))[0]  # as scalars are kept
                    expected.setdefault(f"{event['event']}/{key}", []).append((step, value))
        by_images = {}
        for images in ("", "train", "test"):
            by_images[images] = EventAccumulator(f"{runs}/{images}")
            by_images[images].Reload()
        events = by_images[""]
        text = events.Tensors("settings")[0].tensor_proto.string_val[0].decode()
        text_good = "| limit | 640 |" in text and "| seed |" not in text
        print(f"{'ok    ' if text_good else 'FAILED'} settings: {text!r}")
        failed = not text_good or sum(len(of_tag) for of_tag in expected.values()) < 10
        for tag, numbers in expected.items():
            kind, name = tag.split("/")
            images, figure = name.split("_") if "_" in name else ("", name)
            found = [(scalar.step, scalar.value) for scalar in by_images[images].Scalars(f"{kind}/{figure}")]
            good = [value for _, value in found] == [value for _, value in numbers]
            good = good and all(a[0] == b[0] for a, b in zip(found, numbers) if tag.startswith("step/"))
            failed |= not good
            print(f"{'ok    ' if good else 'FAILED'} {tag}: {len(found)} scalars" + ("" if good else f": {found} for {numbers}"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
