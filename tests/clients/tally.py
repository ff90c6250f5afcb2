"""What the program of one client is told, and how it tells the runner what it has tried. Standard library only.

It runs inside the client's own environment, where nothing of Baton is. The runner reads a line of JSON for each check.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"
MAX_SHOWN = 600  # characters of what went wrong


@dataclass(frozen=True, slots=True)
class Tally:
    """`tokenizer`: a folder with the served model's tokenizer. `folder`: the program's own, gone after it.

    `scripted_url` and `scripted_model`: another server, whose model answers a user's `say:TEXT` with TEXT, and the
    result of a tool with `The tool said: ` and the result.
    """

    url: str
    model: str
    tokenizer: Path
    folder: Path
    scripted_url: str
    scripted_model: str

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def scripted_api(self) -> str:
        return f"{self.scripted_url}/v1"

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Write down whether the block ended well. The next check runs either way."""
        try:
            yield
        except Exception as error:
            self._write(name, reason_of(error))
        else:
            self._write(name, "")

    def _write(self, name: str, failure: str) -> None:
        with (self.folder / RESULTS).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"check": name, "failure": failure}) + "\n")

    def run(self, tool: str | Path, *arguments: str, **more: Any) -> str:
        """Return what a command printed. Raise RuntimeError with its last words when it fails."""
        more |= {"cwd": self.folder, "stdin": subprocess.DEVNULL}
        done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, **more)
        if done.returncode:
            raise RuntimeError(f"{Path(tool).name} ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        printed: str = done.stdout
        return printed

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the server without any client: what a client's answers are compared with."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps({"model": self.model, **body}).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def reason_of(error: Exception) -> str:
    """Return one line of text. A bare assert says nothing: its line of source does."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join((str(error) or where.line or "").split())
    return f"{type(error).__name__}: {text}"[:MAX_SHOWN]


def own_tool(name: str) -> Path:
    """Return a command that was installed beside this program's interpreter."""
    return Path(sys.executable).parent / name


def from_arguments() -> Tally:
    url, model, tokenizer, folder, scripted_url, scripted_model = sys.argv[1:]
    return Tally(url, model, Path(tokenizer), Path(folder), scripted_url, scripted_model)
