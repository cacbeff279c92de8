#!/usr/bin/env python3
"""Times PyTorch on one device, as a peer for gyre on one GPU, and compares both.

    torch_eager.py --model net --batch-size 64              prints a JSON line with torch's speed for each form
    torch_eager.py --compare --gyre build/gyre --json FILE  prints a table of torch's forms and gyre's kernel sets

Forms of the step (--forms):
    eager    call by call, with the optimiser in its default form
    fused    the same with the fused optimiser
    graph    the fused step, from the choice of images to the update, captured by hand in a CUDA graph and
             replayed, as a user can do with much care (on a CPU, which has no graphs, call by call)
    compile  torch.compile(mode="reduce-overhead") of everything up to the loss, with the fused optimiser

The nets are gyre's (torch_ddp.py builds them), with their dropout, in train mode. Images, normalised as
floats, labels and the order of each epoch are on the device, a step reads nothing back, and cuDNN chooses
its algorithms by timing (cudnn.benchmark). The clock starts when the warm-up's steps are done and stops
when the device is done; images/s is the median over --repeats.

TF32 is off unless --tf32 is given; then it is on for convolutions and products, on both sides. By default
torch itself uses it only for convolutions.

gyre's first epoch is the warm-up. A ratio above 1 means that gyre is faster than torch's fastest
form. A form that fails or takes longer than --timeout is reported and left out.

Exit status: 0; 1: a run failed; 2: wrong use; 77 (skipped): torch or the device is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import compare
import torch_ddp

SKIPPED = 77
FORMS = ["eager", "fused", "graph", "compile"]
# Each net's optimiser and learning rate, and the images of one gyre epoch (0: all).
CASES = {
    "net": {"optimizer": "sgd", "lr": 0.01, "images": 0},
    "wide": {"optimizer": "adam", "lr": 0.001, "images": 16384},
}


class Skipped(Exception):
    pass


def make_step(args: argparse.Namespace, form: str, model, images, labels, total):
    """Returns a function of a batch (indices of images on the device) that takes one step of training and
    adds the loss to `total`. It may be called any number of times with batches of one size."""
    import torch
    from torch.nn.functional import nll_loss

    on_gpu = images.device.type == "cuda"
    options: dict[str, object] = {} if form == "eager" else {"fused": True}
    if args.optimizer == "sgd":
        options["momentum"] = args.momentum
    elif form == "graph" and on_gpu:
        options["capturable"] = True
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[args.optimizer]
    optimizer = kind(model.parameters(), lr=args.lr, **options)

    def loss_of(batch):
        return nll_loss(model(images.index_select(0, batch)), labels.index_select(0, batch))

    forward = torch.compile(loss_of, mode="reduce-overhead") if form == "compile" else loss_of

    def step(batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())

    if form != "graph" or not on_gpu:
        return step

    static = torch.zeros(args.batch_size, dtype=torch.int64, device=images.device)
    graph, calls = torch.cuda.CUDAGraph(), 0
    beside = torch.cuda.Stream()

    def replay(batch) -> None:
        # The capture follows a few steps on another stream, as libraries initialise in the first steps.
        nonlocal calls
        calls += 1
        static.copy_(batch)
        if calls <= 3:
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                step(static)
            torch.cuda.current_stream().wait_stream(beside)
            return
        if calls == 4:
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                step(static)
        graph.replay()

    return replay


def measure(args: argparse.Namespace, form: str) -> dict:
    """Torch's images/s with this form of the step."""
    import torch

    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    images, labels = (x.to(device) for x in torch_ddp.load_set(args.data, args.limit))
    model = torch_ddp.build_model(args.model).to(device)
    if args.channels_last:
        model, images = (x.to(memory_format=torch.channels_last) for x in (model, images))
    model.train()
    size = args.batch_size = min(args.batch_size, len(labels))
    total = torch.zeros((), device=device)
    step = make_step(args, form, model, images, labels, total)

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def batches():
        while True:
            order = torch.randperm(len(labels), device=device)
            yield from (part for part in order.split(size) if len(part) == size)

    def train(steps: int) -> None:
        for _ in range(steps):
            step(next(source))

    source = batches()
    train(args.warmup)
    synchronize()
    total.zero_()
    speeds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        train(args.steps)
        synchronize()
        speeds.append(args.steps * size / (time.perf_counter() - start))
    mean_loss = total.item() / (args.steps * args.repeats)
    if mean_loss != mean_loss:
        raise RuntimeError("the loss became NaN")
    return {
        "event": "torch", "torch": torch.__version__, "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "model": args.model, "optimizer": args.optimizer, "form": form,
        "batch_size": size, "steps": args.steps, "tf32": args.tf32,
        "channels_last": args.channels_last, "mean_loss": mean_loss,
        "images_per_second": statistics.median(speeds), "speeds": speeds,
    }  # fmt: skip


def torch_speeds(args: argparse.Namespace, python: str, name: str, batch: int) -> dict[str, dict]:
    """Torch's figures by form, without forms that failed or did not end in time."""
    case = CASES[name]
    command = [python, __file__, "--model", name, "--batch-size", str(batch)]
    command += ["--device", args.device, "--data", args.data, "--limit", str(args.limit)]
    command += ["--optimizer", case["optimizer"], "--lr", str(case["lr"])]
    command += ["--forms", ",".join(args.forms), "--steps", str(args.steps)]
    command += ["--warmup", str(args.warmup), "--repeats", str(args.repeats)]
    command += (["--tf32"] if args.tf32 else []) + (["--channels-last"] if args.channels_last else [])
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.timeout)
        output = done.stdout
        if done.returncode == SKIPPED:
            raise Skipped
    except subprocess.TimeoutExpired as error:
        print(f"torch_eager.py: took more than {args.timeout:g} s: {compare.show(command)}", file=sys.stderr)
        output = error.stdout or ""
        output = output.decode() if isinstance(output, bytes) else output
    shown = compare.show(command)
    return {line["form"]: line | {"command": shown} for line in compare.events(output)}


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
        command += ["--log-interval", "1000000", "--metrics", out] + (["--precision", "tf32"] if args.tf32 else [])
        compare.run(command, dict(os.environ), args.timeout)
        figures = compare.figures(compare.events(pathlib.Path(out).read_text()))
    return figures | {"command": compare.show(command)}


def compare_all(args: argparse.Namespace) -> int:
    python = torch_ddp.find_python(args.python)
    if not python:
        print(f"torch_eager.py: {torch_ddp.no_torch(args.python)}", file=sys.stderr)
        return SKIPPED
    sets = args.kernels.split(",")
    rows, table = [], []
    for name in args.case or CASES:
        for batch in args.batch_sizes:
            try:
                found = torch_speeds(args, python, name, batch)
            except Skipped:  # has printed the reason
                return SKIPPED
            if not found:
                print(f"torch_eager.py: none of torch's forms ran for {name}, {batch} images", file=sys.stderr)
                return 1
            best = max(line["images_per_second"] for line in found.values())
            ours = {kernels: gyre_speed(args, name, batch, kernels) for kernels in sets}
            for line in ours.values():
                line["ratio"] = line["images_per_second"] / best
            rows.append({"case": name, "batch_size": batch, "tf32": args.tf32, "torch": found, "gyre": ours})
            cells = [f"{found[form]['images_per_second']:11.0f}" if form in found else f"{'-':>11}"
                     for form in args.forms]
            cells += [f"{line['images_per_second']:11.0f} {line['ratio']:5.2f}" for line in ours.values()]
            table.append(f"{name:6} {batch:6} " + " ".join(cells))
            print(table[-1], flush=True)
            if args.json:  # write the results so far, in case the rest is not reached
                pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    first = next(iter(rows[0]["torch"].values()))
    print(f"\ntorch {first['torch']} on {first['device']}, gyre on {args.gyre_device}, TF32 "
          f"{'on' if args.tf32 else 'off'}; images/s, and gyre / torch's fastest")  # fmt: skip
    print(f"{'case':6} {'batch':>6} " + " ".join(
        [f"{'t. ' + form:>11}" for form in args.forms]
        + [f"{'gyre ' + kernels:>11} ratio" for kernels in sets]))  # fmt: skip
    print("\n".join(table))
    return 0


def forms(text: str) -> list[str]:
    words = text.split(",")
    if not words or any(word not in FORMS for word in words):
        raise argparse.ArgumentTypeError(f"'{text}': choose from {','.join(FORMS)}")
    return words


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Times PyTorch on one device.")
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="torch's")
    add("--data", default="fashion-mnist", help="data set name, or directory of the .gz files")
    add("--model", choices=CASES, default="net")
    add("--optimizer", choices=["sgd", "adam"], default="sgd")
    add("--lr", type=float, default=0.01)
    add("--momentum", type=float, default=0.5, help="for sgd")
    add("--forms", type=forms, default=["eager", "fused", "graph", "compile"],
        help="forms of the step, such as eager,fused,graph,compile")  # fmt: skip
    add("--batch-size", type=int, default=64)
    add("--limit", type=int, default=0, help="use only the first N images (0: all)")
    add("--steps", type=int, default=200, help="timed steps in each repeat")
    add("--warmup", type=int, default=30, help="steps before")
    add("--repeats", type=int, default=3)
    add("--tf32", action="store_true", help="TF32 for convolutions and products")
    add("--channels-last", action="store_true", help="variant: NHWC memory format")
    add("--compare", action="store_true", help="compare with gyre")
    add("--gyre", default=str(compare.ROOT / "build" / "gyre"), help="the gyre binary")
    add("--gyre-device", default="cuda", help="cuda, or emulated to test this script")
    add("--kernels", default="ours,cudnn,auto", help="gyre's kernel sets to compare")
    add("--case", action="append", choices=CASES, help="net, wide (default: both)")
    add("--batch-sizes", type=numbers, default=[64, 1024], help="batch sizes of the comparison, such as 64,1024")
    add("--epochs", type=int, default=3, help="gyre's epochs, including the warm-up")
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
    failed = 0
    for form in args.forms:
        try:
            print(json.dumps(measure(args, form)), flush=True)
        except FileNotFoundError as error:
            print(f"torch_eager.py: {error}", file=sys.stderr)
            return 1
        except Exception as error:  # whatever error one form fails with, the others continue
            print(f"torch_eager.py: {form}: {error!r}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
