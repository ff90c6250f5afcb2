"""The pages work behind a proxy that serves a router below a path of its own, such as https://host/baton/."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import httpx
import pytest

from tests.support.clusters.router_process import RouterProcess
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.serving import QuietHandler, serving

BELOW = "/baton"
FETCH = re.compile(r"\bfetch\(([^,)]*\)?)")
OWN = re.compile(
    r'^const urlOf = \(path\) => (location\.origin \+ location\.pathname\.replace\(/(.+)/, "(.*)"\) \+ path);$', re.M
)
PAGES = {  # page -> what it asks for
    "/": {"v1/chat/completions", "v1/models", "ready"},
    "/status": {"admin/status"},
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    running = RouterProcess()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def site(router: RouterProcess) -> Iterator[str]:
    """The proxy's origin. It removes BELOW from paths, and has nothing at other paths."""

    class Proxy(QuietHandler):
        def do_GET(self) -> None:
            below = self.path.removeprefix(BELOW) or "/"
            if not self.path.startswith(BELOW) or not below.startswith("/"):
                return self.say(404, b"no such site")
            answer = httpx.request(self.command, router.url + below, timeout=HANG_GUARD_S)
            kind = answer.headers.get("content-type", "")
            return self.say(answer.status_code, answer.content, ("content-type", kind))

        do_OPTIONS = do_GET

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Proxy)) as proxy:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"


def own_url(page: str, origin: str, pathname: str, path: str) -> str:
    """Compute what the page's function returns. Its pattern means the same to Python."""
    found = OWN.search(page)
    assert found is not None
    return origin + re.sub(found[2].replace("\\/", "/"), found[3], pathname, count=1) + path


def paths_of(page: str) -> set[str]:
    """Return the paths that the page fetches. All of them go through its function."""
    asked = FETCH.findall(page)
    assert asked and all(re.fullmatch(r'urlOf\("[^"/][^"]*"\)', one) for one in asked), asked
    return {one.split('"')[1] for one in asked}


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_asks_for_is_below_the_proxy_s_path(page: str, slash: str, site: str) -> None:
    at = BELOW + page.rstrip("/") + slash
    shown = httpx.get(site + at, timeout=HANG_GUARD_S)
    assert shown.status_code == 200 and shown.headers["content-type"].startswith("text/html")
    assert paths_of(shown.text) == PAGES[page]
    for path in PAGES[page]:
        url = own_url(shown.text, site, at, path)
        assert url == f"{site}{BELOW}/{path}"
        assert httpx.options(url, timeout=HANG_GUARD_S).status_code == 200, url


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_without_a_proxy_asks_its_own_router(page: str, slash: str, router: RouterProcess) -> None:
    at = (page.rstrip("/") + slash) or "/"
    shown = httpx.get(router.url + at, timeout=HANG_GUARD_S)
    assert shown.status_code == 200
    for path in PAGES[page]:
        assert own_url(shown.text, router.url, at, path) == f"{router.url}/{path}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_and_links_nothing_by_a_path(page: str, router: RouterProcess) -> None:
    text = httpx.get(router.url + page, timeout=HANG_GUARD_S).text
    assert set(re.findall(r'(?:src|href|action)="([^"]*)"', text)) == {"data:,"}
    assert not re.search(r"\bimport\b|XMLHttpRequest|EventSource|WebSocket|url\(", text)


@pytest.mark.parametrize("page", PAGES)
def test_no_path_leads_to_another_host(page: str, router: RouterProcess) -> None:
    """A path with two slashes at its beginning would be a host's name without the origin before it."""
    text = httpx.get(router.url + page, timeout=HANG_GUARD_S).text
    for at in ("//evil.example/", "//evil.example/status"):
        assert own_url(text, "https://host", at, "x").startswith("https://host//")


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_s_language_computes_the_same(page: str, router: RouterProcess) -> None:
    text = httpx.get(router.url + page, timeout=HANG_GUARD_S).text
    found = OWN.search(text)
    assert found is not None
    for at in ("/", BELOW, f"{BELOW}/", f"{BELOW}/status", f"{BELOW}/status/", "/a/b//"):
        program = f'const location = {{ origin: "http://h", pathname: "{at}" }}, path = "x"; console.log({found[1]})'
        run = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=HANG_GUARD_S, check=True)
        assert run.stdout.strip() == own_url(text, "http://h", at, "x")
