"""What a GPU machine without network is sent, and that the checks import nothing that it then lacks."""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.gpu import pack, run
from tests.gpu.plan import CHECKS, CHECKS_PACKAGE, NotHere
from tests.support.machine.small_site import closure, link_site, run_in

LARGE = ("torch", "numba", "transformers")  # what the machine has, with all that these need
COMMANDS = ("tests.gpu.run", "tests.gpu.machine", "tests.gpu.one")
IMPORT_THESE = """
import importlib, json, sys
lacking = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacking[name] = error.name
print(json.dumps(lacking))
"""


def test_the_checks_import_what_a_packed_machine_has(tmp_path: Path) -> None:
    """No tool of tests: pytest is neither there nor packed."""
    names = closure(LARGE) | {line.split("==")[0] for line in pack.wanted([])}
    assert not names & {"pytest", "hypothesis"}
    modules = sorted({f"{CHECKS_PACKAGE}.{check.run.partition('.')[0]}" for check in CHECKS})
    done = run_in(link_site(tmp_path / "site", names), IMPORT_THESE, *COMMANDS, *modules)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def test_packed_packages_are_those_a_node_needs_beside_torch() -> None:
    wanted = {line.split("==")[0] for line in pack.wanted([])}
    assert {"pyzmq", "msgspec", "starlette", "uvicorn", "httptools", "gguf", "llguidance"} <= wanted
    assert not wanted & {"torch", "numpy", "numba", "llvmlite"}
    assert {line.split("==")[0] for line in pack.wanted(["gguf", "pyzmq"])} == wanted - {"gguf", "pyzmq"}


def test_packs_are_filled_to_their_size_and_joined_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.urandom(3 * pack.MIB)  # can't be compressed
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "some.whl").write_bytes(b"0" * (pack.MIB // 4))
    packs = pack.share_out(lzma.compress(whole), tmp_path, pack.MIB * 3 // 2)
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in packs]
    assert [folder.name for folder in packs] == ["1", "2", "3"] and max(sizes) - min(sizes) < len(sizes)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pack, "OUT", tmp_path)
    last = packs[-1].rename(tmp_path / "not here")
    (part,) = last.iterdir()
    hidden = part.rename(last / "hidden")
    with pytest.raises(NotHere, match="not all: model.part01, model.part02"):
        pack.find_model(tmp_path)
    hidden.rename(part)
    assert Path(pack.find_model(tmp_path)).read_bytes() == whole
    with pytest.raises(SystemExit, match="give --mib more"):
        pack.share_out(whole, tmp_path, pack.MIB // 8)
    with pytest.raises(SystemExit, match="give --mib more"):
        pack.share_out(whole + b"1", last, pack.MIB)  # one pack more than there are scripts to send it with


def test_packages_that_are_there_are_not_installed_again(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    for name in ("msgspec-0.22.0-py3-none-any.whl", "no_such_package_at_all-1.0-py3-none-any.whl"):
        (tmp_path / "1" / name).touch()
    there, missing = sorted(tmp_path.glob("*/*.whl"))
    assert pack.is_installed(there) and not pack.is_installed(missing)
    missing.unlink()
    assert pack.install_missing(tmp_path) is None


def test_missing_packages_are_installed_once_beside_the_others(tmp_path: Path) -> None:
    """Without network, from the folder alone; an installation that was cut off is begun again."""
    (tmp_path / "1").mkdir()
    with zipfile.ZipFile(tmp_path / "1" / "a_baton_test_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_baton_test_package.py", "ANSWER = 42\n")
        info = "a_baton_test_package-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-baton-test-package\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (tmp_path / "site.half").mkdir()
    (tmp_path / "site.half" / "torn.py").touch()
    site = pack.install_missing(tmp_path)
    assert site is not None and not (site / "torn.py").exists()
    command = [sys.executable, "-c", "import a_baton_test_package as it; print(it.ANSWER)"]
    done = subprocess.run(command, env=run.environment(site), capture_output=True, text=True, check=True)
    assert done.stdout == "42\n"
    written = (site / "a_baton_test_package.py").stat().st_mtime_ns
    assert pack.install_missing(tmp_path) == site
    assert (site / "a_baton_test_package.py").stat().st_mtime_ns == written
