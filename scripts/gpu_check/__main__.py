"""Checks and measures gyre on this machine's GPU in less than 10 minutes.

BUILD_DIR is used unchanged if it contains gyre, and built otherwise; it may be a file that scripts/pack.sh
wrote on another machine. cuDNN, cuBLAS and NCCL are also found in the packages of python3. Each step has
its own time limit. Whatever happens, ARCHIVE gets all logs and figures, and the output ends with the
summary.
Exit codes: 0; 1: a step failed; 2: wrong use, or the build failed; 77: no GPU here; 128 + n: ended by
signal n.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tarfile
import tempfile
import time

from check import ROOT, Check
from machine import find_data, gpus, make_build
from step_runner import Runner
from steps import BUDGET, make_steps


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu-check.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default=str(ROOT / "build"), metavar="BUILD_DIR",
                        help="default: build")
    parser.add_argument("archive", nargs="?", metavar="ARCHIVE", help="default: gpu-check-DATE.tar.gz",
                        default=time.strftime("gpu-check-%Y%m%d-%H%M%S.tar.gz"))
    parser.add_argument("--data", default="", help="name or folder of the images; default: mnist, or else "
                        "fashion-mnist, in $GYRE_DATA, data-cache, /usr/share/datasets, ...")
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda",
                        help="emulated: tests the check itself without a GPU, on very little data")
    args = parser.parse_args()
    archive = pathlib.Path(args.archive).absolute()
    if not archive.name.endswith(".tar.gz") or archive.is_dir():
        parser.error(f"ARCHIVE {args.archive}: expected a file that ends in .tar.gz")
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"ARCHIVE {args.archive}: {error}")
    if not os.access(archive.parent, os.W_OK):
        parser.error(f"ARCHIVE {args.archive}: its folder cannot be written")
    if args.device == "cuda" and "GPU " not in gpus():
        print(f"gpu-check: no GPU on {os.uname().nodename}: nvidia-smi is missing or lists none; "
              "nothing was checked", file=sys.stderr)
        return 77
    build = pathlib.Path(args.build).absolute()
    if build.is_file():
        with tempfile.TemporaryDirectory(prefix="gyre-check-build-") as unpacked:
            try:
                with tarfile.open(build) as tar:
                    tar.extractall(unpacked)
            except (OSError, tarfile.TarError) as error:
                parser.error(f"BUILD_DIR {args.build}: neither a folder nor a pack: {error}")
            return check(pathlib.Path(unpacked), archive, args)
    return check(build, archive, args)


def check(build: pathlib.Path, archive: pathlib.Path, args: argparse.Namespace) -> int:
    complete = all(os.access(build / name, os.X_OK) for name in ("gyre", "unit_tests"))
    if not complete and not make_build(build, args.device):  # scripts/train.sh builds only gyre
        return 2

    os.environ.setdefault("NCCL_DEBUG", "WARN")
    os.environ.setdefault("CUDA_LOG_FILE", "stderr")  # CUDA explains its errors there
    emulated = args.device == "emulated"
    with tempfile.TemporaryDirectory(prefix="gyre-check-logs-") as folder:
        c = Check(build, pathlib.Path(folder), find_data(args.data), args.device)
        try:
            # On a busy machine the emulator may take longer than a GPU.
            runner = Runner(c.folder, archive, f"gyre on {args.device}", 3.0 if emulated else 1.0,
                            1e9 if emulated else BUDGET,
                            probe=c.train("probe", "ours", "--limit", 64) if c.data else None,
                            beside=None if emulated else c.call("hold-context"))
            return runner.run(make_steps(c))
        finally:
            c.close()


if __name__ == "__main__":
    sys.exit(main())
