"""Records what Claude Code and Codex send, as fixtures in tests/data/recorded.

    python -m tests.clients.record claude-code|codex

Installs the pinned program when it is missing. The program runs alone (alone.py), and a logging server answers it.
Texts are replaced (words.py): nothing that others wrote gets into a fixture, and nothing of this machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.agents import CLAUDE_CODE, CODEX, Agent, run_claude_code, run_codex, said
from tests.clients.alone import alone
from tests.clients.environment import ensure, version_of
from tests.clients.log_server import SAID, Kept, logging_server
from tests.clients.table import named
from tests.clients.words import replaced, without_ids

FOLDER = Path(__file__).resolve().parents[1] / "data" / "recorded"
MODEL = "scripted"
HOST = "127.0.0.1:8000"
FORMS = {"version": r"\d+\.\d+\.\d+", "date": r"20\d\d-[01]\d-[0-3]\d"}
AS_BEFORE = {"as_before": True}  # in a body: this part is the previous request's
LONG_PARTS = ("tools", "system")


@dataclass(frozen=True, slots=True)
class Session:
    """`model`: Claude Code sends other requests for models that it knows."""

    fixture: str
    agent: Agent
    model: str = MODEL


SESSIONS = (
    Session("claude-code", CLAUDE_CODE),
    Session("claude-code-older-model", CLAUDE_CODE, "claude-sonnet-4-5"),
    Session("codex", CODEX),
)


def record(session: Session, environment: Path) -> tuple[Kept, ...]:
    """Run one session, and return its requests."""
    run = run_claude_code if session.agent is CLAUDE_CODE else run_codex
    with alone() as here:
        listener = here.listen()
        port: int = listener.getsockname()[1]
        with logging_server(listener, session.agent) as log:
            url = f"http://127.0.0.1:{port}"
            done = run(here, environment, url, session.model, [session.agent.call])
    assert said(done) == SAID, done
    return tuple(log.requests)


def fixture_of(session: Session, version: str, date: str, requests: Sequence[Kept]) -> dict[str, Any]:
    own = session.agent.own_texts
    found = {"program": session.agent.name, "version": version, "date": date, "own_texts": sorted(own)}
    before: dict[str, Any] = {}
    written = []
    for kept in requests:
        body = replaced(json.loads(kept.body), own) if kept.body else {}
        short = {name: AS_BEFORE if shortens(name, part, before) else part for name, part in body.items()}
        written.append({"method": kept.method, "path": kept.path, "headers": headers_of(kept), "body": short})
        before = body
    return {**found, "requests": written}


def shortens(name: str, part: Any, before: dict[str, Any]) -> bool:
    return name in LONG_PARTS and part == before.get(name)


def headers_of(kept: Kept) -> list[str]:
    """Return the headers in their order, without what differs from run to run."""
    fixed = {"host": HOST, "content-length": "0"}
    return [f"{name}: {fixed.get(name.lower(), without_ids(value))}" for name, value in kept.headers]


def bodies_of(fixture: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bodies with their parts that are as before."""
    bodies: list[dict[str, Any]] = []
    for request in fixture["requests"]:
        before = bodies[-1] if bodies else {}
        parts = request["body"].items()
        bodies.append({name: before[name] if part == AS_BEFORE else part for name, part in parts})
    return bodies


def faults_of(fixture: dict[str, Any]) -> list[str]:
    """Return what a fixture lacks, or has and may not have: a text that is not ours, an id of a machine."""
    agent = next((agent for agent in (CLAUDE_CODE, CODEX) if agent.name == fixture.get("program")), None)
    if agent is None:
        return ["program: the name of a recorded program"]
    faults = [f"{key}: {form}" for key, form in FORMS.items() if not re.fullmatch(form, str(fixture.get(key)))]
    own = sorted(agent.own_texts)
    faults += [] if fixture.get("own_texts") == own else ["own_texts: those of the program's row, and no others"]
    requests = fixture.get("requests") or []
    faults += [] if requests else ["requests: one at least"]
    for index, request in enumerate(requests):
        where = f"requests[{index}]"
        faults += [] if replaced(request["body"], own) == request["body"] else [f"{where}.body: a text is as it was"]
        faults += [f"{where}.headers: {line}" for line in request["headers"] if without_ids(line) != line]
        faults += [] if f"host: {HOST}" in map(str.lower, request["headers"]) else [f"{where}.headers: Host: {HOST}"]
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[CLAUDE_CODE.name, CODEX.name])
    client = named(parser.parse_args(arguments).name)
    environment, date = ensure(client), datetime.datetime.now(datetime.UTC).date().isoformat()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for session in SESSIONS:
        if session.agent.name == client.name:
            fixture = fixture_of(session, version_of(client), date, record(session, environment))
            file = FOLDER / f"{session.fixture}.json"
            file.write_text(json.dumps(fixture, indent=1, ensure_ascii=False) + "\n", "utf-8")
            print(f"{file}: {len(fixture['requests'])} requests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
