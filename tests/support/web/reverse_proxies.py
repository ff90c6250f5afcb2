"""nginx, HAProxy and Caddy in front of a router, with the settings that docs/operations.md asks for."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.clusters.router_process import eventually
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.ports import free_port

WHERE_SERVERS_ARE = (os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin")

NGINX = """\
daemon off; master_process off; worker_processes 1;
pid {folder}/nginx.pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    upstream router {{ server 127.0.0.1:{router}; keepalive 64; keepalive_timeout {idle_ms}ms; }}
    server {{
        listen 127.0.0.1:{port};
        keepalive_timeout 3600s; keepalive_requests 100000;
        location / {{
            proxy_pass http://router; proxy_http_version 1.1;
            proxy_set_header Connection ""; proxy_set_header Host $host;
        }}
    }}
}}
"""
# As it comes: HTTP/1.0, and a connection for each request.
PLAIN_NGINX = re.sub(r"proxy_pass[^}]*", "proxy_pass http://127.0.0.1:{router}; ", re.sub("    upstream.*", "", NGINX))
# With a small pool-purge-delay too, closing all idle connections takes it several rounds, of half of them each.
HAPROXY = """\
defaults
    mode http
    timeout connect 10s
    timeout client 1h
    timeout server 1h
listen router
    bind 127.0.0.1:{port}
    option abortonclose
    http-response del-header keep-alive
    server router 127.0.0.1:{router} pool-purge-delay {idle_ms}ms
"""
CADDY = """\
{{
    admin off
    auto_https off
}}
http://127.0.0.1:{port} {{
    bind 127.0.0.1
    reverse_proxy 127.0.0.1:{router} {{
        transport http {{
            keepalive {idle_ms}ms
        }}
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """`arguments` follow the program's name; {file} and {folder} are filled in."""

    program: str
    config: str
    arguments: tuple[str, ...]


KINDS = {
    "nginx": Kind("nginx", NGINX, ("-p", "{folder}", "-c", "{file}")),
    "plain nginx": Kind("nginx", PLAIN_NGINX, ("-p", "{folder}", "-c", "{file}")),
    "haproxy": Kind("haproxy", HAPROXY, ("-db", "-f", "{file}")),
    "caddy": Kind("caddy", CADDY, ("run", "--adapter", "caddyfile", "--config", "{file}")),
}


def find(name: str) -> str | None:
    return shutil.which(KINDS[name].program, path=os.pathsep.join(WHERE_SERVERS_ARE))


def each_proxy(*without: str) -> list[ParameterSet]:
    """Parameters of a test; where a program is missing, its row is skipped."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(find(name) is None, reason=f"no {kind.program} here"))
        for name, kind in KINDS.items()
        if name not in without
    ]


@contextlib.contextmanager
def reverse_proxy(name: str, router_url: str, folder: Path, *, idle_ms: int = 60_000) -> Iterator[str]:
    """Yields the proxy's URL. `idle_ms`: how long it keeps idle connections to the router."""
    kind, port, file = KINDS[name], free_port(), folder / f"{name}.conf"
    router = router_url.rpartition(":")[2]
    file.write_text(kind.config.format(folder=folder, port=port, router=router, idle_ms=idle_ms))
    program = find(name)
    assert program is not None
    command = [program, *(word.format(file=file, folder=folder) for word in kind.arguments)]
    places = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | places, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: answers(url) or process.poll() is not None)
            assert process.poll() is None, (folder / f"{name}.log").read_text()
            yield url
        finally:
            process.kill()
            process.wait(HANG_GUARD_S)
            print((folder / f"{name}.log").read_text()[-4000:])  # pytest shows it if the test fails


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/health", timeout=HANG_GUARD_S).status_code == 200
    return False
