"""An environment of its own for each client, in build/clients: a venv, or a folder of npm's. Made when missing.

python -m tests.clients.environment aiperf          makes one
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from shared.core import launcher
from tests.clients.alone import why_not_alone
from tests.clients.table import Client, Kind, named

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "clients"
PROGRAMS = Path(__file__).resolve().parent
INTERPRETERS = {".py": [sys.executable], ".java": ["java"], ".go": ["go", "run"]}
NUMBER = re.compile(r"\d+(\.\d+)+")
DONE = "installed.txt"  # what was installed, written last: a half-made environment is made again


class NotInstalled(Exception):
    """The client can't be had here. Its text is the last line of what tried to install it."""


def ensure(client: Client) -> Path:
    """Return the client's environment, with what its line in the table says. Raise NotInstalled."""
    folder = ENVIRONMENTS / client.name
    if client.kind is Kind.ON_PATH:
        return find_on_path(client, folder)
    if client.kind is Kind.BY_HAND:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    if client.kind is Kind.NPM_PROGRAM and (reason := why_not_alone() or why_closed(ENVIRONMENTS)):
        raise NotInstalled(f"it runs as nobody in a network of its own: {reason}")
    done, wanted = folder / DONE, " ".join(client.packages)
    if not done.exists() or done.read_text() != wanted:
        print(f"making {folder} with {wanted}", file=sys.stderr)
        install = install_pip if client.kind is Kind.PIP else install_npm
        install(client, folder)
        done.write_text(wanted)
    return folder


def why_closed(folder: Path) -> str:
    """Return which folder nobody can't enter; "" when there is none."""
    closed = [str(parent) for parent in folder.parents if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH]
    return f"nobody may not enter {closed[-1]}" if closed else ""


def install_pip(client: Client, folder: Path) -> None:
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    run_installer([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *client.packages])


def install_npm(client: Client, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_installer(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *client.packages])


def find_on_path(client: Client, folder: Path) -> Path:
    if shutil.which(client.name) is None:
        raise NotInstalled(f"there is no {client.name} on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_installer(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotInstalled(f"there is no {command[0]} on this machine") from None
    if done.returncode:
        raise NotInstalled((done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1])


def command_of(client: Client, folder: Path) -> list[str]:
    """Return what runs the client's program."""
    if client.kind is Kind.PIP:
        return [str(folder / "bin" / "python"), str(PROGRAMS / client.program)]
    if client.kind is Kind.NPM:
        # Node looks for packages beside the program, wherever it is started.
        shutil.copy(PROGRAMS / "tally.mjs", folder)
        return ["node", str(shutil.copy(PROGRAMS / client.program, folder))]
    if client.kind in (Kind.NPM_PROGRAM, Kind.BY_HAND):
        return launcher.command(f"tests.clients.{Path(client.program).stem}")
    return [*INTERPRETERS[Path(client.program).suffix], str(PROGRAMS / client.program)]


def version_of(client: Client) -> str:
    """Return the pinned version; of what the machine brings, the one that it has; nothing where there is none."""
    if client.kind is Kind.BY_HAND:
        return ""
    if client.kind is not Kind.ON_PATH:
        return client.packages[0].replace("==", "@").rpartition("@")[2]
    if shutil.which(client.name) is None:
        return ""
    ask = "version" if client.name == "go" else "--version"
    printed = subprocess.run([client.name, ask], capture_output=True, text=True).stdout
    found = NUMBER.search(printed)
    return found[0] if found else "?"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(ensure(named(name)))
