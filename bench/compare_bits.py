#!/usr/bin/env python3
"""Trains the same small trainings with two builds of gyre and compares losses, weights and optimizer states, bit by bit.

    bench/compare_bits.py OLD_GYRE NEW_GYRE [--data DIR] [--only TEXT]

This checks changes that must not change any bit. Both builds must be for the same instruction set. Prints a
row and a hash for each training; the exit code is 1 if any differs. Trainings on several ranks use mpirun.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-np"]
OPTIMIZERS = {"sgd": ["--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.01"], "adam": ["--optimizer", "adam"]}
# Images and global batch of each net: a few steps, the last one smaller than the others.
SIZES = {"cpu": {"net": (700, 96), "wide": (140, 48), "resnet": (140, 48)},
         "emulated": {"net": (40, 16), "wide": (10, 4), "resnet": (10, 4)}}  # fmt: skip
EXTRAS = {"shards": ["--shards", "4", "--model", "net"], "accumulate": ["--accumulate", "2", "--model", "net"],
          "clip": ["--max-grad-norm", "0.5", "--model", "net"], "smooth": ["--label-smoothing", "0.1", "--model", "net"],
          "augment": ["--augment", "shift2,hflip", "--model", "net"],
          "shared": ["--shard-optimizer", "on", "--model", "net"],
          "bf16 transport": ["--comm-dtype", "bf16", "--model", "net"]}  # fmt: skip


def tensors_of(path: pathlib.Path) -> bytes:
    """Names, shapes and values of a safetensors file, without metadata and tensors that only newer versions write."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    parts = []
    for name, tensor in sorted(json.loads(data[8:begin]).items()):
        if name not in ("__metadata__", "optimizer.step_rest"):
            first, last = tensor["data_offsets"]
            parts += [name.encode(), json.dumps(tensor["shape"]).encode(), data[begin + first : begin + last]]
    return b"".join(parts)


def train(gyre: str, ranks: int, flags: list[str]) -> str:
    """The hash of a training's results; the first line of its errors if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [gyre, "train", "--epochs", "1", "--threads", "1", "--log-interval", "1", "--quiet",
                   "--save", f"{folder}/run", "--metrics", f"{folder}/run.jsonl", *flags]  # fmt: skip
        if ranks > 1:
            command = [*MPIRUN, str(ranks), *command]
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ran.returncode != 0:
            return f"exit {ran.returncode}: {(ran.stderr.strip().splitlines() or ['?'])[0]}"
        digest = hashlib.sha256(tensors_of(pathlib.Path(folder, "run", "last.safetensors")))
        for line in pathlib.Path(folder, "run.jsonl").read_text().splitlines():
            event = json.loads(line)
            keys = ("loss", "learning_rate", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
            digest.update(json.dumps([event.get(key) for key in keys]).encode())
        return digest.hexdigest()[:16]


def cases(data: str):
    for device, model, optimizer, ranks in itertools.product(SIZES, ("net", "wide", "resnet"), OPTIMIZERS, (1, 2, 3, 4)):
        images, batch = SIZES[device][model]
        if device == "emulated" and ranks in (3, 4) and model != "net":
            continue  # as it takes minutes
        extra = ["--no-eval"] if device == "emulated" else []
        yield (f"{device} {model} {optimizer} {ranks}", ranks,
               ["--data", data, "--device", device, "--model", model, "--limit", str(images), "--global-batch",
                str(batch), *OPTIMIZERS[optimizer], *extra])  # fmt: skip
    for name, flags in EXTRAS.items():
        for ranks in (1, 2, 4):
            yield (f"cpu net {name} {ranks}", ranks,
                   ["--data", data, "--device", "cpu", "--limit", "700", "--global-batch", "96", *OPTIMIZERS["adam"], *flags])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--only", default="", help="run only trainings whose name contains this text")
    args = parser.parse_args()
    differ = 0
    for name, ranks, flags in cases(args.data):
        if args.only not in name:
            continue
        old, new = (train(gyre, ranks, flags) for gyre in (args.old, args.new))
        differ += old != new
        print(f"{name:32} {old}" + (f"  differs: {new}" if old != new else ""), flush=True)
    print(f"{differ} differ" if differ else "all are the same")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
