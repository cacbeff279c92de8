#!/usr/bin/env python3
"""Times `gyre eval` against onnxruntime on this machine's CPU: the same net, weights and images.

    python3 bench/peers/inference.py --case resnet --case resnet18

The weights are trained for one step, exported by `gyre export`, and run by onnxruntime with as many threads,
each side with its best of some batch sizes, in turn. gyre's speed is that of the images which a large
test set has more than a small one, as its start and the reading of images are the same with both; onnxruntime
is timed without its start, on images that are normalised already. A ratio above 1 means that gyre is faster.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import numpy
import onnxruntime

from compare import commit, cores, cpu_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
# model: a built-in net or a file; shape: of an image; images: of the large test set, less those of the small one.
CASES = {
    "net": {"shape": (1, 28, 28), "images": 200000},
    "resnet": {"shape": (1, 28, 28), "images": 12000},
    "resnet18": {"model": "examples/resnet18.model", "shape": (3, 224, 224), "images": 200},
    "mobilenet_v2": {"model": "examples/mobilenet_v2.model", "shape": (3, 224, 224), "images": 300},
}  # fmt: skip
BATCHES = (8, 32, 128, 1000)
SMALL = 100


def write_idx(path: pathlib.Path, array: numpy.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.tobytes())


def write_set(folder: pathlib.Path, shape: tuple[int, int, int], images: int) -> None:
    """Random images; grey ones without the axis of channels."""
    random = numpy.random.default_rng(1)
    folder.mkdir()
    for name, count in (("train", 64), ("t10k", images)):
        pixels = random.integers(0, 256, (count, *(shape if shape[0] > 1 else shape[1:])), dtype=numpy.uint8)
        write_idx(folder / f"{name}-images-idx{pixels.ndim}-ubyte", pixels)
        write_idx(folder / f"{name}-labels-idx1-ubyte", numpy.arange(count, dtype=numpy.uint8) % 10)


def run(command: list[str]) -> float:
    """The seconds that a command takes, which must succeed."""
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"inference.py: exit status {done.returncode} from {shlex.join(command)}\n{done.stderr[-2000:]}")
    return time.monotonic() - begin


class Gyre:
    def __init__(self, args: argparse.Namespace, folder: pathlib.Path, case: dict, name: str) -> None:
        self.args, self.images = args, case["images"]
        self.sets = [folder / "small", folder / "large"]
        self.folder = folder
        for place, images in zip(self.sets, (SMALL, SMALL + self.images)):
            write_set(place, case["shape"], images)
        model = str(ROOT / case["model"]) if "model" in case else name
        run([args.gyre, "train", "--data", str(self.sets[0]), "--model", model, "--batch-size", "16", "--epochs", "1",
             "--max-seconds", "0.01", "--no-eval", "--lr", "0.001", "--save", str(folder / "run")])  # fmt: skip
        self.weights = str(folder / "run/last.safetensors")
        run([args.gyre, "export", "--weights", self.weights, "--onnx", str(folder / "net.onnx")])

    def speed(self, batch: int) -> float:
        small, large = (run([self.args.gyre, "eval", "--data", str(place), "--weights", self.weights, "--threads",
                             str(self.args.threads), "--device", "cpu", "--test-batch-size", str(batch)])
                        for place in self.sets)  # fmt: skip
        return self.images / (large - small)


class OnnxRuntime:
    def __init__(self, args: argparse.Namespace, folder: pathlib.Path, case: dict) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = args.threads
        options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(folder / "net.onnx"), options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name
        self.shape, self.images = case["shape"], case["images"]

    def speed(self, batch: int) -> float:
        batch = min(batch, self.images)
        x = numpy.random.default_rng(2).standard_normal((batch, *self.shape), dtype=numpy.float32)
        self.session.run(None, {self.name: x})
        passes = max(1, self.images // batch)
        begin = time.monotonic()
        for _ in range(passes):
            self.session.run(None, {self.name: x})
        return passes * batch / (time.monotonic() - begin)


def compare(args: argparse.Namespace, name: str) -> None:
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="gyre-inference-") as place:
        folder = pathlib.Path(place)
        gyre = Gyre(args, folder, case, name)
        peer = OnnxRuntime(args, folder, case)
        batches = {side: max(args.batches, key=side.speed) for side in (gyre, peer)}
        theirs, ours = [], []
        for _ in range(args.runs):
            theirs.append(peer.speed(batches[peer]))
            ours.append(gyre.speed(batches[gyre]))
    shown = [f"{statistics.median(s):.0f} ({min(s):.0f}-{max(s):.0f})" for s in (ours, theirs)]
    ratio = statistics.median(own / other for own, other in zip(ours, theirs))
    print(f"{name:14} gyre {shown[0]} images/s, batch {batches[gyre]}; onnxruntime {shown[1]}, batch {batches[peer]}; "
          f"ratio {ratio:.2f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gyre", default=str(ROOT / "build/gyre"), help="the gyre binary (default: build/gyre)")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--threads", type=int, default=cores(), help="of each side")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sizes to choose from")
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs")
    args = parser.parse_args()
    print(f"{cpu_model()}, {args.threads} threads, commit {commit()}, onnxruntime {onnxruntime.__version__}")
    for name in args.case or CASES:
        compare(args, name)


if __name__ == "__main__":
    main()
