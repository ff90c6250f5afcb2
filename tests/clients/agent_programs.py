"""Codex and Claude Code, the programs as npm has them: how each is started, alone, against a server of ours.

Both are asked for one call of a tool, whose output ends the answer. The key is made up. Telemetry is off.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.alone import Alone, Done, alone, relayed
from tests.clients.environment import ENVIRONMENTS
from tests.clients.tally import Tally

SPOKEN = "made of words"  # what the tool prints
COMMAND = f"echo {SPOKEN}"
KEY = "made-up"
ONLY_KEY = {"ANTHROPIC_API_KEY": KEY}
ONLY_BEARER = {"ANTHROPIC_AUTH_TOKEN": KEY}
LOCAL_KEY = {"LOCAL_KEY": KEY}
CODEX_KEY = {"CODEX_API_KEY": KEY}
GUARD_S = 300.0  # many times what a session takes on a busy machine
NO_TELEMETRY = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_AUTOUPDATER",
)
CODEX_CONFIG = """\
model = "{model}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
[analytics]
enabled = false
"""
CODEX_BUILT_IN = """\
model = "{model}"
openai_base_url = "{url}/v1"
[analytics]
enabled = false
"""


Ask = Callable[..., Done]


@dataclass(frozen=True, slots=True)
class Agent:
    """`binary`: where npm puts the native program of this machine's kind. `tool`, `given`: the call that the agent is
    asked to make."""

    name: str
    binary: str
    tool: str
    given: Mapping[str, str]

    def program(self, environment: Path) -> Path:
        return next(environment.glob(self.binary))

    @property
    def call(self) -> str:
        """Return a prompt that the scripted model answers with the call."""
        called = json.dumps({"name": self.tool, "arguments": dict(self.given)})
        return f"say:<tool_call>{called}</tool_call>"

    @property
    def own_texts(self) -> frozenset[str]:
        """Return the texts of a session that are ours."""
        return frozenset({self.call, SPOKEN, json.dumps(dict(self.given)), *self.given.values()})


CLAUDE_CODE = Agent(
    "claude-code",
    "node_modules/@anthropic-ai/claude-code-linux-*/claude",
    "Bash",
    {"command": COMMAND, "description": "Say three words"},
)
CODEX = Agent(
    "codex",
    "node_modules/@openai/codex-linux-*/vendor/*/bin/codex",
    "exec_command",
    {"cmd": COMMAND},
)


def run_claude_code(
    here: Alone, environment: Path, url: str, model: str, words: Sequence[str], settings: Mapping[str, str] = ONLY_KEY
) -> Done:
    """`words`: the prompt and more arguments."""
    told = {"ANTHROPIC_BASE_URL": url, **settings, **dict.fromkeys(NO_TELEMETRY, "1")}
    command: list[str | Path] = [CLAUDE_CODE.program(environment), "--print"]
    command += ["--model", model, "--allowedTools=Bash", *words]
    return here.run(command, told, GUARD_S)


def run_codex(here: Alone, environment: Path, url: str, model: str, words: Sequence[str]) -> Done:
    """Run Codex with a provider of the user's."""
    here.write(".codex/config.toml", CODEX_CONFIG.format(url=url, model=model))
    return here.run([CODEX.program(environment), "exec", "--skip-git-repo-check", *words], LOCAL_KEY, GUARD_S)


def run_codex_built_in(here: Alone, environment: Path, url: str, model: str, words: Sequence[str]) -> Done:
    """Run Codex with its own provider at another address. It tries a WebSocket first."""
    here.write(".codex/config.toml", CODEX_BUILT_IN.format(url=url, model=model))
    return here.run([CODEX.program(environment), "exec", "--skip-git-repo-check", *words], CODEX_KEY, GUARD_S)


@contextlib.contextmanager
def session(tally: Tally, agent: Agent, run: Callable[..., Done]) -> Iterator[Ask]:
    """Yield what starts the agent against the scripted model, each time with the same home."""
    at = urllib.parse.urlsplit(tally.scripted_url)
    with alone() as here:
        listener = here.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def ask(*words: str, model: str = tally.scripted_model, **more: Any) -> Done:
            return run(here, ENVIRONMENTS / agent.name, url, model, words, **more)

        with relayed(listener, str(at.hostname), at.port or 80):
            yield ask


def said(done: Done) -> str:
    """Return what the agent answered. Fail with its own words where it did not."""
    assert done.status == 0, f"it ended with {done.status}: {(done.printed + done.warned)[-500:]}"
    return done.printed.strip()
