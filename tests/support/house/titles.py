"""Check the titles of commits: a reader of the history learns from each what it brings.

    python -m tests.support.house.titles        of the commits since SINCE; exit status 1 if one is refused

Where there is no history, as in a wheel's sources or in a shallow clone, nothing is looked at.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.support.house.house import ROOT

SINCE = "c334a8f2fe12b337d31aa47a9b69e8ea1db5eb8d"  # before it, titles are as they are
MOST_CHARACTERS = 72
SAYS_NOTHING = re.compile(
    r"(?i)^(merge (a line|(remote-tracking )?branch|pull|tag)\b|wip\b|fixup!|squash!"
    r"|(merge|fix|update|changes?|misc|cleanup|more)\W*$)"
)
OF_A_MACHINE = re.compile(r"(?<![\w.])/(work|tmp|home|root|mnt|Users|var/tmp)/\w|\b[A-Z]:\\")
BY_A_SERVER = re.compile(r"^Merge [0-9a-f]{40} into [0-9a-f]{40}$")  # made for one run of CI on a pull request


def faults(titles: Sequence[str]) -> Iterator[str]:
    """Say what is wrong with each title that is."""
    for title, times in Counter(titles).items():
        if BY_A_SERVER.search(title):
            continue
        if len(title) > MOST_CHARACTERS:
            yield f"{len(title)} characters, not {MOST_CHARACTERS}: {title}"
        if SAYS_NOTHING.search(title):
            yield f"says not what it brings (rebase or squash a line of work under a title that does): {title}"
        if OF_A_MACHINE.search(title):
            yield f"names a folder of a machine: {title}"
        if times > 1:
            yield f"stands {times} times: {title}"


def titles_since(commit: str) -> list[str] | None:
    """Return None where the commit is not known."""
    told = subprocess.run(
        ("git", "log", "--format=%s", f"{commit}..HEAD"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.splitlines() if told.returncode == 0 else None


def main() -> int:
    try:
        titles = titles_since(SINCE)
    except FileNotFoundError:  # no git
        titles = None
    if titles is None:
        print(f"titles: not looked at, since git knows no commit {SINCE[:8]} here")
        return 0
    found = [*faults(titles)]
    print("\n".join([*found, f"titles: {len(found)} refused" if found else "titles: clean"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
