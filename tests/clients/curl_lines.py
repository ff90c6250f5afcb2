"""curl: the README's lines as they stand there, and what else one types to look at a server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

from tally import Tally, from_arguments

README = Path(__file__).resolve().parents[2] / "README.md"
FENCED = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AS_WRITTEN = "http://127.0.0.1:8000"
TWO = '{"prompt": "One", "max_tokens": 2}'
SPOKEN = '{"messages": [{"role": "user", "content": "say:hello there"}]}'
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
    with tally.check("HTTP/2 offered by Upgrade"):
        assert "HTTP2" in curl(tally, "--version"), "this curl can't offer it"
        assert json.loads(offering(tally, tally.api + "/models"))["data"]
        sent = ("-H", "Content-Type: application/json", "-d", SPOKEN)
        for more in ((), ("-H", "Transfer-Encoding: chunked"), ("-H", "Expect: 100-continue")):
            answer = json.loads(offering(tally, f"{tally.scripted_api}/chat/completions", *sent, *more))
            assert answer["choices"][0]["message"]["content"] == "hello there", (more, answer)
    with tally.check("statuses"):
        assert status(tally, "/v1/nothing") == "404" and status(tally, "/v1/completions") == "405"
        assert status(tally, "/v1/completions", "-d", "{") == "400"
        assert "HTTP/1.1 200" in curl(tally, "-I", tally.url + "/health")


def readme_commands(text: str) -> list[str]:
    """Return the commands of fenced blocks that begin with curl, each to the line that ends it."""
    commands, begun = [], ""
    for line in "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines():
        if begun or line.startswith("curl "):
            begun = f"{begun}\n{line}".lstrip()
            if is_whole(begun):
                commands.append(begun)
                begun = ""
    return commands


def is_whole(command: str) -> bool:
    """Return whether each quote is closed."""
    try:
        return bool(shlex.split(command))
    except ValueError:
        return False


def curl(tally: Tally, *arguments: str) -> str:
    return tally.run("curl", "--silent", "--show-error", *arguments)


def offering(tally: Tally, *arguments: str) -> str:
    return curl(tally, "--http2", *arguments)


def status(tally: Tally, path: str, *arguments: str) -> str:
    return curl(tally, "--output", "answer", "--write-out", "%{http_code}", tally.url + path, *arguments)


if __name__ == "__main__":
    main(from_arguments())
