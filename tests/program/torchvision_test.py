#!/usr/bin/env python3
"""The nets of examples/ and of `gyre import`, with the weights of torchvision's, give torchvision's answers; and the walk of
docs/own-net.md: a net of torchvision's is imported, fine-tuned on pictures of five other classes, and knows them. Pictures
are transformed as by torchvision.

    tests/program/torchvision_test.py BUILD EXAMPLES    the folder with gyre and unit_tests, and that of the model files;
                                                        PYTHON=… a Python with torchvision, if not this one

Exit code 77 where there is no Python with torch, torchvision and numpy.
"""

from __future__ import annotations

import copy
import csv
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import zlib

from python_with import require_modules

# The pictures' side for each net.
NETS = {"resnet18": 64, "resnet50": 64, "densenet121": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64,
        "efficientnet_b0": 64, "vgg11_bn": 224, "squeezenet1_1": 72,
        "shufflenet_v2_x1_0": 64}  # fmt: skip
CLASSES, IMAGES = 10, 12
MEAN, STD = 0.5, 0.25


def save_safetensors(path: pathlib.Path, tensors: dict, metadata: dict[str, str]) -> None:
    header, data = {"__metadata__": metadata}, bytearray()
    for name, tensor in tensors.items():
        raw = tensor.detach().numpy().tobytes()
        kind = {"torch.float32": "F32", "torch.int64": "I64"}[str(tensor.dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def by_order(model) -> dict:
    """The state_dict under gyre's names: layers numbered by their kinds, in torchvision's order."""
    from torch import nn

    kinds = {nn.Conv2d: "conv", nn.BatchNorm2d: "bn", nn.Linear: "fc"}
    counts, tensors = dict.fromkeys(kinds, 0), {}
    for module in model.modules():
        if type(module) in kinds:
            counts[type(module)] += 1
            name = f"{kinds[type(module)]}{counts[type(module)]}"
            tensors |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
    return tensors


def run(*words: object, **more: str) -> str:
    environment = os.environ | {"PYTHON": sys.executable} | more
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def predicted(gyre: pathlib.Path, weights: pathlib.Path, pixels):
    """gyre's probabilities for pixels [N][3][H][W], as [N][classes]."""
    import numpy

    with tempfile.TemporaryDirectory(prefix="gyre-torchvision-") as folder:
        images = pathlib.Path(folder, "images-idx4-ubyte")
        images.write_bytes(struct.pack(">BBBB4I", 0, 0, 8, 4, *pixels.shape) + pixels.tobytes())
        table = run(gyre, "predict", "--weights", weights, "--csv", "--top", CLASSES, "--device", "cpu", images)
    ours = numpy.zeros((len(pixels), CLASSES))
    for row in csv.DictReader(table.splitlines()):
        ours[int(row["image"].rsplit("[", 1)[1][:-1]), int(row["class"])] = float(row["probability"])
    return ours


def normalises(gyre: pathlib.Path) -> bool:
    """PyTorch's norms, with and without parameters, are imported as groups of channels."""
    import numpy
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 6, 3),
                          nn.InstanceNorm2d(6, affine=True), nn.GELU(), nn.GroupNorm(3, 6, eps=0.01, affine=False),
                          nn.Flatten(), nn.Linear(6 * 12 * 12, 20), nn.LayerNorm(20), nn.ReLU(),
                          nn.Linear(20, CLASSES)).eval()  # fmt: skip
    pixels = numpy.random.default_rng(1).integers(0, 256, (IMAGES, 3, 16, 16), dtype=numpy.uint8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        x = torch.from_numpy(pixels).float() / 255
        theirs = model(x).softmax(1).numpy()
    with tempfile.TemporaryDirectory(prefix="gyre-torchvision-") as folder:
        work = pathlib.Path(folder)
        torch.onnx.export(model, x[:1], str(work / "net.onnx"), dynamo=False,
                          training=torch.onnx.TrainingMode.PRESERVE)  # fmt: skip
        run(gyre, "import", work / "net.onnx", "-o", work / "net", "--mean=0", "--std=1")
        apart = float(abs(predicted(gyre, work / "net" / "net.safetensors", pixels) - theirs).max())
    spread = float(abs(theirs - theirs[0]).max())
    good = apart < 1e-5 < 0.1 < spread  # six digits are printed, and few operations round
    print(f"{'ok    ' if good else 'FAILED'} norms: {apart:.1e} apart, images {spread:.2f}")
    return good


def holds(gyre: pathlib.Path, examples: pathlib.Path, name: str, side: int) -> bool:
    import numpy
    import torch
    import torchvision

    torch.manual_seed(1)
    model = getattr(torchvision.models, name)(num_classes=CLASSES)
    pixels = numpy.random.default_rng(1).integers(0, 256, (IMAGES, 3, side, side), dtype=numpy.uint8)
    pixels //= numpy.arange(1, IMAGES + 1, dtype=numpy.uint8).reshape(-1, 1, 1, 1)  # images that differ
    x = (torch.from_numpy(pixels).float() / 255 - MEAN) / STD
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0  # the running statistics become those of these images
                module.weight += 0.2 * torch.randn_like(module.weight)  # they begin as ones and zeros
                module.bias += 0.2 * torch.randn_like(module.bias)
        model.train()
        model(x)
        model.eval()
        logits = model(x)
        last = [module for module in model.modules() if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))][-1]
        last.weight /= (logits - logits.mean(0)).std()  # neither all alike nor certain
        theirs = model(x).softmax(1).numpy()
        exact = copy.deepcopy(model).double()(x.double()).softmax(1).numpy()
    spread = float(abs(exact - exact[0]).max())
    rounding = float(abs(theirs - exact).max())  # torch's own
    good = rounding < 1e-3 and spread > 0.1
    with tempfile.TemporaryDirectory(prefix="gyre-torchvision-") as folder:
        work = pathlib.Path(folder)
        facts = {"gyre.model": (examples / f"{name}.model").read_text()}
        facts |= {"gyre.shape": f"3x{side}x{side}", "gyre.classes": str(CLASSES)}
        facts |= {"gyre.mean": ",".join([str(MEAN)] * 3), "gyre.std": ",".join([str(STD)] * 3)}
        save_safetensors(work / "net.safetensors", by_order(model), facts)
        torch.onnx.export(model, x[:1], str(work / "net.onnx"), dynamo=False, input_names=["input"],
                          training=torch.onnx.TrainingMode.PRESERVE)  # fmt: skip
        run(gyre, "import", work / "net.onnx", "-o", work / "imported", f"--mean={MEAN}", f"--std={STD}")
        for way in ("net.safetensors", "imported/net.safetensors"):
            apart = float(abs(predicted(gyre, work / way, pixels) - exact).max())
            # Six digits are printed; Winograd's filtering rounds some times more than the formula. A wrong net is off by
            # as much as images differ.
            good = good and apart < 5 * rounding + 2e-6
            print(f"{name}, {way}: {apart:.1e} from float64 (torch's float32: {rounding:.1e}), images {spread:.2f} apart")
    print(f"{'ok    ' if good else 'FAILED'} {name}", flush=True)
    return good


def write_picture(path: pathlib.Path, pixels) -> None:
    """pixels: [height][width][3], uint8."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
                     + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))  # fmt: skip


def tensors_of(path: pathlib.Path) -> dict[str, bytes]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return {name: data[8 + size + facts["data_offsets"][0] : 8 + size + facts["data_offsets"][1]]
            for name, facts in header.items() if name != "__metadata__"}  # fmt: skip


def walks(gyre: pathlib.Path) -> bool:
    import numpy
    import torch
    import torchvision

    names, side = ("blue", "green", "grey", "red", "yellow"), 64
    colours = numpy.array([(40, 40, 200), (40, 160, 40), (120, 120, 120), (200, 40, 40), (200, 200, 40)])
    random = numpy.random.default_rng(1)

    def pictures(label: int, count: int):
        noise = random.integers(-40, 41, (count, side, side, 3))
        return (colours[label] + noise).clip(0, 255).astype(numpy.uint8)

    with tempfile.TemporaryDirectory(prefix="gyre-torchvision-") as folder:
        work = pathlib.Path(folder)
        train = numpy.concatenate([pictures(label, 16) for label in range(5)])
        for part, count in (("train", 16), ("test", 4)):
            for label, name in enumerate(names):
                found = train[16 * label : 16 * (label + 1)] if part == "train" else pictures(label, count)
                for i, pixels in enumerate(found):
                    write_picture(work / "pets" / part / name / f"{i}.png", pixels)
        torch.manual_seed(1)
        model = torchvision.models.resnet18()
        with torch.no_grad():  # running statistics as of a net that has seen pictures
            for module in model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.momentum = 1.0
            x = torch.from_numpy(train).permute(0, 3, 1, 2).float() / 255
            model.train()((x - MEAN) / STD)
        torch.onnx.export(model.eval(), torch.zeros(1, 3, side, side), str(work / "resnet18.onnx"), dynamo=False,
                          training=torch.onnx.TrainingMode.PRESERVE)  # fmt: skip
        imported, run_folder = work / "resnet18", work / "run"
        run(gyre, "import", work / "resnet18.onnx", "-o", imported, f"--mean={MEAN}", f"--std={STD}",
            "--resize", f"{side + 8},centercrop{side}")  # fmt: skip
        run(gyre, "train", "--data", work / "pets", "--model", imported / "net.model", "--init", imported / "net.safetensors",
            "--augment", "randomresizedcrop8,hflip", f"--mean={MEAN}", f"--std={STD}", "--finetune", "--freeze", "conv*,bn*",
            "--epochs", 20, "--batch-size", 16, "--lr", 0.05, "--device", "cpu", "--save", run_folder)  # fmt: skip
        before, after = tensors_of(imported / "net.safetensors"), tensors_of(run_folder / "best.safetensors")
        frozen = [name for name in before if name.startswith(("conv", "bn")) and name.endswith((".weight", ".bias"))]
        good = len(frozen) == 60 and all(before[name] == after[name] for name in frozen)
        good = good and len(after["fc1.weight"]) == 5 * 512 * 4
        right = 0
        for name in names:
            text = run(gyre, "predict", "--weights", run_folder / "best.safetensors", "--csv", "--top", 1, "--device", "cpu",
                       *sorted((work / "pets/test" / name).glob("*.png")))  # fmt: skip
            right += sum(row["name"] == name for row in csv.DictReader(text.splitlines()))
        good = good and right >= 18  # of 20; 4 by chance
    print(f"{'ok    ' if good else 'FAILED'} fine-tuning: {len(frozen)} tensors as they were, {right} of 20 pictures known")
    return good


def crops_and_erases(unit_tests: pathlib.Path) -> bool:
    """--augment randomresizedcrop8,randomerasing50 gives torchvision's images for the same parts, to one level of 255."""
    import numpy
    import torch
    from torchvision.transforms import functional

    shape, apart, erased = (3, 40, 56), 0, 0
    with tempfile.TemporaryDirectory(prefix="gyre-torchvision-") as folder:
        table = pathlib.Path(folder, "augmented")
        run(unit_tests, "augmented images for torchvision", GYRE_TEST_AUGMENTED=str(table))
        rows = numpy.loadtxt(table, dtype=numpy.int64)
    for row in rows:
        part, hole = row[:4].tolist(), row[4:8].tolist()
        ours, image = row[8:].reshape(2, *shape)
        theirs = functional.resized_crop(torch.from_numpy(image).byte(), *part, list(shape[1:]), antialias=True).long()
        if hole[2] > 0:
            theirs = functional.erase(theirs, *hole, v=torch.tensor(-1))
            erased += 1
        apart = max(apart, int(abs(theirs.numpy() - ours).max()))
        if not numpy.array_equal(ours < 0, theirs.numpy() < 0):
            apart = 255
    good = apart <= 1 and 0 < erased < len(rows)
    print(f"{'ok    ' if good else 'FAILED'} {len(rows)} crops, {erased} of them with a hole: {apart} of 255 apart at most")
    return good


def resizes(gyre: pathlib.Path) -> bool:
    """Pictures get the bytes of torchvision's Resize and CenterCrop, by which a net of one layer tells them apart."""
    import numpy
    import torch
    from PIL import Image
    from torchvision import transforms

    side, random = 32, numpy.random.default_rng(1)
    transform = transforms.Compose([transforms.Resize(41), transforms.CenterCrop(side), transforms.ToTensor()])
    torch.manual_seed(1)
    net = torch.nn.Linear(3 * side * side, CLASSES).double()
    with tempfile.TemporaryDirectory(prefix="gyre-torchvision-") as folder:
        work = pathlib.Path(folder)
        facts = {"gyre.model": "linear classes\n", "gyre.shape": f"3x{side}x{side}", "gyre.classes": str(CLASSES)}
        facts |= {"gyre.mean": "0,0,0", "gyre.std": "1,1,1", "gyre.resize": f"41,centercrop{side}"}
        save_safetensors(work / "net.safetensors", {f"fc1.{k}": v.float() for k, v in net.state_dict().items()}, facts)
        names, theirs = [], []
        for number, (height, width) in enumerate([(97, 140), (140, 97), (41, 41), (30, 33), (64, 301), (32, 32)]):
            names.append(work / f"{number}.png")
            write_picture(names[-1], random.integers(0, 256, (height, width, 3), dtype=numpy.uint8))
            x = transform(Image.open(names[-1])).double()
            theirs.append(net(x.flatten()).softmax(0).detach().numpy())
        table = run(gyre, "predict", "--weights", work / "net.safetensors", "--csv", "--top", CLASSES, *names)
    apart = max(abs(float(row["probability"]) - theirs[int(pathlib.Path(row["image"]).stem)][int(row["class"])])
                for row in csv.DictReader(table.splitlines()))  # fmt: skip
    # Six digits are printed. Other bytes change the logits by a hundredth of their size or more.
    good = apart < 2e-6
    print(f"{'ok    ' if good else 'FAILED'} Resize(41), CenterCrop({side}): probabilities {apart:.1e} apart")
    return good


def main() -> int:
    require_modules("numpy", "onnx", "torch", "torchvision")
    gyre, examples = pathlib.Path(sys.argv[1]).resolve() / "gyre", pathlib.Path(sys.argv[2])
    return 0 if all([crops_and_erases(gyre.parent / "unit_tests"), resizes(gyre), normalises(gyre), walks(gyre),
                     *(holds(gyre, examples, name, side) for name, side in NETS.items())]) else 1


if __name__ == "__main__":
    sys.exit(main())
