"""A daemon that ends to come back: the same process, a fresh program, in the same role or the other one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def argv_as(role: str, original: Sequence[str], own: Sequence[str]) -> list[str]:
    """The command line to start again with.

    `original` is the interpreter's own (with its options, as in sys.orig_argv), `own` what stands behind the program's
    name: a role's word first, then its flags.

        python -P -m deploy.cli  decode --router ...  ->  python -P -m deploy.cli  prefill --router ...
    """
    before = list(original[: len(original) - len(own)])
    return [*before, role, *own[1:]]


def start_again(role: str) -> NoReturn:
    """Never returns: the process keeps its id, its parent and the pipe of its log."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, argv_as(role, sys.orig_argv, sys.argv[1:]))
