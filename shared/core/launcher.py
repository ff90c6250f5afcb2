"""Starts modules of Baton in processes that run their parent's copy of the code.

    python -P .../shared/core/launcher.py deploy.cli decode --router ...

`python -m` could find another `shared`, in the current directory or in PYTHONPATH.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

CODE = Path(__file__).parents[2]  # has our packages


def is_checkout() -> bool:
    return (CODE / "pyproject.toml").is_file()


def command(module: str, *args: str) -> list[str]:
    """Return the command line that runs `module`, e.g. "deploy.cli"."""
    return [sys.executable, "-P", __file__, module, *args]  # -P: without `shared/core` in sys.path


if __name__ == "__main__":
    sys.path.insert(0, str(CODE))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
