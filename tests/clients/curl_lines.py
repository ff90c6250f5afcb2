"""curl: the README's lines as they stand there, and what else one types to look at a server."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from tally import Tally, from_arguments

README = Path(__file__).resolve().parents[2] / "README.md"
FENCED = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AS_WRITTEN = "http://127.0.0.1:8000"
TWO = '{"prompt": "One", "max_tokens": 2}'
CHAT = '{"stream": true, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi!"}]}'


def main(tally: Tally) -> None:
    with tally.check("the README's lines"):
        commands = readme_commands(README.read_text(encoding="utf-8"))
        assert commands, "the README has no line with curl"
        for command in commands:
            printed = tally.run(shutil.which("sh") or "sh", "-c", command.replace(AS_WRITTEN, tally.url))
            assert json.loads(printed)["choices"][0]["message"]["content"], command
    with tally.check("stream"):
        printed = curl(tally, "-N", f"{tally.api}/chat/completions", "-H", "Content-Type: application/json", "-d", CHAT)
        events = [line for line in printed.splitlines() if line and line != ": waiting"]
        assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    with tally.check("a body without a content type"):
        assert json.loads(curl(tally, f"{tally.api}/completions", "-d", TWO))["choices"]
    with tally.check("models, health, ready, metrics, playground"):
        assert json.loads(curl(tally, f"{tally.api}/models"))["data"]
        for path, word in (("/health", ""), ("/ready", ""), ("/metrics", "baton_"), ("/", "<html")):
            assert word in curl(tally, "--fail", tally.url + path), path
    with tally.check("statuses"):
        assert status(tally, "/v1/nothing") == "404" and status(tally, "/v1/completions") == "405"
        assert status(tally, "/v1/completions", "-d", "{") == "400"
        assert "HTTP/1.1 200" in curl(tally, "-I", tally.url + "/health")


def readme_commands(text: str) -> list[str]:
    """Return the commands of fenced blocks that begin with curl, continued lines included."""
    lines = "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("curl ")]


def curl(tally: Tally, *arguments: str) -> str:
    return tally.run("curl", "--silent", "--show-error", *arguments)


def status(tally: Tally, path: str, *arguments: str) -> str:
    return curl(tally, "--output", "answer", "--write-out", "%{http_code}", tally.url + path, *arguments)


if __name__ == "__main__":
    main(from_arguments())
