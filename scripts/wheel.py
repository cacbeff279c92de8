#!/usr/bin/env python3
"""Makes a Python wheel of a build: the program as `gyre` on the PATH and as `python -m gyre`; no bindings.

    scripts/wheel.py BUILD_DIR [OUT_DIR]        default: BUILD_DIR

It holds what the archive holds (`cpack -G TGZ`), below the environment's own folder, and needs no compiler to install:
pip install gyre-VERSION-py3-none-PLATFORM.whl
"""

from __future__ import annotations

import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import zipfile

MAIN = '''"""gyre, a data-parallel trainer for convolutional nets: `python -m gyre` runs the program."""

import os
import pathlib
import sys
import sysconfig


def find_gyre() -> str:
    """The path of the program that this package was installed with."""
    here = pathlib.Path(__file__).resolve()
    for folder in (sysconfig.get_path("scripts"), *(parent / "bin" for parent in here.parents)):
        if os.access(program := pathlib.Path(folder) / "gyre", os.X_OK):
            return str(program)
    raise FileNotFoundError("the program `gyre` is not where pip installed it; install the package again")


def main() -> None:
    program = find_gyre()
    os.execv(program, [program, *sys.argv[1:]])
'''


def glibc_of(files: list[pathlib.Path]) -> str:
    """The newest version of the C library's symbols that the files need, as in 2_34."""
    text = subprocess.run(["objdump", "-T", *files], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_(\d+\.\d+)", text)}
    return "_".join(map(str, max(versions)))


def main() -> None:
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    build = pathlib.Path(sys.argv[1])
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else build
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for component in ("program", "bundle"):
            subprocess.run(["cmake", "--install", build, "--prefix", root, "--component", component, "--strip"],
                           check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        version = re.match(r"gyre (\S+)", subprocess.run([root / "bin/gyre", "--version"], capture_output=True,
                                                         text=True, check=True).stdout).group(1)  # fmt: skip
        programs = [root / "bin/gyre", *(p for p in (root / "lib/gyre").glob("*.so*") if not p.is_symlink())]
        tag = f"py3-none-manylinux_{glibc_of(programs)}_{platform.machine()}"
        wheel, info, data = (f"gyre-{version}-{tag}.whl", f"gyre-{version}.dist-info", f"gyre-{version}.data")
        files: dict[str, tuple[bytes, int]] = {}
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root)
            # A wheel has no links: a library is there once, by the name that programs ask for.
            links = [p.name for p in path.parent.iterdir() if p.is_symlink() and p.resolve() == path.resolve()]
            if path.is_dir() or path.is_symlink():
                continue
            name = name.with_name(links[0]) if links else name
            place = f"scripts/{name.name}" if name.parts[0] == "bin" else f"data/{name}"
            files[f"{data}/{place}"] = (path.read_bytes(), path.stat().st_mode)
        files["gyre/__init__.py"] = (MAIN.encode(), 0o100644)
        files["gyre/__main__.py"] = (b"from gyre import main\n\nmain()\n", 0o100644)
        readme = (root / "share/doc/gyre/README.md").read_text()
        files[f"{info}/METADATA"] = ((f"Metadata-Version: 2.1\nName: gyre\nVersion: {version}\nLicense: Apache-2.0\n"
                                      "Summary: A data-parallel trainer for convolutional nets\nRequires-Python: >=3.8\n"
                                      f"Description-Content-Type: text/markdown\n\n{readme}").encode(), 0o100644)  # fmt: skip
        files[f"{info}/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: gyre\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), 0o100644)
        for name in ("LICENSE", "NOTICE"):
            files[f"{info}/{name}"] = ((root / "share/doc/gyre" / name).read_bytes(), 0o100644)
        record = [f"{info}/RECORD,,"]
        with zipfile.ZipFile(out / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, (content, mode) in files.items():
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                record.append(f"{name},sha256={digest},{len(content)}")
                entry = zipfile.ZipInfo(name)
                entry.external_attr = mode << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, content)
            archive.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    print(out / wheel)


if __name__ == "__main__":
    main()
