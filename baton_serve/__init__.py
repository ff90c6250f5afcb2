"""Baton's only name in site-packages: the `baton` command, which finds Baton's packages.

They have common names, such as `shared`. A wheel has them in `_code`, a checkout in the folder above.
"""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.1.0"

HERE = Path(__file__).parent
CODE = HERE / "_code" if (HERE / "_code").is_dir() else HERE.parent


def put_code_first() -> None:
    """Let this process import Baton's packages, before others of the same names."""
    sys.path.insert(0, str(CODE))
