"""The clients that others wrote, and their versions: all that `python -m tests.clients.run` installs and runs.

A package that constraints.txt has, too, has the same version here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    PIP = "pip"
    NPM = "npm"
    ON_PATH = "on the machine's path"
    NPM_PROGRAM = "a native program in npm's packages, started by a program of ours"
    BY_HAND = "recorded or written by hand, nothing installed"


@dataclass(frozen=True, slots=True)
class Client:
    """`packages`: what is installed, the client itself first, each with its version. `program`: what tries it."""

    name: str
    program: str
    packages: tuple[str, ...] = ()
    kind: Kind = Kind.PIP


AI_SDK = (
    "ai@7.0.173",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/anthropic@4.0.105",
    "zod@4.6.7",
)
CLIENTS = (
    Client("curl", "curl_lines.py", kind=Kind.ON_PATH),
    Client("java", "JavaHttp.java", kind=Kind.ON_PATH),
    Client("go", "go_http.go", kind=Kind.ON_PATH),
    Client("openai", "openai_sdk.py", ("openai==3.51.0",)),
    Client("anthropic", "anthropic_sdk.py", ("anthropic==2.12.0",)),
    Client("openai-npm", "openai_npm.mjs", ("openai@7.57.0",), Kind.NPM),
    Client("litellm", "litellm_calls.py", ("litellm==1.106.2",)),
    Client("langchain", "langchain_calls.py", ("langchain-openai==1.7.3", "langchain==1.4.7")),
    Client("instructor", "instructor_calls.py", ("instructor==1.17.0",)),
    Client("pydantic-ai", "pydantic_ai_agent.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("openai-agents", "openai_agents_loop.py", ("openai-agents==0.24.0",)),
    Client("ai-sdk", "ai_sdk.mjs", AI_SDK, Kind.NPM),
    Client("claude-code", "claude_code.py", ("@anthropic-ai/claude-code@2.1.332",), Kind.NPM_PROGRAM),
    Client("codex", "codex_cli.py", ("@openai/codex@0.171.0",), Kind.NPM_PROGRAM),
    Client("ollama", "ollama_sdk.py", ("ollama==0.6.3",)),
    Client("ollama-npm", "ollama_npm.mjs", ("ollama@0.6.4",), Kind.NPM),
    Client("open-webui-calls", "open_webui_calls.py", kind=Kind.BY_HAND),
    Client("agent-shapes", "agent_shapes.py", kind=Kind.BY_HAND),
    Client("llm", "llm_prompts.py", ("llm==0.36",)),
    Client("aiperf", "aiperf_profile.py", ("aiperf==0.13.0",)),
    Client("guidellm", "guidellm_benchmark.py", ("guidellm==0.8.1",)),
    Client("lm-eval", "lm_eval_tasks.py", ("lm-eval[api]==0.4.13", "transformers==5.24.0")),
)


def named(name: str) -> Client:
    """Return the client of this name. Raise ValueError that lists them."""
    for client in CLIENTS:
        if client.name == name:
            return client
    raise ValueError(f"no client {name!r}; there are {', '.join(client.name for client in CLIENTS)}")
