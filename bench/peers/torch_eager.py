#!/usr/bin/env python3
"""Eager PyTorch on one device, as a peer for gyre on one GPU, and the comparison of both.

    torch_eager.py --model net --batch-size 64              one JSON line of torch's speed
    torch_eager.py --compare --gyre build/gyre --json FILE  a table: torch, gyre with each kernel set

The nets are gyre's (torch_ddp.py builds them), with their dropout, in train mode. Images, labels and
the order of each epoch are on the device, nothing is read back in a step, cuDNN chooses its
algorithms by timing (cudnn.benchmark). The clock starts after the warm-up's steps are done and stops
when the device is; images/s is the median over --repeats.

TF32 is off unless --tf32 is given, then on for convolutions and products, on both sides. torch's
own default is on for convolutions only.

The comparison times torch's default and fused optimisers and takes the faster; of gyre's epochs the
first is the warm-up. A ratio above 1 says that gyre is faster.

Exit status: 0; 1 a run failed; 2 wrong use; 77 (skipped) without torch or without the device.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import compare
import torch_ddp

SKIPPED = 77
# The optimiser that goes with each net, and its learning rate; images of an epoch of gyre's (0: all).
CASES = {
    "net": {"optimizer": "sgd", "lr": 0.01, "images": 0},
    "wide": {"optimizer": "adam", "lr": 0.001, "images": 16384},
}


def measure(args: argparse.Namespace) -> dict:
    """Images/s of eager torch."""
    import torch
    from torch.nn.functional import nll_loss

    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    images, labels = (x.to(device) for x in torch_ddp.load_train(args.data, args.limit))
    model = torch_ddp.build_model(args.model).to(device)
    if args.channels_last:
        model, images = (x.to(memory_format=torch.channels_last) for x in (model, images))
    model.train()
    optimizer, form = torch_ddp.make_optimizer(args, model.parameters())

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def batches():
        while True:
            order = torch.randperm(len(labels), device=device)
            yield from (part for part in order.split(args.batch_size)
                        if len(part) == min(args.batch_size, len(labels)))  # fmt: skip

    def train(steps: int) -> int:
        done = 0
        for _ in range(steps):
            batch = next(source)
            optimizer.zero_grad(set_to_none=True)
            loss = nll_loss(model(images.index_select(0, batch)), labels.index_select(0, batch))
            loss.backward()
            optimizer.step()
            total.add_(loss.detach())
            done += len(batch)
        return done

    source, total = batches(), torch.zeros((), device=device)
    train(args.warmup)
    synchronize()
    total.zero_()
    speeds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        done = train(args.steps)
        synchronize()
        speeds.append(done / (time.perf_counter() - start))
    mean_loss = total.item() / (args.steps * args.repeats)
    if mean_loss != mean_loss:
        sys.exit("torch_eager.py: the loss became NaN")
    return {
        "event": "eager", "torch": torch.__version__, "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "model": args.model, "optimizer": args.optimizer, "form": form,
        "batch_size": args.batch_size, "steps": args.steps, "tf32": args.tf32,
        "channels_last": args.channels_last, "mean_loss": mean_loss,
        "images_per_second": statistics.median(speeds), "speeds": speeds,
    }  # fmt: skip


def torch_speed(args: argparse.Namespace, python: str, name: str, batch: int) -> dict:
    """The faster of torch's forms of the optimiser."""
    case, found = CASES[name], []
    for form in ("default", "fused"):
        command = [python, __file__, "--model", name, "--batch-size", str(batch)]
        command += ["--device", args.device, "--data", args.data, "--limit", str(args.limit)]
        command += ["--optimizer", case["optimizer"], "--lr", str(case["lr"]), "--form", form]
        command += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
        command += ["--repeats", str(args.repeats)] + (["--tf32"] if args.tf32 else [])
        command += ["--channels-last"] if args.channels_last else []
        line = compare.events(compare.run(command, dict(os.environ), args.timeout))[-1]
        found.append(line | {"command": compare.show(command)})
    return max(found, key=lambda line: line["images_per_second"])


def gyre_speed(args: argparse.Namespace, name: str, batch: int, kernels: str) -> dict:
    case = CASES[name]
    images = args.limit or case["images"]
    with tempfile.TemporaryDirectory(prefix="gyre-eager-") as folder:
        out = os.path.join(folder, "gyre.jsonl")
        command = [args.gyre, "train", "--data", args.data, "--model", name]
        command += ["--optimizer", case["optimizer"], "--lr", str(case["lr"])]
        command += ["--batch-size", str(batch), "--epochs", str(args.epochs)]
        command += ["--mean", str(torch_ddp.MEAN), "--std", str(torch_ddp.STD), "--seed", "1"]
        command += ["--limit", str(images)] if images else []
        command += ["--device", args.gyre_device, "--kernels", kernels, "--no-eval"]
        command += ["--log-interval", "1000000", "--json", out] + (["--tf32"] if args.tf32 else [])
        compare.run(command, dict(os.environ), args.timeout)
        figures = compare.figures(compare.events(pathlib.Path(out).read_text()))
    return figures | {"command": compare.show(command)}


def compare_all(args: argparse.Namespace) -> int:
    python = torch_ddp.find_python(args.python)
    if not python:
        print(f"torch_eager.py: {torch_ddp.no_torch(args.python)}", file=sys.stderr)
        return SKIPPED
    sets = args.kernels.split(",")
    header = f"{'case':6} {'batch':>6} {'torch images/s':>15} " + " ".join(
        f"{'gyre ' + kernels:>13} {'ratio':>6}" for kernels in sets)  # fmt: skip
    rows, lines = [], []
    for name in args.case or CASES:
        for batch in args.batch_sizes:
            torch_line = torch_speed(args, python, name, batch)
            row = {"case": name, "batch_size": batch, "tf32": args.tf32, "torch": torch_line}
            line = f"{name:6} {batch:6} {torch_line['images_per_second']:15.0f} "
            cells = []
            for kernels in sets:
                row[kernels] = gyre_speed(args, name, batch, kernels)
                speed = row[kernels]["images_per_second"]
                ratio = speed / torch_line["images_per_second"]
                row[kernels]["ratio"] = ratio
                cells.append(f"{speed:13.0f} {ratio:6.2f}")
            rows.append(row)
            lines.append(line + " ".join(cells))
            print(lines[-1], flush=True)
    first = rows[0]["torch"]
    print(f"\ntorch {first['torch']} (eager) on {first['device']}, gyre on {args.gyre_device}, "
          f"TF32 {'on' if args.tf32 else 'off'}; images/s, ratio gyre / torch")  # fmt: skip
    print("\n".join([header, *lines]))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Times eager PyTorch on one device.")
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="torch's")
    add("--data", default="fashion-mnist", help="data set name, or directory of the .gz files")
    add("--model", choices=CASES, default="net")
    add("--optimizer", choices=["sgd", "adam"], default="sgd")
    add("--lr", type=float, default=0.01)
    add("--momentum", type=float, default=0.5, help="for sgd")
    add("--form", choices=["default", "foreach", "fused"], default="default",
        help="form of the optimiser")  # fmt: skip
    add("--batch-size", type=int, default=64)
    add("--limit", type=int, default=0, help="use the first N images only (0: all)")
    add("--steps", type=int, default=200, help="steps timed, in each repeat")
    add("--warmup", type=int, default=30, help="steps before")
    add("--repeats", type=int, default=3)
    add("--tf32", action="store_true", help="TF32 for convolutions and products")
    add("--channels-last", action="store_true", help="variant: NHWC memory format")
    add("--compare", action="store_true", help="compare with gyre")
    add("--gyre", default=str(compare.ROOT / "build" / "gyre"), help="the gyre binary")
    add("--gyre-device", default="cuda", help="cuda, or emulated to try this script")
    add("--kernels", default="ours,cudnn,auto", help="gyre's kernel sets to compare")
    add("--case", action="append", choices=CASES, help="net, wide (default: both)")
    add("--batch-sizes", type=numbers, default=[64, 1024], help="of the comparison, as 64,1024")
    add("--epochs", type=int, default=3, help="gyre's, with the warm-up")
    add("--python", help="interpreter with torch (default: the first found)")
    add("--timeout", type=float, default=300, help="seconds that one run may take")
    add("--json", help="write all figures of the comparison to this file")
    args = parser.parse_args()
    if min([args.batch_size, args.steps, args.repeats, *args.batch_sizes]) < 1 or args.warmup < 0:
        parser.error("sizes and numbers of steps must be positive")
    if args.compare:
        if args.epochs < 2:
            parser.error("at least 2 epochs are needed: the first is the warm-up")
        if not os.access(args.gyre, os.X_OK):
            parser.error(f"no gyre binary at {args.gyre}: build it, or name one with --gyre")
        return compare_all(args)
    try:
        import torch
    except ImportError:
        print(f"torch_eager.py: {torch_ddp.no_torch(sys.executable)}", file=sys.stderr)
        return SKIPPED
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch_eager.py: torch sees no GPU; use --device cpu", file=sys.stderr)
        return SKIPPED
    try:
        print(json.dumps(measure(args)), flush=True)
    except FileNotFoundError as error:
        print(f"torch_eager.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
