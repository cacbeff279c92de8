#!/usr/bin/env python3
"""Step-by-step parity of gyre with PyTorch.

Each case starts both from the same weights (a safetensors file written here), takes the same
batches of 64 images in file order, and compares the loss of every step. The greatest relative
difference must stay below the case's bound. The weights that gyre saves must load into the PyTorch
net by their state_dict names and have the right shapes; for SGD they must also agree.

Two correct programs need not agree for ever: one rounding error flips a ReLU or a pooling's choice,
and training amplifies it. "torch's own rounding", the same difference between torch in float32 and
torch in float64, shows that it happens to torch as well, in some seeds and not in others. An error
in gyre's arithmetic or update rules, on the other hand, shows with every seed. So a case holds if
it meets its bound over all steps with one of --seeds seeds; each seed tried gets a line.

--write-golden FILE writes golden_losses.json instead, for golden_test.cpp: losses in float64 of a net
without ReLU and pooling, on gyre's synthetic images and from gyre's own initial weights, both drawn
here again by the same counter-based generator. --write-rates FILE writes golden_rates.json: the rates
of torch's schedulers, stepped after every step of the optimiser. Without, what that file holds is
compared with them, too.

Exit status: 0 parity, 1 none, 2 wrong use or missing data, 77 (skipped) without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"))
import torch_ddp  # noqa: E402
import torch_rates  # noqa: E402

SKIPPED = 77
BATCH = 64
# resnet has batch normalisation and residual connections, and is slow in double precision. With Adam
# net is soon where single roundings decide: of 100 steps, no seed of 6 went without a flip, since
# gyre's convolutions have the rounding of Winograd's filtering, which is greater than the formula's.
MOST_STEPS = {("resnet", "sgd"): 10, ("net", "adam"): 20, ("net", "adamw"): 20, ("net", "rmsprop"): 20}
WEIGHT_BOUND = 1e-3  # of the weights after SGD: absolute, against max(1, greatest weight)

# Stride 2, padding, and a pooling that leaves out the last row and column (7 x 7 to 3 x 3).
STRIDED = """\
# stride, padding, uneven pooling
conv 8 k3 s2 p1
{}
conv 16 k5 s2 p2{}
maxpool 2
{}

linear 32
{}
linear classes
log-softmax
"""
FILES = {
    "strided": STRIDED.format("relu", "", "relu", "relu"),
    "activations": STRIDED.format("leaky_relu 0.1", " g4", "gelu", "silu"),
    "mobile": STRIDED.format("relu6", " g8", "hardswish", "hardsigmoid"),
}

# name, gyre's options, optimiser and options of torch, bound of the relative loss difference
CASES = [
    ("sgd", "--optimizer sgd --lr 0.01 --momentum 0.5", "SGD", {"lr": 0.01, "momentum": 0.5}, 1e-4),
    ("nesterov", "--optimizer sgd --lr 0.01 --momentum 0.5 --nesterov --weight-decay 1e-4", "SGD",
     {"lr": 0.01, "momentum": 0.5, "nesterov": True, "weight_decay": 1e-4}, 1e-4),
    ("adam", "--optimizer adam --lr 1e-3", "Adam", {"lr": 1e-3}, 1e-4),
    ("adamw", "--optimizer adamw --lr 1e-3 --weight-decay 1e-2", "AdamW",
     {"lr": 1e-3, "weight_decay": 1e-2}, 1e-4),
    ("rmsprop", "--optimizer rmsprop --lr 1e-3 --alpha 0.9", "RMSprop", {"lr": 1e-3, "alpha": 0.9}, 1e-4),
]  # fmt: skip

# The cases of each net.
NETS = (
    ("net", CASES),
    ("strided", CASES),
    ("activations", CASES[:1]),
    ("mobile", CASES[:1]),
    ("resnet", CASES[:1]),
)

# Of the golden series: gyre's options, optimiser and options of torch, greatest gradient norm.
GOLDEN_CASES = [
    ("--optimizer sgd", "SGD", {"lr": 0.01, "momentum": 0.5}, None),
    ("--optimizer sgd --lr 0.02 --momentum 0", "SGD", {"lr": 0.02}, None),
    ("--optimizer sgd --lr 0.02 --momentum 0.9", "SGD", {"lr": 0.02, "momentum": 0.9}, None),
    ("--optimizer sgd --lr 0.02 --momentum 0.9 --nesterov", "SGD",
     {"lr": 0.02, "momentum": 0.9, "nesterov": True}, None),
    ("--optimizer sgd --lr 0.02 --momentum 0.9 --weight-decay 0.1", "SGD",
     {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, None),
    ("--optimizer sgd --lr 0.02 --momentum 0.9 --nesterov --weight-decay 0.1", "SGD",
     {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, None),
    ("--optimizer sgd --lr 0.02 --momentum 0.9 --max-grad-norm 0.5", "SGD",
     {"lr": 0.02, "momentum": 0.9}, 0.5),
    ("--optimizer adam", "Adam", {}, None),
    ("--optimizer adam --lr 0.003", "Adam", {"lr": 0.003}, None),
    ("--optimizer adam --betas 0.8,0.9", "Adam", {"betas": (0.8, 0.9)}, None),
    ("--optimizer adam --eps 0.01", "Adam", {"eps": 0.01}, None),
    ("--optimizer adam --weight-decay 0.1", "Adam", {"weight_decay": 0.1}, None),
    ("--optimizer adam --max-grad-norm 0.5 --eps 0.01", "Adam", {"eps": 0.01}, 0.5),
    ("--optimizer adamw", "AdamW", {}, None),
    ("--optimizer adamw --weight-decay 0.1", "AdamW", {"weight_decay": 0.1}, None),
]  # fmt: skip
GOLDEN_MODEL = "conv 4 k5 s2\nconv 6 k3\nlinear 16\nlinear classes\nlog-softmax\n"
GOLDEN_SIDE, GOLDEN_CLASSES, GOLDEN_BATCH, GOLDEN_STEPS, GOLDEN_SEED = 12, 5, 32, 20, 1


def make_model(name: str, seed: int):
    """The PyTorch net of `net` (without dropout), `resnet` or one of FILES, from a seed."""
    from collections import OrderedDict

    import torch
    from torch import nn

    torch.manual_seed(seed)
    if name == "net":
        return torch_ddp.build_model("net", dropout=False)
    if name == "resnet":
        return resnet()
    first, second, third, groups = nn.ReLU(), nn.ReLU(), nn.ReLU(), 1
    if name == "activations":
        first, second, third, groups = nn.LeakyReLU(0.1), nn.GELU(), nn.SiLU(), 4
    if name == "mobile":
        first, second, third, groups = nn.ReLU6(), nn.Hardswish(), nn.Hardsigmoid(), 8
    return nn.Sequential(OrderedDict([
        ("conv1", nn.Conv2d(1, 8, 3, stride=2, padding=1)), ("act1", first),
        ("conv2", nn.Conv2d(8, 16, 5, stride=2, padding=2, groups=groups)), ("pool1", nn.MaxPool2d(2)),
        ("act2", second), ("flatten", nn.Flatten()), ("fc1", nn.Linear(16 * 3 * 3, 32)),
        ("act3", third), ("fc2", nn.Linear(32, 10)), ("log_softmax", nn.LogSoftmax(1)),
    ]))  # fmt: skip


def resnet():
    """gyre's built-in `resnet`, for images of 1 x 28 x 28."""
    from torch import nn

    class Resnet(nn.Module):
        def __init__(self):
            super().__init__()
            widths = [1, 32, 64, 64, 64, 128, 128, 128]
            for i in range(1, 8):
                setattr(self, f"conv{i}", nn.Conv2d(widths[i - 1], widths[i], 3, padding=1))
                setattr(self, f"bn{i}", nn.BatchNorm2d(widths[i]))
            self.fc1 = nn.Linear(128, 10)

        def block(self, i, x):
            return getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)).relu()

        def forward(self, x):
            pool = nn.functional.max_pool2d
            a = pool(self.block(2, self.block(1, x)), 2)
            a = a + self.block(4, self.block(3, a))
            b = pool(self.block(5, a), 2)
            b = b + self.block(7, self.block(6, b))
            return self.fc1(b.mean((2, 3))).log_softmax(1)

    return Resnet()


def save_safetensors(path: pathlib.Path, tensors: dict) -> None:
    """Float tensors as safetensors: length of the header (8 bytes, little endian), header, data."""
    header, data = {}, bytearray()
    for name, tensor in tensors.items():
        values = tensor.detach().float().flatten().tolist()
        begin = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [begin, len(data)]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def load_safetensors(path: pathlib.Path) -> dict:
    """The float tensors of a safetensors file by name; ValueError for a malformed one."""
    import torch

    raw = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
    except (struct.error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name}: no safetensors header: {error}") from None
    header.pop("__metadata__", None)
    data, tensors, used = bytearray(raw[8 + length :]), {}, 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        count = torch.Size(entry["shape"]).numel()
        inside = 0 <= begin <= end <= len(data)
        if entry["dtype"] != "F32" or not inside or end - begin != 4 * count:
            raise ValueError(f"{path.name}: entry '{name}' does not fit: {entry}")
        values = torch.frombuffer(data, dtype=torch.float32, count=count, offset=begin)
        tensors[name] = values.reshape(entry["shape"])
        used += 4 * count
    if used != len(data):
        raise ValueError(f"{path.name}: {len(data)} bytes of data, its entries cover {used}")
    return tensors


def check_saved(path: pathlib.Path, trained, sgd: bool) -> list[str]:
    """What is wrong with gyre's saved weights, given the PyTorch net after the same training."""
    import torch

    try:
        saved = load_safetensors(path)  # a checkpoint: the optimiser's state is in it, too
    except (OSError, ValueError, KeyError) as error:
        return [f"saved weights: {error}"]
    try:  # the reference implementation must read the file too, where it is installed
        from safetensors import safe_open
    except ImportError:
        safe_open = None
    if safe_open:
        try:
            with safe_open(str(path), framework="pt") as file:
                theirs = {name: file.get_tensor(name) for name in file.keys()}
        except Exception as error:  # it has its own exception type, in no fixed place
            return [f"the safetensors package does not read gyre's file: {error}"]
        same = theirs.keys() == saved.keys()
        if not same or not all(torch.equal(theirs[n], saved[n]) for n in saved):
            return ["the safetensors package reads other tensors from gyre's file"]
    saved = {name: value for name, value in saved.items() if not name.startswith("optimizer.")}
    wanted = {name: value.clone() for name, value in trained.state_dict().items()}
    try:
        trained.load_state_dict(saved, strict=True)
    except RuntimeError as error:
        return ["saved weights do not load: " + " ".join(str(error).split())]
    problems = []
    for name, value in wanted.items():
        if name.endswith("num_batches_tracked"):
            continue
        scale = max(1.0, value.abs().max().item())
        difference = (saved[name] - value).abs().max().item() / scale
        if sgd and not difference <= WEIGHT_BOUND:
            problems.append(f"saved {name} differs by {difference:.1e}, bound {WEIGHT_BOUND:.0e}")
    return problems


def torch_losses(model, kind: str, options: dict, images, labels, batch: int = BATCH,
                 norm: float | None = None) -> list[float]:  # fmt: skip
    """Trains on the images in file order; the loss of each batch before its update. norm: of all
    gradients together, at most."""
    import torch

    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    losses = []
    for x, y in zip(images.split(batch), labels.split(batch)):
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.nll_loss(model(x), y)
        loss.backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def greatest_difference(ours: list[float], theirs: list[float]) -> tuple[float, int]:
    """The greatest relative difference (NaN if there is one) and its step, counted from 1."""
    worst, step = 0.0, 1
    for i, (a, b) in enumerate(zip(ours, theirs), 1):
        difference = abs(a - b) / max(abs(b), 1e-12)
        if difference != difference:
            return difference, i
        if difference > worst:
            worst, step = difference, i
    return worst, step


def gyre_losses(args: argparse.Namespace, command: list[str], out: pathlib.Path) -> list[float]:
    """Runs gyre; the losses of its step events. RuntimeError when it fails or leaves steps out."""
    out.unlink(missing_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end within {args.timeout:g} s: {' '.join(command)}") from None
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-1000:]
        raise RuntimeError(f"exit status {done.returncode} from {' '.join(command)}\n{tail}")
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.strip()]
    nan = float("nan")  # JSON has null for it
    events = [line for line in lines if line["event"] == "step"]
    steps = {e["step"]: nan if e["loss"] is None else e["loss"] for e in events}
    if sorted(steps) != list(range(1, args.steps + 1)):
        raise RuntimeError(f"step events {min(steps, default=0)} to {max(steps, default=0)} "
                           f"({len(steps)}), wanted 1 to {args.steps}")  # fmt: skip
    return [steps[i] for i in range(1, args.steps + 1)]


def holds(args: argparse.Namespace, work: pathlib.Path, name: str, case, images, labels) -> bool:
    """Whether a case meets its bound on one net with one of the seeds."""
    seeds = range(args.seed, args.seed + args.seeds)
    return any(compare(args, work, name, case, seed, images, labels) for seed in seeds)


def compare(args: argparse.Namespace, work: pathlib.Path, name: str, case, seed: int, images,
            labels) -> bool:  # fmt: skip
    """Runs one case on one net with one seed and prints its line; whether it meets its bound."""
    label, options, kind, torch_options, bound = case
    stem = f"{name}-{label}"
    init, out, run = (work / f"{stem}{end}" for end in ("-init.safetensors", ".jsonl", "-run"))
    saved = run / "last.safetensors"
    model_file = work / f"{name}.model"
    model_file.write_text(FILES.get(name, ""))
    model = make_model(name, seed)
    save_safetensors(init, model.state_dict())
    command = [args.gyre, "train", "--data", args.data]
    command += ["--model", str(model_file) if name in FILES else name, *options.split()]
    command += ["--init", str(init), "--save", str(run), "--overwrite", "--metrics", str(out)]
    command += ["--no-shuffle", "--no-dropout", "--no-eval", "--log-interval", "1"]
    command += ["--threads", "1", "--mean", str(torch_ddp.MEAN), "--std", str(torch_ddp.STD)]
    command += ["--batch-size", str(BATCH), "--limit", str(BATCH * args.steps), "--epochs", "1"]
    saved.unlink(missing_ok=True)
    try:
        ours = gyre_losses(args, command, out)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        print(f"FAILED  {stem:16} gyre: {error}", flush=True)
        return False
    double = make_model(name, seed).double()
    exact = torch_losses(double, kind, torch_options, images.double(), labels)
    theirs = torch_losses(model, kind, torch_options, images, labels)
    worst, step = greatest_difference(ours, theirs)
    rounding, rounding_step = greatest_difference(theirs, exact)
    problems = check_saved(saved, model, kind == "SGD")
    good = worst <= bound and not problems
    print(f"{'ok' if good else 'differs':7} {stem:16} seed {seed}: greatest relative loss difference {worst:.1e} "
          f"at step {step} of {len(theirs)}, bound {bound:.0e}; torch's own rounding "
          f"{rounding:.1e} at step {rounding_step}; torch's loss {theirs[0]:.4f} to "
          f"{theirs[-1]:.4f}{''.join('; ' + p for p in problems)}", flush=True)  # fmt: skip
    return good


def philox(key: int, group: int, sample: int, epoch: int, what: int) -> list[int]:
    """Four words of Philox 4x32-10, as base/philox.hpp lays out its counter."""
    c, k0, k1, mask = [group, sample, epoch, what], key & 0xFFFFFFFF, key >> 32, 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & mask, (p0 >> 32) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c


def words(key: int, sample: int, index: int, count: int) -> list[int]:
    """The first words of the stream (key, initial weights, index, sample)."""
    groups = (philox(key, group, sample, 0, 1 << 24 | index) for group in range((count + 3) // 4))
    return [word for group in groups for word in group][:count]


def golden_images():
    """The training set of make_dataset() in gyre_process.cpp, normalised; images and labels."""
    import torch

    side, classes, images, labels = GOLDEN_SIDE, GOLDEN_CLASSES, [], []
    for image in range(GOLDEN_BATCH * GOLDEN_STEPS):
        label = image % classes
        bright = [150 * (e * classes // side**2 == label) for e in range(side**2)]
        images.append([w % 64 + b for w, b in zip(words(77, image, 0, side**2), bright)])
        labels.append(label)
    pixels = torch.tensor(images, dtype=torch.float64).reshape(-1, 1, side, side)
    return (pixels / 255 - 0.5) / 0.5, torch.tensor(labels)


def golden_model():
    """GOLDEN_MODEL in float64, with the weights that gyre draws."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(1, 4, 5, stride=2), nn.Conv2d(4, 6, 3), nn.Flatten(),
                          nn.Linear(6 * 2 * 2, 16), nn.Linear(16, GOLDEN_CLASSES),
                          nn.LogSoftmax(1)).double()  # fmt: skip
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            if p.dim() > 1:  # a bias has its weight's
                bound = p[0].numel() ** -0.5
            values = [(2 * (w >> 8) / 2**24 - 1) * bound
                      for w in words(GOLDEN_SEED, 0, index, p.numel())]  # fmt: skip
            p.copy_(torch.tensor(values, dtype=torch.float64).reshape(p.shape))
    return model


def write_golden(path: pathlib.Path) -> int:
    """Writes the golden series, one a line."""
    import torch

    images, labels = golden_images()
    lines = []
    for flags, kind, options, norm in GOLDEN_CASES:
        losses = torch_losses(golden_model(), kind, options, images, labels, GOLDEN_BATCH, norm)
        rounded = [float(f"{loss:.9g}") for loss in losses]
        lines.append(json.dumps({"flags": flags, "losses": rounded}))
        print(f"{flags}: {losses[0]:.4f} to {losses[-1]:.4f}")
    head = {
        "written by": f"tests/train/torch_parity.py --write-golden, torch {torch.__version__.split('+')[0]}",
        "data": {"images": len(labels), "side": GOLDEN_SIDE, "classes": GOLDEN_CLASSES},
        "model": GOLDEN_MODEL,
        "flags": f"--batch-size {GOLDEN_BATCH} --epochs 1 --seed {GOLDEN_SEED} --no-shuffle "
        "--no-eval --mean 0.5 --std 0.5 --log-interval 1",
    }
    text = json.dumps(head, indent=1)[:-2] + ',\n "series": [\n  ' + ",\n  ".join(lines)
    path.write_text(text + "\n ]\n}\n")
    return 0


def run(args: argparse.Namespace, work: pathlib.Path) -> int:
    import torch

    torch.set_num_threads(1)
    images, labels = torch_ddp.load_set(args.data, BATCH * args.steps)
    if len(labels) < BATCH * args.steps:
        print(f"torch_parity.py: {len(labels)} images are too few: {args.steps} steps of {BATCH}")
        return 2
    print(f"torch {torch.__version__}, {args.steps} steps of {BATCH} images", flush=True)
    results = [torch_rates.hold()]
    for name, cases in NETS:
        for case in cases:
            steps = min(args.steps, MOST_STEPS.get((name, case[0]), args.steps))
            few = argparse.Namespace(**{**vars(args), "steps": steps})
            count = BATCH * steps
            results.append(holds(few, work, name, case, images[:count], labels[:count]))
    print(f"{sum(results)} of {len(results)} cases hold")
    return 0 if all(results) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares gyre's losses with PyTorch's.")
    add = parser.add_argument
    add("--gyre", default="build/gyre", help="the gyre binary")
    add("--data", default="fashion-mnist", help="name, or directory of the four .gz files")
    add("--write-golden", type=pathlib.Path, help="write the golden series to this file, no more")
    add("--write-rates", type=pathlib.Path, help="write the rates to this file, no more")
    add("--steps", type=int, default=100)
    add("--seed", type=int, default=1, help="of the initial weights, the first to try")
    add("--seeds", type=int, default=6, help="how many seeds to try")
    add("--work", type=pathlib.Path, help="keep the files here (default: a temporary directory)")
    add("--timeout", type=float, default=300, help="seconds that one run of gyre may take")
    add("--python", help="interpreter with torch (default: the first found)")
    add("--here", action="store_true", help=argparse.SUPPRESS)  # already in that interpreter
    args = parser.parse_args()

    python = torch_ddp.find_python(args.python)
    if not python:
        print(f"torch_parity.py: skipped: {torch_ddp.no_torch(args.python)}")
        return SKIPPED
    if python != sys.executable and not args.here:
        sys.stdout.flush()
        os.execvp(python, [python, __file__, *sys.argv[1:], "--python", python, "--here"])
    if args.write_golden:
        return write_golden(args.write_golden)
    if args.write_rates:
        return torch_rates.write(args.write_rates)
    if not os.access(args.gyre, os.X_OK):
        print(f"torch_parity.py: no gyre binary at {args.gyre}")
        return 2
    try:
        torch_ddp.dataset_dir(args.data)
    except FileNotFoundError as error:
        print(f"torch_parity.py: {error}")
        return 2
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
        return run(args, args.work)
    with tempfile.TemporaryDirectory(prefix="gyre-parity-") as folder:
        return run(args, pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
