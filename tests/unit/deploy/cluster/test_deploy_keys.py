"""`baton keys`: what it writes, for whose eyes, what it says to do next, and what a bad folder is refused for."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from deploy import cli
from deploy.cluster import key_steps
from shared.core.errors import ConfigError
from shared.wire.keys.key_files import NODE, ROUTER, parse_allowed, read_allowed, read_pair
from shared.wire.keys.keyring import KeyRing, ring_of_node, ring_of_router

KEY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "new" / "keys"
    assert keys("create", path, "--router", "r0", "--node", "p0", "d0") == 0
    return path


def keys(action: str, folder: Path, *rest: str) -> int:
    return cli.main(["keys", action, str(folder), *rest])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_create_writes_private_files_and_says_what_goes_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.iterdir()} == dict.fromkeys(
        ("allowed", "r0.secret", "p0.secret", "d0.secret"), 0o600
    )
    allowed = read_allowed(folder)
    assert [(entry.kind, entry.name) for entry in allowed.entries] == [(ROUTER, "r0"), (NODE, "p0"), (NODE, "d0")]
    assert all(allowed.of_name(name)[0].public == read_pair(folder, name).public for name in ("r0", "p0", "d0"))
    text = (folder / "allowed").read_text()
    secrets = [read_pair(folder, name).secret.hex() for name in ("r0", "p0", "d0")]
    assert len(set(secrets)) == 3 and not any(secret in text for secret in secrets)


def test_create_again_adds_and_changes_nothing(folder: Path) -> None:
    before = read_allowed(folder).entries, (folder / "d0.secret").read_text()
    assert keys("create", folder, "--node", "d0", "d1") == 0
    assert read_allowed(folder).entries[:3] == before[0] and (folder / "d0.secret").read_text() == before[1]
    assert [entry.name for entry in read_allowed(folder).entries] == ["r0", "p0", "d0", "d1"]
    assert keys("create", folder, "--router", "d0") == 2


@pytest.mark.parametrize(
    "names", [[], ["--node", "a", "a"], ["--node", "../x"], ["--node", "a b"], ["--node", "allowed"]]
)
def test_what_can_not_be_created(tmp_path: Path, names: list[str]) -> None:
    assert keys("create", tmp_path / "k", *names) == 2
    assert not (tmp_path / "k").exists()


def test_a_rotation_in_its_order_and_in_no_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = KeyRing(folder, NODE, "d0")
    old = ring.now.own.public
    assert keys("rotate", folder, "d0", "--use") == 2
    assert keys("rotate", folder, "d0", "--drop-old") == 2
    assert keys("rotate", folder, "d0") == 0
    assert "--use" in capsys.readouterr().out
    assert ring.refresh() and ring.now.own.public == old and len(ring.now.allowed.of_name("d0")) == 2
    assert keys("rotate", folder, "d0") == 2
    assert keys("rotate", folder, "d0", "--drop-old") == 2, "the old key is in use"
    keys("show", folder)
    assert "--use is next" in capsys.readouterr().out
    assert keys("rotate", folder, "d0", "--use") == 0
    assert "--drop-old" in capsys.readouterr().out
    assert ring.refresh() and ring.now.own.public != old and ring.node_of(old) == "d0"
    assert keys("rotate", folder, "d0", "--drop-old") == 0
    assert "every machine" in capsys.readouterr().out
    assert ring.refresh() and ring.node_of(old) is None and ring.node_of(ring.now.own.public) == "d0"
    assert not ring.refresh()
    assert not list(folder.glob("*.next")) and not list(folder.glob(".*"))


def test_a_new_key_is_not_used_before_it_is_allowed(folder: Path) -> None:
    """On NAME's machine the list comes by copy: without it NAME would shut itself out."""
    before = (folder / "allowed").read_text()
    keys("rotate", folder, "d0")
    (folder / "allowed").write_text(before)
    assert keys("rotate", folder, "d0", "--use") == 2
    assert (folder / "d0.next").exists()


def test_a_list_that_can_not_be_written_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said to have happened, no secret is lost, and the step can be taken again."""

    def fails(folder: Path, entries: object) -> None:
        raise ConfigError("the disk is full")

    def failing(*step: str) -> None:
        before = {path.name for path in folder.glob("*.secret")}
        capsys.readouterr()
        with monkeypatch.context() as patched:
            patched.setattr(key_steps, "write_list", fails)
            assert keys(step[0], folder, *step[1:]) == 2
        assert not capsys.readouterr().out and {path.name for path in folder.glob("*.secret")} == before
        assert keys(step[0], folder, *step[1:]) == 0

    failing("rotate", "d0")
    assert read_pair(folder, "d0", ".next").public == read_allowed(folder).of_name("d0")[-1].public
    assert keys("rotate", folder, "d0", "--use") == 0
    failing("rotate", "d0", "--drop-old")
    failing("remove", "d0")
    assert not (folder / "d0.secret").exists()


def test_remove(folder: Path) -> None:
    ring = KeyRing(folder, ROUTER, "r0")
    gone = read_pair(folder, "d0").public
    assert keys("remove", folder, "d0") == 0
    assert ring.refresh() and ring.node_of(gone) is None
    assert sorted(path.name for path in folder.iterdir()) == ["allowed", "p0.secret", "r0.secret"]
    assert keys("remove", folder, "d0") == 2


def test_show_tells_no_secret(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "p0.secret").unlink()
    capsys.readouterr()
    assert keys("show", folder) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["r0", "router"], ["p0", "node"], ["d0", "node"]]
    assert "elsewhere" in out.splitlines()[2] and "here" in out.splitlines()[3]
    assert read_pair(folder, "d0").secret.hex()[:16] not in out and "secret=" not in repr(read_pair(folder, "d0"))


@pytest.mark.parametrize("name", [".", "allowed", "d0.secret"])
@pytest.mark.parametrize("open_to", [0o040, 0o004, 0o020, 0o001])
def test_what_others_may_read_or_change_is_refused(folder: Path, name: str, open_to: int) -> None:
    path = folder / name
    path.chmod(mode(path) | open_to)
    with pytest.raises(ConfigError, match=f"is open to others .*chmod {'700' if name == '.' else '600'}"):
        KeyRing(folder, NODE, "d0")


def test_a_running_ring_keeps_its_keys_while_files_make_no_sense(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(folder, NODE, "d0")
    good, text = ring.now, (folder / "allowed").read_text()
    for bad in ("nonsense", "", text.replace("node d0", "node d9")):
        (folder / "allowed").write_text(bad)
        assert not ring.refresh() and not ring.refresh() and ring.now is good
    (folder / "allowed").unlink()
    assert not ring.refresh()
    assert len(caplog.records) == 3, "each complaint once"
    keys_again = folder / "again"
    keys_again.write_text(text)
    keys_again.chmod(0o600)
    keys_again.rename(folder / "allowed")
    assert ring.refresh() and ring.now.own == good.own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node d0", "line 1"), (f"# fine\nnode d0 {KEY}\nking d1 {OTHER}", "line 3"), (f"node d0 {KEY[1:]}", "64 hexa"),
        (f"node d0 {'x' * 64}", "64 hexa"), (f"node d0 {KEY}\nnode d1 {KEY}", "twice"),
        (f"node d0 {KEY}\nrouter d0 {OTHER}", "the same name"), (f"node ../d0 {KEY}", "can't name"),
    ],
)  # fmt: skip
def test_a_list_that_makes_no_sense(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_allowed(text, "the list")


def test_who_a_process_is(folder: Path) -> None:
    assert ring_of_node("", "d0") is None and ring_of_router("", "r0") is None
    assert ring_of_node(str(folder), "d0").name == "d0"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="choose with --node-id"):
        ring_of_node(str(folder), "")
    (folder / "p0.secret").unlink()
    assert ring_of_node(str(folder), "").name == "d0", "the one whose secret is here"  # type: ignore[union-attr]
    for make, match in (
        (lambda: ring_of_node(str(folder), "p0"), "p0.secret"),
        (lambda: ring_of_node(str(folder), "r0"), "router's key"),
        (lambda: ring_of_router(str(folder), "d0"), "node's key"),
        (lambda: ring_of_node(str(folder / "not there"), "d0"), "baton keys create"),
    ):
        with pytest.raises(ConfigError, match=match):
            make()
