"""`make clients`: clients that others wrote, unchanged, each in an environment of its own, against a running Baton.

    python -m tests.clients.run [NAMES]

Makes the environments that are missing (build/clients; several gigabytes), starts two clusters, runs one client after
another and prints what was tried. What a client printed stays in build/clients/NAME.log. Exit status 1 when one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.clients.environment import NotInstalled, command_of, ensure, version_of
from tests.clients.served import Served, served
from tests.clients.table import CLIENTS, Client, named
from tests.clients.tally import RESULTS

CLIENT_GUARD_S = 1800.0  # many times what the slowest client takes on a busy machine: only one that hangs is ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """`failures`: what went wrong, by check. `not_tested`: why the client could not be tried; empty when it was."""

    client: Client
    version: str
    checks: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    not_tested: str = ""

    @property
    def verdict(self) -> str:
        if self.not_tested:
            return f"not tested: {self.not_tested}"
        return "failed: " + "; ".join(self.failures) if self.failures else "passed"


def try_client(client: Client, environment: Path, cluster: Served, guard_s: float = CLIENT_GUARD_S) -> Outcome:
    """Run the client's program to its end, and read what it has written down."""
    folder = cluster.folder / client.name
    folder.mkdir()
    log = environment.with_suffix(".log")
    arguments = [cluster.url, cluster.model, str(cluster.tokenizer), str(folder)]
    arguments += [cluster.scripted_url, cluster.scripted_model]
    status = run_program([*command_of(client, environment), *arguments], folder, log, guard_s)
    checks, failures = read_results(folder / RESULTS)
    if status is None:
        failures.append(f"no end within {guard_s:.0f} s")
    elif status or not checks:
        said = lines_of(log) or ["it said nothing"]
        failures.append(f"the program ended with {status} after {len(checks)} checks: {said[-1]}")
    return Outcome(client, version_of(client), tuple(checks), tuple(failures))


def run_program(command: Sequence[str], folder: Path, log: Path, guard_s: float) -> int | None:
    """Return the exit status, None when it did not end in time. Nothing that it started stays."""
    with log.open("wb") as sink:
        program = subprocess.Popen(
            command,
            cwd=folder,
            env=environment_of(folder),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return program.wait(guard_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def environment_of(folder: Path) -> dict[str, str]:
    """Nothing of the user's settings reaches a client, and it writes its own into its folder."""
    settings = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "NO_PROXY": "127.0.0.1"}
    return {**settings, "HOME": str(folder), "TMPDIR": str(folder)}


def read_results(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the checks, and a line for each that failed."""
    lines = [json.loads(line) for line in lines_of(path)]
    failures = [f"{line['check']}: {line['failure']}" for line in lines if line["failure"]]
    return [line["check"] for line in lines], failures


def lines_of(path: Path) -> list[str]:
    """Return the lines that hold something; none where there is no file."""
    text = path.read_text("utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.splitlines() if line.strip()]


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table("client", "version", "tried", "result")
    for outcome in outcomes:
        row = (outcome.client.name, outcome.version, "; ".join(outcome.checks), outcome.verdict)
        table.add_row(*(text.replace("[", "\\[") for text in row))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(client.name for client in CLIENTS)], metavar="NAMES")
    names = parser.parse_args(arguments).names
    outcomes: list[Outcome] = []
    ready: list[tuple[Client, Path]] = []
    for client in map(named, names or [client.name for client in CLIENTS]):
        try:
            ready.append((client, ensure(client)))
        except NotInstalled as error:
            outcomes.append(Outcome(client, version_of(client), not_tested=str(error)))
    if ready:
        with served() as cluster:
            for client, environment in ready:
                print(f"{client.name} ...", file=sys.stderr)
                outcomes.append(try_client(client, environment, cluster))
    show(outcomes, Console(width=None if sys.stdout.isatty() else 160))
    return 1 if any(outcome.failures for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
