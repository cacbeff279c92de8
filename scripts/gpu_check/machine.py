"""Finds what a check needs on this machine: a GPU, data, and a build."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from check import ROOT


def gpus() -> str:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def has_images(folder: pathlib.Path) -> bool:
    return any(folder.glob("train-images*"))


def find_data(wanted: str) -> str:
    """A folder with images, or an empty string."""
    if wanted and has_images(pathlib.Path(wanted)):
        return str(pathlib.Path(wanted).resolve())
    places = [pathlib.Path(p) for p in os.environ.get("GYRE_DATA", "").split(":") if p]
    places += [ROOT / "data-cache", pathlib.Path.home() / ".cache" / "gyre",
               pathlib.Path("/usr/local/share/datasets"), pathlib.Path("/usr/share/datasets")]
    names = [wanted] if wanted else ["mnist", "fashion-mnist"]
    candidates = ([] if wanted else places) + [p / name for name in names for p in places]
    return next((str(p) for p in candidates if has_images(p)), "")


def make_build(build: pathlib.Path, device: str) -> bool:
    log = build.with_name(build.name + "-gpu-check.log")
    print(f"building in {build} (log: {log})", flush=True)
    architecture = "90" if device == "emulated" else "native"
    with open(log, "wb") as out:
        for words in (["cmake", "--preset", "release", "-B", str(build),
                       f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"], ["cmake", "--build", str(build)]):
            if subprocess.call(words, cwd=ROOT, stdout=out, stderr=out) != 0:
                print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
                print(f"gpu-check: the build failed; the complete log is in {log}", file=sys.stderr)
                return False
    return True
