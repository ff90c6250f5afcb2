"""Other versions of Baton, to run beside this tree: the one before, from its commit, and the next one, made from a copy
of this tree with a patch that changes the protocol in every allowed way.

`neighbour.txt` has the last commit of the version before ours. While ours is the first with neighbours, it is that one.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shared.wire.versions import PROTOCOL_VERSION
from tests.support.machine.installed import FOLDERS, ROOT

COMMIT = (Path(__file__).parent / "neighbour.txt").read_text("ascii").strip()
NEXT = PROTOCOL_VERSION + 1
Edit = tuple[str, str, str]  # file, old text, new text
VERSIONS, MESSAGES = "shared/wire/versions.py", "shared/wire/messages.py"
NODE, GATEWAY = "shared/node/loop/node.py", "router/dispatch/gateway.py"

VERSION: tuple[Edit, ...] = ((VERSIONS, f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n", f"PROTOCOL_VERSION = {NEXT}\n"),)
FIELD_ADDED: tuple[Edit, ...] = (
    (VERSIONS, "SINCE: dict[str, int] = {", f'SINCE: dict[str, int] = {{"Heartbeat.mood": {NEXT}, '),
    (MESSAGES, "\n\n\nclass CacheEvents(", '\n    mood: Text = "unsaid"\n\n\nclass CacheEvents('),
    (NODE, "lacks=lacks,", 'lacks=lacks, mood="content",'),
    (
        GATEWAY,
        "        node = self._registry.heartbeat(beat, now)\n",
        "        node = self._registry.heartbeat(beat, now)\n"
        '        self._log_once.info((beat.node_id, "mood"), "a mood", of=beat.node_id, mood=beat.mood)\n',
    ),
)
FIELD_IN_GRACE: tuple[Edit, ...] = (
    (VERSIONS, "GONE: dict[str, int] = {", f'GONE: dict[str, int] = {{"NodeLoad.cores": {NEXT}, '),
    ("shared/wire/node_parts.py", "    cores: Text  #", '    cores: Text = ""  #'),
    ("router/api/admin/admin.py", 'load.cores if load else ""', '""'),
)
FIELD_DELETED: tuple[Edit, ...] = (
    (MESSAGES, "    lacks: Annotated[list[Name], Meta(max_length=MAX_NAMES)] = []", ""),
    (NODE, "lacks=lacks, ", ""),
    ("router/fleet/registry.py", "beat.lacks", "()"),
    ("router/dispatch/reports.py", "len(beat.lacks)", "0"),
)
MESSAGE_ADDED: tuple[Edit, ...] = (
    (VERSIONS, "SINCE: dict[str, int] = {", f'SINCE: dict[str, int] = {{"Cheer": {NEXT}, '),
    (MESSAGES, "class Goodbye(", "class Cheer(Message, frozen=True):\n    of: Name\n\n\nclass Goodbye("),
    (MESSAGES, " | FramesTaken\n)", " | FramesTaken | Cheer\n)"),
    (NODE, "    CacheReplay,\n", "    CacheReplay,\n    Cheer,\n"),
    (
        NODE,
        "            self.ctx.outbox.send(link.peer, beat)\n",
        "            self.ctx.outbox.send(link.peer, beat)\n"
        "            self.ctx.outbox.send(link.peer, Cheer(facts.node_id))\n",
    ),
    (
        NODE,
        "        elif isinstance(message, Spending):\n",
        "        elif isinstance(message, Cheer):\n"
        '            self.ctx.log.info(("cheer",), "a cheer", of=message.of)\n'
        "        elif isinstance(message, Spending):\n",
    ),
    (GATEWAY, "    CacheReplay,\n", "    CacheReplay,\n    Cheer,\n"),
    (
        GATEWAY,
        "            self._tell_share(node)\n",
        "            self._tell_share(node)\n            self._link.send(node.peer, Cheer(self._identity[0]))\n",
    ),
    (
        GATEWAY,
        "            elif isinstance(message, Goodbye):\n",
        "            elif isinstance(message, Cheer):\n"
        '                self._log_once.info((message.of, "cheer"), "a cheer", of=message.of)\n'
        "            elif isinstance(message, Goodbye):\n",
    ),
)
PATCH = (*VERSION, *FIELD_ADDED, *FIELD_IN_GRACE, *FIELD_DELETED, *MESSAGE_ADDED)


def next_version(folder: Path) -> Path:
    """Make the patched copy, with this checkout's compiled kernels."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, old, new in PATCH:
        text = (folder / name).read_text("utf-8")
        assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
        (folder / name).write_text(text.replace(old, new), "utf-8")
    return folder


def version_before(folder: Path) -> Path:
    """Unpack the neighbour's commit."""
    folder.mkdir(parents=True)
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=git("archive", COMMIT), check=True)
    return folder


def of_neighbour(path: str) -> str:
    """Return a file's text in the neighbour's commit."""
    return git("show", f"{COMMIT}:{path}").decode()


def git(*words: str) -> bytes:
    """Skip the test in a source tree without git, and in a shallow clone."""
    known = subprocess.run(["git", "cat-file", "-e", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if not (ROOT / ".git").exists() or known.returncode:
        pytest.skip(f"this tree has no commit {COMMIT[:8]} of the version before; git fetch --unshallow gets it")
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout
