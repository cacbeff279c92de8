#!/usr/bin/env python3
"""What `gyre export --onnx` writes gives gyre's own answers in onnxruntime, and `gyre import` makes the same net of it.

    tests/program/onnx_test.py BUILD       the folder with gyre; PYTHON=… a Python with onnxruntime, if not this one

Exit code 77 where there is no Python with onnxruntime, onnx and numpy.
"""

from __future__ import annotations

import csv
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

from python_with import require_modules

# Every word that computes something in evaluation, sums of both ranks, and nets that come with gyre.
EVERY = """conv 4 k3 p1 s2
batchnorm
relu
as a
conv 4 k3 p1 g4 nobias
batchnorm local
add a
silu
maxpool 2 p1
dropout2d 0.5
avgpool 2
hardswish
conv 6 k1 g2
gelu
relu6
as c
avgpool global
conv 6 k1
hardsigmoid
mul c
concat c
as e
avgpool global
conv 12 k1
sigmoid
mul e
avgpool global
as b
linear 12
leaky_relu 0.1
add b
as d
linear 8
groupnorm 2
relu
concat d
groupnorm 1
linear classes
"""
PLANES = "conv 8 k3\nrelu\nconv 5 k3\navgpool global\n"
# Channels in an order, windows at the edge, and a convolution that gives the classes.
CHANNELS = """conv 6 k3
relu
shuffle 3
as a
chunk 1/2
as b
from a
chunk 2/2
groupnorm 3 eps 0.001
batchnorm noaffine
conv 4 k3 p1
groupnorm 1
maxpool 3 s1 p1
concat b
groupnorm 7 noaffine
maxpool 3 s2 ceil
shuffle 7
conv classes k1
avgpool global
"""
# With the learning rate.
CASES = (
    ("net", (1, 28, 28), 0.05),
    ("resnet", (3, 32, 32), 0.05),
    (EVERY, (3, 20, 17), 0.2),
    (PLANES, (1, 12, 12), 0.05),
    (CHANNELS, (1, 12, 13), 0.05),
)
CLASSES = 5


def write_idx(path: pathlib.Path, shape: tuple[int, ...], values: bytes) -> None:
    path.write_bytes(struct.pack(">BBBB", 0, 0, 8, len(shape)) + struct.pack(f">{len(shape)}I", *shape) + values)


def main() -> int:
    require_modules("numpy", "onnx", "onnxruntime")
    import numpy
    import onnx
    import onnxruntime

    gyre = pathlib.Path(sys.argv[1]).resolve() / "gyre"
    random = numpy.random.default_rng(1)

    def run(*words: str, code: int = 0) -> str:
        environment = os.environ | {"PYTHON": sys.executable}
        done = subprocess.run([gyre, *words], capture_output=True, text=True, timeout=300, env=environment)
        if done.returncode != code:
            sys.exit(f"gyre {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stderr if code else done.stdout

    failed = 0
    for model, shape, rate in CASES:
        with tempfile.TemporaryDirectory(prefix="gyre-onnx-") as folder:
            work = pathlib.Path(folder)
            for part, count in (("train", 60), ("t10k", 20)):
                pixels = random.integers(0, 256, (count, *shape), dtype=numpy.uint8)
                labels = numpy.arange(count, dtype=numpy.uint8) % CLASSES
                pixels[numpy.arange(count), :, labels * 2] = 255  # to be learnt
                write_idx(work / f"{part}-images-idx4-ubyte", pixels.shape, pixels.tobytes())
                write_idx(work / f"{part}-labels-idx1-ubyte", labels.shape, labels.tobytes())
            name = model
            if "\n" in model:
                name = str(work / "model")
                pathlib.Path(name).write_text(model)
            run("train", "--data", folder, "--model", name, "--epochs", "20", "--batch-size", "10", "--threads", "1",
                "--lr", str(rate), "--save", str(work / "run"))  # fmt: skip
            weights = str(work / "run" / "last.safetensors")
            run("export", "--weights", weights, "--onnx", str(work / "net.onnx"))
            exported = onnx.load(work / "net.onnx")
            onnx.checker.check_model(exported, full_check=True)
            facts = {entry.key: entry.value for entry in exported.metadata_props}
            mean, std = (numpy.array([float(v) for v in facts[key].split(",")], numpy.float32).reshape(1, -1, 1, 1)
                         for key in ("gyre.mean", "gyre.std"))  # fmt: skip
            session = onnxruntime.InferenceSession(str(work / "net.onnx"), providers=["CPUExecutionProvider"])
            (logits,) = session.run(["logits"], {"input": (pixels.astype(numpy.float32) / 255 - mean) / std})
            theirs = numpy.exp(logits - logits.max(1, keepdims=True))
            theirs /= theirs.sum(1, keepdims=True)
            ours = numpy.zeros_like(theirs)

            def predict(weights: str, images: pathlib.Path = work / "t10k-images-idx4-ubyte") -> str:
                return run("predict", "--weights", weights, "--csv", "--top", str(CLASSES), str(images))

            table = predict(weights)
            run("import", str(work / "net.onnx"), "-o", str(work / "imported"))
            wrong = work / "wrong.onnx"
            for size in ("12", "12x12 ", "20,crop12", "20,centercrop"):
                model_file = onnx.load(work / "net.onnx")
                model_file.metadata_props.add(key="gyre.resize", value=size)
                onnx.save(model_file, wrong)
                if f"--resize {size} must be" not in run("import", str(wrong), "-o", str(work / "refused"), code=3):
                    sys.exit(f"the size {size} in an ONNX model is not what its message is about")
            imported = str(work / "imported" / "net.safetensors")
            run("export", "--weights", imported, "--onnx", str(work / "again.onnx"))
            same = predict(imported) == table and onnx.load(work / "again.onnx").graph == exported.graph
            for row in csv.DictReader(table.splitlines()):
                ours[int(row["image"].rsplit("[", 1)[1][:-1]), int(row["class"])] = float(row["probability"])
            apart = float(abs(ours - theirs).max())
            spread = float(abs(theirs - theirs[0]).max())
            # Six digits are printed; logits of some units are rounded to 1e-6 of themselves. A wrong net
            # is off by as much as images differ.
            good = logits.shape == (len(pixels), CLASSES) and apart < 2e-5 < 0.005 < spread and same
            failed += not good
            print(f"{'ok    ' if good else 'FAILED'} {name if name == model else model.split()[0] + ' …'}: probabilities "
                  f"{apart:.1e} apart, between images {spread:.2f}, {'the same' if same else 'ANOTHER NET'} when "
                  "imported", flush=True)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
