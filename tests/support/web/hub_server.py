"""A hub on loopback: the part of its HTTP API that huggingface_hub speaks to fetch a model, and faults on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.serving import QuietHandler, serving

TOKEN = "hf_of_the_tests"
MAIN = "main"
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
PRIVATE, GATED, FORBIDDEN = "private", "gated", "forbidden"


@dataclass(slots=True)
class HubRepo:
    """Files by commit, commits by branch. Access is public where it is empty."""

    files: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    access: str = ""
    gguf: str = ""  # the architecture that the hub read off its GGUF files

    def push(self, files: Mapping[str, bytes], branch: str = MAIN) -> str:
        """Return the new commit, which the branch then stands for."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.files[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def at(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.files else None


@dataclass(frozen=True, slots=True)
class Seen:
    """One request for a file's bytes."""

    path: str
    range: str


@dataclass(slots=True)
class HubState:
    """What the server holds, the faults that it plays, and what was asked. Written by the server's threads."""

    repos: dict[str, HubRepo] = field(default_factory=dict)
    shortened: dict[str, int] = field(default_factory=dict)  # the file always ends there
    failing: dict[str, int] = field(default_factory=dict)  # status instead of the bytes
    status: int = 0  # of every answer
    held: dict[str, int] = field(default_factory=dict)  # the bytes wait for so many HEADs
    news: threading.Condition = field(default_factory=threading.Condition)
    asked: list[str] = field(default_factory=list)
    taken: list[Seen] = field(default_factory=list)

    def add(self, repo: str, files: Mapping[str, bytes], **more: str) -> HubRepo:
        made = HubRepo(**more)  # type: ignore[arg-type]
        made.push(files)
        self.repos[repo] = made
        return made

    def taken_paths(self) -> list[str]:
        return sorted(seen.path for seen in self.taken)


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.state = HubState()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(QuietHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        state, path = self.server.state, urllib.parse.urlsplit(self.path).path
        with state.news:
            state.asked.append(f"{self.command} {path}")
            state.news.notify_all()
        api, file = API.fullmatch(path), FILE.fullmatch(path)
        if state.status:
            return self.refuse(state.status, "")
        match = api or file
        repo = state.repos.get(match["repo"]) if match else None
        if match is None or repo is None or (repo.access == PRIVATE and not self.has_token()):
            return self.refuse(404 if self.has_token() else 401, "RepoNotFound")
        commit = repo.at(urllib.parse.unquote(match["revision"] or MAIN))
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if api:
            return self.describe(api["repo"], repo, commit, is_tree=api["what"] == "tree")
        self.file(repo, commit, urllib.parse.unquote(match["path"]))

    def has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def describe(self, name: str, repo: HubRepo, commit: str, *, is_tree: bool) -> None:
        files = repo.files[commit]
        if is_tree:
            self.send_json([{"type": "file", "path": p, "size": len(d), "oid": etag(d)} for p, d in files.items()])
            return
        siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
        told = {"id": name, "sha": commit, "siblings": siblings}
        self.send_json(told | ({"gguf": {"architecture": repo.gguf}} if repo.gguf else {}))

    def file(self, repo: HubRepo, commit: str, path: str) -> None:
        state = self.server.state
        if repo.access == GATED and not self.has_token():
            return self.refuse(401, "GatedRepo")
        if repo.access == FORBIDDEN:
            return self.refuse(403, "")
        if path not in repo.files[commit]:
            return self.refuse(404, "EntryNotFound")
        data = repo.files[commit][path]
        if self.command == "GET":
            self.wait_for(path)
            state.taken.append(Seen(path, self.headers.get("Range", "")))
            if path in state.failing:
                return self.refuse(state.failing[path], "")
            data = data[: state.shortened.get(path, len(data))]
        self.send_file(data, commit, etag(repo.files[commit][path]))

    def wait_for(self, path: str) -> None:
        state, heads = self.server.state, f"HEAD {urllib.parse.urlsplit(self.path).path}"
        with state.news:
            state.news.wait_for(lambda: state.asked.count(heads) >= state.held.get(path, 0), HANG_GUARD_S)

    def send_file(self, data: bytes, commit: str, tag: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        whole = len(data)
        if asked and asked[2]:
            data = data[: int(asked[2]) + 1]
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{whole}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start:])

    def send_json(self, value: object) -> None:
        self.say(200, json.dumps(value).encode(), ("Content-Type", "application/json"))

    def refuse(self, status: int, code: str) -> None:
        self.say(status, b"", *([("X-Error-Code", code)] if code else []))


def etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def running_hub() -> Iterator[HubServer]:
    with serving(HubServer()) as server:
        yield server
