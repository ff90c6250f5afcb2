"""Restart a daemon, in the same or the other role."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def argv_as(role: str, original: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the command line of the new program.

    `original`: sys.orig_argv, with the interpreter's options. `own`: sys.argv[1:], beginning with the role.

        baton  decode --router ...  ->  baton  prefill --router ...
    """
    before = list(original[: len(original) - len(own)])
    return [*before, role, *own[1:]]


def start_again(role: str) -> NoReturn:
    """Replace the program. The process keeps its id, parent and log pipe."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, argv_as(role, sys.orig_argv, sys.argv[1:]))
