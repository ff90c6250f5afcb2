"""Makes the command that installs a missing package.

Baton is not on a package index, so the command names the checkout, wheel or folder that Baton came from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import sys
import urllib.parse
from typing import TYPE_CHECKING

from shared.core import launcher
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from importlib import metadata

DISTRIBUTION = "baton-serve"
ROUTER, ROUTER_FOLDER = "baton-router", "/deploy/router"  # the same code with only a router's packages
ROUTER_EXTRAS = ("certificates", "otel")
# extra -> its main package
PACKAGES = {
    "certificates": "cryptography",
    "gpu": "flashinfer",
    "load": "matplotlib",
    "models": "transformers",
    "nixl": "nixl",
    "otel": "opentelemetry.sdk",  # without its exporter it is half installed; pip's line brings both
    "ray": "ray",
}
OURS = frozenset({"decode_node", "deploy", "prefill_node", "router", "shared"})


def require(extra: str, user: str) -> None:
    """Raise ConfigError unless the extra is installed. `user`: the flag or command that needs it."""
    if not is_here(extra):
        raise ConfigError(missing(PACKAGES[extra], user))


def is_here(extra: str) -> bool:
    try:
        return importlib.util.find_spec(PACKAGES[extra]) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def missing(package: str, user: str) -> str:
    extra = next((extra for extra, name in PACKAGES.items() if name == package), "")
    return f"{user} needs the package {package}; to install it, type: {install_line(extra)}"


def missing_package(error: ModuleNotFoundError) -> str:
    """Return the missing package's name; "" for a module of Baton, whose absence is a bug."""
    package = (error.name or "").partition(".")[0]
    is_missing = bool(package) and package not in OURS and importlib.util.find_spec(package) is None
    return package if is_missing else ""


def install_line(extra: str = "") -> str:
    wanted = f"[{extra}]" if extra else ""
    if launcher.is_checkout():  # install a link to the checkout, as `make setup` does
        return pip_line("--editable", f"{launcher.CODE}{wanted}")
    own = installed()
    if own is None:  # a bare copy of the source
        return pip_line(f"{launcher.CODE}{wanted}")
    if own.name == DISTRIBUTION or extra in ROUTER_EXTRAS:
        return pip_line(f"{origin(own)}{wanted}")
    remove = shlex.join([sys.executable, "-m", "pip", "uninstall", "--yes", ROUTER])  # both own the same files
    return f"{remove} && {pip_line(f'{whole_of(own)}{wanted}')}"


def pip_line(*args: str) -> str:
    """Return a pip command for this environment, even if the shell uses another environment."""
    return shlex.join([sys.executable, "-m", "pip", "install", *args])


def installed() -> metadata.Distribution | None:
    """Return what pip knows of this installation. Return None if pip did not install it."""
    from importlib import metadata  # a slow import, needed only here

    for name in (DISTRIBUTION, ROUTER):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.distribution(name)
    return None


def origin(own: metadata.Distribution) -> str:
    """Return the wheel or folder that the installation came from, as pip recorded it (PEP 610)."""
    address: str = json.loads(own.read_text("direct_url.json") or "{}").get("url", "")
    url = urllib.parse.urlsplit(address)
    return urllib.parse.unquote(url.path) if url.scheme == "file" else wheel(own.name, own.version)


def whole_of(router: metadata.Distribution) -> str:
    """Return the whole of Baton, beside the router's distribution."""
    path = origin(router)
    return path.removesuffix(ROUTER_FOLDER) if path.endswith(ROUTER_FOLDER) else wheel(DISTRIBUTION, router.version)


def wheel(name: str, version: str) -> str:
    return f"./{name.replace('-', '_')}-{version}-py3-none-any.whl"
