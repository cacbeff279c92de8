"""For tests that need Python packages of others."""

from __future__ import annotations

import importlib.util
import os
import sys


def require_modules(*names: str) -> None:
    """Goes on in a Python that has these: this one, or the one in PYTHON, which is then run; else ends with 77."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    python = os.environ.pop("PYTHON", None)  # asked once
    if missing and python:
        os.execv(python, [python, *sys.argv])
    if missing:
        print(f"skipped: no {', '.join(missing)} in {sys.executable}; PYTHON=… names another Python")
        sys.exit(77)
