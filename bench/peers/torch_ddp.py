#!/usr/bin/env python3
"""The PyTorch DistributedDataParallel recipe, done correctly, as a peer for gyre's timings.

It uses gloo, with one thread and one core per rank. Every rank trains on its own 1/ranks of each
epoch's permutation, the images are normalised in memory (so no data loader is measured), the model is
in train mode with its dropout, and gradients go through DDP with its default buckets.

Rank 0 prints JSON lines: one per epoch (images_per_second counts the images of all ranks), and one at
the end (peak_memory_bytes: peak resident memory of the largest rank).

torch is imported only by the ranks and by functions that need it, so that the launcher stays small
and other scripts can use the helpers here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pathlib
import resource
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time

MEAN, STD = 0.1307, 0.3081  # of pixels scaled to 0..1


HOSTS = str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "program" / "hosts.sh")


def made_hosts() -> list[str]:
    """The hosts that tests/program/hosts.sh simulates on this machine, if it started this script."""
    return os.environ.get("GYRE_HOSTS", "").split()


def find_python(wanted: str | None) -> str | None:
    """The wanted interpreter, that of PYTHON, or the first usual one, if it can import torch; otherwise None."""
    wanted = wanted or os.environ.get("PYTHON")
    usual = [sys.executable, shutil.which("python3"), "/usr/bin/python3"]
    for path in [wanted] if wanted else dict.fromkeys(p for p in usual if p):
        try:
            if subprocess.run([path, "-c", "import torch"], capture_output=True).returncode == 0:
                return path
        except OSError:
            pass
    return None


def no_torch(wanted: str | None) -> str:
    """The error message if find_python() found none."""
    wanted = wanted or os.environ.get("PYTHON")
    who = f"{wanted} cannot import torch" if wanted else "no Python here can import torch"
    return f"{who}: install python3-torch or name an interpreter that has it with --python or PYTHON=…"


def dataset_dir(name: str) -> pathlib.Path:
    """The directory `name`, or the system's data set of that name."""
    bases = ["", "/usr/local/share/datasets", "/usr/share/datasets"]
    for path in (pathlib.Path(base, name) for base in bases):
        if (path / "train-images-idx3-ubyte.gz").is_file():
            return path
    raise FileNotFoundError(f"no train-images-idx3-ubyte.gz in a directory or data set '{name}'")


def read_idx(path: pathlib.Path, limit: int = 0):
    """The first `limit` items (0: all) of an IDX file of bytes, as a uint8 tensor."""
    import torch

    with gzip.open(path, "rb") as file:
        zero, kind, rank = struct.unpack(">HBB", file.read(4))
        if zero != 0 or kind != 8:
            raise ValueError(f"{path}: not an IDX file of bytes")
        shape = list(struct.unpack(f">{rank}I", file.read(4 * rank)))
        shape[0] = min(limit or shape[0], shape[0])
        size = 1
        for extent in shape:
            size *= extent
        raw = bytearray(file.read(size))
    if len(raw) != size:
        raise ValueError(f"{path}: ends early")
    return torch.frombuffer(raw, dtype=torch.uint8).reshape(shape)


def load_set(name: str, limit: int = 0, part: str = "train"):
    """Normalised images [n, 1, h, w] (float32) and labels [n] (int64) of train or t10k."""
    folder = dataset_dir(name)
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", limit)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", limit)
    images = images.unsqueeze(1).float().div_(255).sub_(MEAN).div_(STD)
    return images, labels.long()


def build_model(name: str, dropout: bool = True):
    """The nets that gyre calls `net`, `wide` and `resnet`, for 28 x 28 images; they return log-probabilities."""
    from collections import OrderedDict

    from torch import nn

    if name == "net":
        layers = [
            ("conv1", nn.Conv2d(1, 10, 5)), ("pool1", nn.MaxPool2d(2)), ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(10, 20, 5)), ("drop1", nn.Dropout2d(0.5)),
            ("pool2", nn.MaxPool2d(2)), ("relu2", nn.ReLU()), ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(320, 50)), ("relu3", nn.ReLU()), ("drop2", nn.Dropout(0.5)),
            ("fc2", nn.Linear(50, 10)), ("log_softmax", nn.LogSoftmax(1)),
        ]  # fmt: skip
    elif name == "wide":
        layers = [
            ("conv1", nn.Conv2d(1, 64, 3, padding=1)), ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(64, 128, 3, padding=1)), ("relu2", nn.ReLU()),
            ("pool1", nn.MaxPool2d(2)), ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(128 * 14 * 14, 1024)), ("relu3", nn.ReLU()),
            ("drop1", nn.Dropout(0.5)), ("fc2", nn.Linear(1024, 10)),
            ("log_softmax", nn.LogSoftmax(1)),
        ]  # fmt: skip
    elif name == "resnet":

        def block(channels: int, outputs: int, *more: nn.Module) -> list[nn.Module]:
            return [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), *more]

        class Add(nn.Module):
            def __init__(self, channels: int) -> None:
                super().__init__()
                self.inner = nn.Sequential(*block(channels, channels), *block(channels, channels))

            def forward(self, x):
                return x + self.inner(x)

        modules = [*block(1, 32), *block(32, 64, nn.MaxPool2d(2)), Add(64), *block(64, 128, nn.MaxPool2d(2)), Add(128),
                   nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10), nn.LogSoftmax(1)]  # fmt: skip
        layers = [(f"layer{i}", module) for i, module in enumerate(modules)]
    else:
        raise ValueError(f"no model '{name}'")
    kept = [(n, layer) for n, layer in layers if dropout or not n.startswith("drop")]
    return nn.Sequential(OrderedDict(kept))


def has_fused(kind: str) -> bool:
    """Whether this torch has the fused form of `kind` (SGD, Adam) on the CPU."""
    import torch

    try:
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        getattr(torch.optim, kind)([parameter], lr=0.1, fused=True).step()
        return True
    except (TypeError, RuntimeError, ValueError):
        return False


def make_optimizer(args: argparse.Namespace, parameters):
    """The optimiser, and the form of it that was chosen: default, foreach or fused."""
    import torch

    kind = {"sgd": "SGD", "adam": "Adam"}[args.optimizer]
    form = args.form
    if form == "auto":
        form = "fused" if has_fused(kind) else "default"
    options: dict[str, object] = {} if form == "default" else {form: True}
    if args.optimizer == "sgd":
        options["momentum"] = args.momentum
    else:
        options["betas"] = tuple(args.betas)
    return getattr(torch.optim, kind)(parameters, lr=args.lr, **options), form


def peak_memory_bytes() -> int:
    """Peak resident memory of this process.

    It is VmHWM if available: getrusage's figure also covers the process before exec.
    """
    try:
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def blas_name() -> str:
    """The library that this torch multiplies matrices with: MKL, or the file name of the loaded BLAS.

    Debian's torch takes the system's libblas.so.3, which is the slow reference BLAS
    (libblas.so.3.x.y) until libopenblas0-pthread or the like is installed.
    """
    import torch

    if torch.backends.mkl.is_available():
        return "MKL"
    try:
        maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return "unknown"
    names = {line.rsplit("/", 1)[1] for line in maps if "/" in line and "blas" in line}
    names = {name for name in names if "blas" in name}
    tuned = {name for name in names if not name.startswith("libblas.so.3")}
    return " ".join(sorted(tuned or names)) or "built in"


def pin(rank: int) -> None:
    """Binds each rank to one core, as mpirun does."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def accuracy(model, images, labels) -> float:
    """The share of images whose most likely class is the label."""
    import torch

    with torch.no_grad():
        right = [(model(x).argmax(1) == y).sum() for x, y in zip(images.split(1000), labels.split(1000))]
    return float(sum(right)) / len(labels)


def work(args: argparse.Namespace) -> None:
    """Runs one rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.threads == 1:
        pin(rank)
    import torch
    import torch.distributed as dist
    from torch.nn.functional import nll_loss
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    images, labels = load_set(args.data, args.limit)
    n = len(labels)

    torch.manual_seed(args.seed + rank)  # dropout differs between ranks; DDP evens the weights out
    model = build_model(args.model, dropout=not args.no_dropout)
    if args.channels_last:
        model, images = (x.to(memory_format=torch.channels_last) for x in (model, images))
    if args.compile:
        model = torch.compile(model)
    if ranks > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=args.bucket_view)
    model.train()
    optimizer, form = make_optimizer(args, model.parameters())
    schedule = None
    if args.one_cycle:
        steps = args.epochs * -(-(-(-n // ranks)) // args.batch_size)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=args.lr, total_steps=steps, cycle_momentum=False)  # fmt: skip

    speeds = []
    for epoch in range(1, args.epochs + 1):
        dist.barrier()
        start = time.perf_counter()
        # As in DistributedSampler, all ranks have the same permutation, padded from its start to a
        # multiple of the number of ranks, and each rank takes every ranks'th index.
        order = torch.randperm(n, generator=torch.Generator().manual_seed(args.seed + epoch))
        mine = torch.cat([order, order[: -n % ranks]])[rank::ranks]
        total, steps = 0.0, 0
        for batch in mine.split(args.batch_size):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = nll_loss(model(images.index_select(0, batch)), labels.index_select(0, batch))
            loss.backward()
            optimizer.step()
            if schedule:
                schedule.step()
            total, steps = total + loss.item(), steps + 1
        dist.barrier()
        seconds = time.perf_counter() - start
        mean = torch.tensor(total / steps)
        dist.all_reduce(mean)
        warmup = args.skip_first_epoch and epoch == 1
        if not warmup:
            speeds.append(n / seconds)
        if rank == 0:
            line = {"event": "epoch", "epoch": epoch, "warmup": warmup, "seconds": seconds}
            line |= {"images_per_second": n / seconds, "train_loss": mean.item() / ranks}
            print(json.dumps(line), flush=True)

    peak = torch.tensor(peak_memory_bytes())
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        line = {"event": "end", "torch": torch.__version__, "ranks": ranks, "model": args.model}
        line |= {"optimizer": args.optimizer, "form": form, "images": n}
        line["blas"] = blas_name()
        line["isa"] = torch.backends.cpu.get_cpu_capability()  # of torch's kernels, not of MKL's
        line["images_per_second"] = statistics.harmonic_mean(speeds) if speeds else None
        line["peak_memory_bytes"] = peak.item()
        if args.evaluate:
            line["test_accuracy"] = accuracy(getattr(model, "module", model).eval(), *load_set(args.data, 0, "t10k"))
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def launch(args: argparse.Namespace) -> int:
    """Starts the ranks and waits for them; ends all if one fails. Returns the exit status."""
    python = find_python(args.python)
    if not python:
        print(f"torch_ddp.py: {no_torch(args.python)}", file=sys.stderr)
        return 1
    try:
        dataset_dir(args.data)
    except FileNotFoundError as error:
        print(f"torch_ddp.py: {error}", file=sys.stderr)
        return 1
    hosts = made_hosts()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, interface = (hosts[0], "eth0") if hosts else ("127.0.0.1", "lo")
    env = os.environ | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(args.ranks), "OMP_NUM_THREADS": str(args.threads)}
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    ranks = []
    for i in range(args.ranks):
        place = [HOSTS, "on", hosts[i % len(hosts)]] if hosts else []
        command = [*place, python, __file__, *sys.argv[1:], "--worker"]
        ranks.append(subprocess.Popen(command, env=env | {"RANK": str(i)}))
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                return 1
            time.sleep(0.05)
        return 1 if any(rank.returncode for rank in ranks) else 0
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Times PyTorch DDP on the CPU (gloo).")
    add = parser.add_argument
    add("--data", default="fashion-mnist", help="data set name, or directory of the .gz files")
    add("--model", choices=["net", "wide", "resnet"], default="net")
    add("--optimizer", choices=["sgd", "adam"], default="sgd")
    add("--lr", type=float, default=0.01)
    add("--momentum", type=float, default=0.5, help="for sgd")
    add("--betas", type=float, nargs=2, default=[0.9, 0.999], help="for adam")
    add("--one-cycle", action="store_true", help="OneCycleLR up to --lr, per step")
    add("--no-dropout", action="store_true", help="leave out the dropout layers")
    add("--evaluate", action="store_true", help="measure accuracy on the test images at the end")
    add("--adam", "--form", dest="form", choices=["auto", "default", "foreach", "fused"],
        default="default",
        help="form of the optimiser; auto: fused if available")  # fmt: skip
    add("--batch-size", type=int, default=64, help="images per rank and step")
    add("--epochs", type=int, default=2)
    add("--limit", type=int, default=0, help="train only on the first N images (0: all)")
    add("--skip-first-epoch", action="store_true", help="treat the first epoch as a warm-up")
    add("--ranks", type=int, default=2, help="1: without DDP")
    add("--threads", type=int, default=1, help="of each rank; ranks of one thread are bound to a core each")
    add("--compile", action="store_true", help="variant: torch.compile")
    add("--seed", type=int, default=1)
    add("--bf16", action="store_true", help="variant: autocast to bfloat16")
    add("--channels-last", action="store_true", help="variant: NHWC memory format")
    add("--bucket-view", action="store_true", help="variant in which gradients are views of the buckets")
    add("--python", help="interpreter with torch for the ranks (default: the first found)")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
