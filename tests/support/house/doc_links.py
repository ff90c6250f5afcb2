"""What Markdown files name: links and anchors, files of this repository, `baton` command lines. Each is looked up.

Knows nothing of what the pages say, and opens no address outside of the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from deploy.cli import make_parser
from tests.support.house.launch_lines import WORDS, shell_lines

ROOT = Path(__file__).resolve().parents[3]
SKIPPED = {"build", "dist", "node_modules"}  # and all hidden folders
FENCE = re.compile(r"^ *```(\w*)\s*$")
SHELLS = {"", "sh", "bash", "shell", "console"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`]+)`")
HEADING = re.compile(r"^(#{1,6}) +(.*?)\s*#*$")
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
FOLDERS = "router|prefill_node|decode_node|shared|deploy|benchmarks|tests|docs|examples"
FILE = re.compile(rf"^(?:{FOLDERS})/[\w./*-]+$")
TEST_FILE = re.compile(r"^test_\w+\.py$")
COMMAND = re.compile(rf"\bbaton ({'|'.join(sorted(WORDS))})\b")
OUTSIDE = re.compile(r"^[a-z][a-z0-9+.-]*:")


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown files of a checkout, without what was installed or built there."""
    found = (path.relative_to(root) for path in root.rglob("*.md"))
    return sorted(root / path for path in found if not any(p in SKIPPED or p[0] == "." for p in path.parts[:-1]))


def split(text: str) -> tuple[list[str], list[str]]:
    """Return the lines outside of code blocks, and the texts of those blocks that are for a shell."""
    prose: list[str] = []
    blocks: list[list[str]] = []
    language: str | None = None
    for line in text.splitlines():
        fence = FENCE.match(line)
        if fence is not None:
            language = fence[1] if language is None else None
            blocks.append([])
        elif language is None:
            prose.append(line)
        elif language in SHELLS:
            blocks[-1].append(line)
    return prose, ["\n".join(block) for block in blocks if block]


def anchor_of(title: str) -> str:
    """GitHub's: lower case, no punctuation, hyphens for spaces; of a link only its text."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return NOT_IN_ANCHORS.sub("", shown.strip().lower()).replace(" ", "-")


@functools.cache
def anchors(text: str) -> set[str]:
    """A title that comes again gets a number."""
    found: set[str] = set()
    for line in split(text)[0]:
        heading = HEADING.match(line)
        if heading is not None:
            name = anchor_of(heading[2])
            count = sum(other == name or re.fullmatch(rf"{re.escape(name)}-\d+", other) is not None for other in found)
            found.add(f"{name}-{count}" if count else name)
    return found


def wrong_links(page: Path) -> Iterator[str]:
    """Yield each relative link whose file or anchor is not there."""
    for line in split(page.read_text("utf-8"))[0]:
        for target in LINK.findall(INLINE.sub("", line)):
            if OUTSIDE.match(target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield f"{target}: no such file"
            elif anchor and (file.suffix != ".md" or anchor not in anchors(file.read_text("utf-8"))):
                yield f"{target}: no such heading"


def wrong_files(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield each `path/in/backticks` of this repository, and each test file, that is not there."""
    for line in split(page.read_text("utf-8"))[0]:
        for name in INLINE.findall(line):
            is_there = True
            if FILE.match(name):
                is_there = any(root.glob(name.rstrip("/")))
            elif TEST_FILE.match(name):
                is_there = any((root / "tests").rglob(name))
            if not is_there:
                yield f"{name}: no such file"


@functools.cache
def parser() -> argparse.ArgumentParser:
    return make_parser()


def wrong_commands(page: Path) -> Iterator[str]:
    """Yield each `baton` line of a shell's code block that the real parser refuses. Nothing is run."""
    for block in split(page.read_text("utf-8"))[1]:
        for line in block.replace("\\\n", " ").splitlines():
            if COMMAND.search(line):
                yield from refusals(line)


def refusals(line: str) -> Iterator[str]:
    """Yield what the parser says of each command in a line."""
    try:
        commands = list(shell_lines(line.replace(" ...", "")))
    except ValueError as error:
        yield f"{line}: {error}"
        return
    for words in commands:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                parser().parse_args(words)
        except SystemExit as end:
            if end.code:
                yield f"baton {shlex.join(words)}: {said.getvalue().splitlines()[-1]}"
