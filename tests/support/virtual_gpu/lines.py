"""pytest plugin (-p tests.support.virtual_gpu.lines): which lines of some files ran, in all threads. The files stand in
BATON_LINES_OF, separated by colons; the answer, {file: [lines]} as JSON, goes to BATON_LINES_TO at the end.

Loaded before any test and any of those files, so that their heads count too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ran: dict[str, set[int]] = defaultdict(set)
wanted = frozenset(filter(None, os.environ.get("BATON_LINES_OF", "").split(":")))


def executable(path: str) -> set[int]:
    """Lines of a file that can run."""
    found: set[int] = set()
    todo = [compile(Path(path).read_text(), path, "exec")]
    while todo:
        code = todo.pop()
        found.update(line for line in lines_of(code))
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


def lines_of(code: CodeType) -> Iterator[int]:
    """Lines of the code object, without the head of its function: the code around it runs that one."""
    for _, _, line in code.co_lines():
        if line and (line != code.co_firstlineno or code.co_name == "<module>"):
            yield line


def trace(frame: FrameType, event: str, arg: Any) -> Any:
    if frame.f_code.co_filename not in wanted:
        return None
    note(frame, event, arg)
    return note


def note(frame: FrameType, event: str, arg: Any) -> Any:
    if event == "line":
        ran[frame.f_code.co_filename].add(frame.f_lineno)
    return note


def pytest_unconfigure() -> None:
    sys.settrace(None)
    threading.settrace(None)
    if wanted:
        Path(os.environ["BATON_LINES_TO"]).write_text(json.dumps({path: sorted(lines) for path, lines in ran.items()}))


if wanted:
    threading.settrace(trace)
    sys.settrace(trace)
