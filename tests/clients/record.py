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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.agent_programs import CLAUDE_CODE, CODEX, Agent, run_claude_code, run_codex, run_codex_built_in, said
from tests.clients.alone import Done, alone
from tests.clients.environment import ensure, version_of
from tests.clients.log_server import SAID, Kept, logging_server
from tests.clients.table import named
from tests.clients.words import replaced, without_ids

FOLDER = Path(__file__).resolve().parents[1] / "data" / "recorded"
MODEL = "scripted"
HOST = "127.0.0.1:8000"
NOTHING = [None]  # before an item that is new
FORMS = {"version": r"\d+\.\d+\.\d+", "date": r"20\d\d-[01]\d-[0-3]\d"}
AS_BEFORE = {"as_before": True}  # in a body: this part is the previous request's


@dataclass(frozen=True, slots=True)
class Session:
    """`model`: both send other requests for models that they know."""

    fixture: str
    agent: Agent
    run: Callable[..., Done]
    model: str = MODEL


SESSIONS = (
    Session("claude-code", CLAUDE_CODE, run_claude_code),
    Session("claude-code-older-model", CLAUDE_CODE, run_claude_code, "claude-sonnet-4-5"),
    Session("codex", CODEX, run_codex),
    Session("codex-built-in-provider", CODEX, run_codex_built_in),
    Session("codex-known-model", CODEX, run_codex, "gpt-5.5"),
    Session("codex-newer-model", CODEX, run_codex, "gpt-6.2-sol"),
)


def record(session: Session, environment: Path) -> tuple[Kept, ...]:
    """Run one session, and return its requests."""
    with alone() as here:
        listener = here.listen()
        port: int = listener.getsockname()[1]
        with logging_server(listener, session.agent) as log:
            url = f"http://127.0.0.1:{port}"
            done = session.run(here, environment, url, session.model, [session.agent.call])
    assert said(done) == SAID, done
    return tuple(log.requests)


def fixture_of(session: Session, version: str, date: str, requests: Sequence[Kept]) -> dict[str, Any]:
    own = session.agent.own_texts
    found = {"program": session.agent.name, "version": version, "date": date, "own_texts": sorted(own)}
    before: dict[str, Any] = {}
    written = []
    for kept in requests:
        body = replaced(json.loads(kept.body), own) if kept.body else {}
        short = {name: shorter(part, before.get(name)) for name, part in body.items()}
        written.append({"method": kept.method, "path": kept.path, "headers": headers_of(kept), "body": short})
        before = body
    return {**found, "requests": written}


def shorter(part: Any, before: Any) -> Any:
    """Return the part, or each item of it, as one mark where it is the previous request's."""
    if isinstance(part, list | dict) and part == before:
        return AS_BEFORE
    if isinstance(part, list) and isinstance(before, list):
        return [shorter(*pair) for pair in zip(part, [*before, *NOTHING * len(part)], strict=False)]
    return part


def whole(part: Any, before: Any) -> Any:
    """Undo `shorter`."""
    if part == AS_BEFORE:
        return before
    if isinstance(part, list) and isinstance(before, list):
        return [whole(*pair) for pair in zip(part, [*before, *NOTHING * len(part)], strict=False)]
    return part


def headers_of(kept: Kept) -> list[str]:
    """Return the headers in their order, without what differs from run to run."""
    fixed = {"host": HOST, "content-length": "0", "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    return [f"{name}: {fixed.get(name.lower(), without_ids(value))}" for name, value in kept.headers]


def bodies_of(fixture: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bodies with their parts that are as before."""
    bodies: list[dict[str, Any]] = []
    for request in fixture["requests"]:
        before = bodies[-1] if bodies else {}
        parts = request["body"].items()
        bodies.append({name: whole(part, before.get(name)) for name, part in parts})
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
