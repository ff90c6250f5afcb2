"""Makes tests/data/tool_schemas.json.gz: the tools of real MCP servers, as each server lists them.

Run it again with `python -m tests.support.bodies.tool_schemas FOLDER`. FOLDER gets the packages: each npm package
without its install scripts, each Python package in an environment of its own. Then each server is started over standard
input and output, with made-up keys, and asked for its tools. No tool is called. The versions are those of the day; a
server that does not answer is reported and left out. Titles, descriptions and examples go: no grammar depends on them.
Needs node, npm and their registries; tests need only the file.
"""

from __future__ import annotations

import gzip
import json
import os
import select
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.machine.patience import HANG_GUARD_S

FILE = Path(__file__).parents[2] / "data" / "tool_schemas.json.gz"
CLIENT = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "tests", "version": "1"}}
KEY = "0" * 40  # servers want one before they list anything
MIT, APACHE = "MIT", "Apache-2.0"
PROSE = ("title", "description", "markdownDescription", "examples")
FOLDER = "FOLDER"  # in arguments: a folder of the server's own


@dataclass(frozen=True, slots=True)
class Server:
    """`licence`: by the package's metadata, else by its README. `bin`: the command, if the package has several."""

    package: str
    licence: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    bin: str = ""


ANTHROPIC = "@modelcontextprotocol/server-"
NPM = (
    Server(f"{ANTHROPIC}everything", MIT),
    Server(f"{ANTHROPIC}filesystem", MIT, (FOLDER,)),
    Server(f"{ANTHROPIC}github", MIT),
    Server(f"{ANTHROPIC}memory", MIT),
    Server(f"{ANTHROPIC}sequential-thinking", MIT),
    Server("@brightdata/mcp", MIT, environment={"API_TOKEN": KEY, "PRO_MODE": "true"}),
    Server("@notionhq/notion-mcp-server", MIT, environment={"NOTION_TOKEN": KEY}),
    Server("@playwright/mcp", APACHE, ("--caps=vision,pdf,testing,tracing",)),
    Server("@upstash/context7-mcp", MIT),
    Server("@wonderwhy-er/desktop-commander", MIT, bin="desktop-commander"),
    Server(
        "@zereight/mcp-gitlab",
        MIT,
        environment={"GITLAB_PERSONAL_ACCESS_TOKEN": KEY, "USE_PIPELINE": "true", "USE_GITLAB_WIKI": "true"},
        bin="mcp-gitlab",
    ),
    Server("chrome-devtools-mcp", APACHE, bin="chrome-devtools-mcp"),
    Server("firecrawl-mcp", MIT, environment={"FIRECRAWL_API_KEY": KEY}),
    Server("mcp-server-kubernetes", MIT),
    Server("mongodb-mcp-server", APACHE),
    Server("tavily-mcp", MIT, environment={"TAVILY_API_KEY": KEY}),
)
PYPI = (
    Server(
        "mcp-atlassian",
        MIT,
        environment={
            **{f"{name}_URL": "http://127.0.0.1:9" for name in ("JIRA", "CONFLUENCE")},
            **{f"{name}_PERSONAL_TOKEN": KEY for name in ("JIRA", "CONFLUENCE")},
        },
    ),
    Server("mcp-server-fetch", MIT),
    Server("mcp-server-git", MIT),
    Server("mcp-server-time", MIT),
)


def main(folder: Path) -> None:
    """Write the file from all servers that answer."""
    found = [entry for server in NPM if (entry := tried(server, folder, "npm"))]
    found += [entry for server in PYPI if (entry := tried(server, folder, "pypi"))]
    data = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(data, mtime=0))
    print(f"{sum(len(entry['tools']) for entry in found)} tools of {len(found)} packages, {FILE.stat().st_size} bytes")


def tried(server: Server, folder: Path, registry: str) -> dict[str, Any] | None:
    home = folder / registry / server.package.replace("/", "+")
    install = npm_installed if registry == "npm" else pip_installed
    try:
        command, version = install(server, home)
        tools = listed(command, server, home)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{server.package}: {str(error)[:300]}", file=sys.stderr)
        return None
    print(f"{server.package} {version}: {len(tools)} tools")
    kept = [{"name": tool["name"], "inputSchema": without_prose(tool["inputSchema"])} for tool in tools]
    source = {"registry": registry, "package": server.package, "version": version, "licence": server.licence}
    return source | {"tools": kept}


def without_prose(schema: object) -> object:
    """Drop annotations. A property may have an annotation's name; its value is an object."""
    if isinstance(schema, list):
        return [without_prose(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if name not in PROSE or isinstance(value, dict)}
    return {name: without_prose(value) for name, value in kept.items()}


def npm_installed(server: Server, home: Path) -> tuple[list[str], str]:
    """Return the server's command and version."""
    home.mkdir(parents=True, exist_ok=True)
    package = home / "node_modules" / server.package
    if not package.exists():
        (home / "package.json").write_text('{"private": true}')
        flags = ("--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--loglevel=error")
        subprocess.run(["npm", "install", *flags, server.package], cwd=home, check=True, stdout=subprocess.DEVNULL)
    described = json.loads((package / "package.json").read_text())
    programs = described["bin"]
    program = programs if isinstance(programs, str) else programs[server.bin or next(iter(programs))]
    return ["node", str(package / program)], described["version"]


def pip_installed(server: Server, home: Path) -> tuple[list[str], str]:
    """Return the server's command and version."""
    python, program = home / "bin" / "python", home / "bin" / (server.bin or server.package)
    if not program.exists():
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-qqq", server.package], check=True)
    ask = f"import importlib.metadata as m; print(m.version({server.package!r}))"
    version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    return [str(program)], version


def listed(command: list[str], server: Server, home: Path) -> list[dict[str, Any]]:
    """Start the server and return its tools. Raise ValueError if it does not answer."""
    own = home / "files"
    own.mkdir(exist_ok=True)
    arguments = [str(own) if argument == FOLDER else argument for argument in server.arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(own), "LANG": "C.UTF-8", **server.environment}
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=own,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(own / "log").open("w"),
    )
    try:
        peer = Peer(process)
        peer.ask("initialize", CLIENT)
        peer.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})
        tools, more = [], {}
        while True:
            page = peer.ask("tools/list", more)
            tools += page["tools"]
            if not page.get("nextCursor"):
                return tools
            more = {"cursor": page["nextCursor"]}
    finally:
        process.kill()
        process.wait()


class Peer:
    """JSON-RPC with one process, a message a line."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._num_asked = 0
        self._data = b""

    def tell(self, message: Mapping[str, object]) -> None:
        self._stdin.write(json.dumps(message).encode() + b"\n")
        self._stdin.flush()

    def ask(self, method: str, params: Mapping[str, object]) -> dict[str, Any]:
        self._num_asked += 1
        self.tell({"jsonrpc": "2.0", "id": self._num_asked, "method": method, "params": params})
        while True:
            message = self._next()
            if message.get("id") == self._num_asked and "method" not in message:
                if "result" not in message:
                    raise ValueError(f"{method}: {message}")
                return dict(message["result"])

    def _next(self) -> dict[str, Any]:
        """Return the next message. Servers also print lines that are none."""
        while True:
            while b"\n" not in self._data:
                if not select.select([self._stdout], [], [], HANG_GUARD_S)[0]:
                    raise ValueError("no answer")
                read = os.read(self._stdout.fileno(), 1 << 16)
                if not read:
                    raise ValueError("the server has ended")
                self._data += read
            line, _, self._data = self._data.partition(b"\n")
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                return message


def packages() -> list[dict[str, Any]]:
    """Return the file's entries: registry, package, version, licence, and tools with name and inputSchema."""
    return list(json.loads(gzip.decompress(FILE.read_bytes())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
