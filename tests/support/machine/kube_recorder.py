"""An API server of Kubernetes that keeps in memory what Helm creates, and runs nothing. It listens on loopback.

It knows the kinds that are named to it, takes POST, PUT, PATCH and DELETE as they come, and checks no schema.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.support.web.serving import QuietHandler

Object = dict[str, Any]
VERBS = ["create", "delete", "get", "list", "patch", "update"]
PROTOBUF = b"k8s\0"
OWNER = {"owner": "helm", "status": "deployed"}
VERSION = {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
JSON_TYPE = ("content-type", "application/json")


class KubeRecorder(ThreadingHTTPServer):
    """`kinds`: (apiVersion, kind). `objects`: the ones that exist now, by path."""

    def __init__(self, kinds: Sequence[tuple[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kinds = sorted(kinds)
        self.objects: dict[str, Object] = {}
        self.versions = itertools.count(1)

    def write_config(self, path: Path) -> None:
        """Write a kubeconfig that names this server."""
        named = {"name": "recorder"}
        cluster = {**named, "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}
        context = {**named, "context": {"cluster": "recorder", "user": "recorder"}}
        config = {"clusters": [cluster], "contexts": [context], "users": [{**named, "user": {}}]}
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "recorder", **config}))

    def discovered(self, path: str) -> Object | None:
        """Return what clients ask first: version, groups, and the kinds of one group."""
        groups = sorted({version for version, _ in self.kinds if "/" in version})
        if path == "/version":
            return VERSION
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            named = [{"groupVersion": group, "version": group.split("/")[1]} for group in groups]
            listed = [{"name": one["groupVersion"].split("/")[0], "versions": [one]} for one in named]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        kinds = [kind for group, kind in self.kinds if group == version]
        if not kinds or path not in (f"/apis/{version}", f"/api/{version}"):
            return None
        resources = [{"name": plural(kind), "kind": kind, "namespaced": True, "verbs": VERBS} for kind in kinds]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


class Handler(QuietHandler):
    server: KubeRecorder

    def do_GET(self) -> None:  # noqa: N802
        asked = urlsplit(self.path)
        found = self.server.discovered(asked.path) or self.server.objects.get(asked.path)
        of_kind = {plural(kind): kind for _, kind in self.server.kinds}.get(asked.path.rsplit("/", 1)[-1])
        if found is None and of_kind is not None:
            items = [one for path, one in self.server.objects.items() if path.startswith(f"{asked.path}/")]
            found = {"kind": f"{of_kind}List", "apiVersion": "v1", "metadata": {}, "items": items}
        self.answer(found)

    def do_POST(self) -> None:  # noqa: N802
        made = self.read()
        self.keep(f"{urlsplit(self.path).path}/{made['metadata']['name']}", made)

    def do_PUT(self) -> None:  # noqa: N802
        self.keep(urlsplit(self.path).path, self.read())

    do_PATCH = do_PUT  # noqa: N815  # a server-side apply; fields that it does not name are forgotten

    def do_DELETE(self) -> None:  # noqa: N802
        self.body()
        path = urlsplit(self.path).path
        gone = self.server.objects.pop(path, None)
        self.answer(gone and {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def read(self) -> Object:
        data = self.body()
        if data.startswith(PROTOBUF):
            return release_of(data)
        made: Object = yaml.safe_load(data)
        return made

    def keep(self, path: str, made: Object) -> None:
        made["metadata"]["resourceVersion"] = str(next(self.server.versions))
        self.server.objects[path] = made
        self.answer(made)

    def answer(self, said: Object | None) -> None:
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.say(200 if said else 404, json.dumps(said or missing).encode(), JSON_TYPE)


def release_of(data: bytes) -> Object:
    """Return the Secret in which Helm keeps a release, and which comes as protobuf: it is known by its looks."""
    name = re.search(rb"sh\.helm\.release\.v1\.([a-z-]+)\.v(\d+)", data)
    release = re.search(rb"H4sI[\w+/]+=*", data)  # base64 of gzip
    assert name is not None and release is not None, data[:200]
    metadata = {"name": name[0].decode(), "labels": {"name": name[1].decode(), "version": name[2].decode(), **OWNER}}
    kept = {"release": base64.b64encode(release[0]).decode()}
    return {"kind": "Secret", "apiVersion": "v1", "metadata": metadata, "type": "helm.sh/release.v1", "data": kept}


def plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
