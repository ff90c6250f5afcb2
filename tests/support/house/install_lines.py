"""Lines that install something: found in texts, taken apart, and run by pip without changing anything."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

LINE = re.compile(r"\bpip3? install ([^`\n]+)")
END = re.compile(r"&&|[;|#\\]")
WITH_VALUE = {
    "-r",
    "-c",
    "--requirement",
    "--constraint",
    "--index-url",
    "--extra-index-url",
    "--find-links",
    "--target",
}
# pip with nothing but what is here already: no network, no settings of this user, nothing written
OFFLINE = ["--isolated", "--dry-run", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a line asks for: extras of a file or folder, and requirements that only an index can meet."""

    extras: frozenset[str]
    from_index: tuple[Requirement, ...]


def lines_in(text: str) -> Iterator[str]:
    """What follows `pip install`, up to the end of the command."""
    for found in LINE.finditer(text):
        yield END.split(found[1])[0]


def wanted_by(line: str) -> Wanted:
    words = [word.strip("'\"()") for word in line.split()]
    values = {i + 1 for i, word in enumerate(words) if word in WITH_VALUE}
    named = [word for i, word in enumerate(words) if word and word[0] not in "-$" and i not in values]
    paths = [word for word in named if word.startswith((".", "/")) or ".whl" in word]
    bracketed = re.findall(r"\[([\w,]+)\]", " ".join(paths))
    extras = frozenset(name for group in bracketed for name in group.split(","))
    return Wanted(extras, tuple(Requirement(word) for word in named if word not in paths))


def dry_run(line: str, *options: str, cwd: Path) -> str:
    """Run a printed line as it is, and return what pip said. Changes nothing."""
    done = subprocess.run(
        [*shlex.split(line), *OFFLINE, *options], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
