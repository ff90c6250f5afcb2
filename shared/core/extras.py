"""Names the line that installs a package that is missing here.

Baton is on no package index, so a line names what it was installed from: the checkout, the wheel, or the folder. The
extras are those of pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import urllib.parse
from pathlib import Path

from shared.core.errors import ConfigError

DISTRIBUTION = "baton-serve"
PACKAGES = {"load": "matplotlib", "ray": "ray", "nixl": "nixl"}  # extra -> the package that code asks for
OURS = frozenset({"decode_node", "deploy", "prefill_node", "router", "shared"})
ROOT = Path(__file__).parents[2]


def require(extra: str, user: str) -> None:
    """Raise ConfigError unless the extra is installed. `user` is the flag or the command that needs it."""
    if importlib.util.find_spec(PACKAGES[extra]) is None:
        raise ConfigError(missing(PACKAGES[extra], user))


def missing(package: str, user: str) -> str:
    """Return one sentence that ends with the line to type."""
    extra = next((extra for extra, name in PACKAGES.items() if name == package), "")
    return f"{user} needs the package {package}; to install it, type: {install_line(extra)}"


def missing_package(error: ModuleNotFoundError) -> str:
    """Return the package that is not installed, "" when the module is our own: then the error is a fault of ours."""
    package = (error.name or "").partition(".")[0]
    is_missing = bool(package) and package not in OURS and importlib.util.find_spec(package) is None
    return package if is_missing else ""


def install_line(extra: str = "") -> str:
    """Return the line that installs Baton again, with that extra."""
    wanted = f"[{extra}]" if extra else ""
    if (ROOT / "pyproject.toml").is_file():  # as `make setup` does it: what runs stays the checkout's
        return pip_line("--editable", f"{ROOT}{wanted}")
    return pip_line(f"{origin()}{wanted}")


def pip_line(*args: str) -> str:
    """Return a command for this very environment, whichever is active in the shell that it is typed in."""
    return shlex.join([sys.executable, "-m", "pip", "install", *args])


def origin() -> str:
    """Return the wheel or folder that Baton was installed from; pip keeps its address (PEP 610)."""
    from importlib import metadata  # slow, and only for this

    try:
        own = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # a bare copy of the source
        return str(ROOT)
    address: str = json.loads(own.read_text("direct_url.json") or "{}").get("url", "")
    url = urllib.parse.urlsplit(address)
    if url.scheme == "file":
        return urllib.parse.unquote(url.path)
    return f"./{DISTRIBUTION.replace('-', '_')}-{own.version}-py3-none-any.whl"
