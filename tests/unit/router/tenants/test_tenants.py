"""The keys file: one key or tenants, who is found by a key, and what becomes of a file that changes."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from deploy import cli
from deploy.cluster.admin import table
from deploy.router_http import seers_key
from router.api.ask.resolve import Resolver
from router.tenants import book
from router.tenants.book import KeysFollower, Tenants
from router.tenants.keys_file import NO_KEYS, hash_of, parse_keys, read_keys
from router.tenants.tenant import EVERYBODY
from router.text.load import load_text_model
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import ConfigError, ModelNotFound
from shared.observe.log import Logger
from tests.support.clusters.key_folders import write_key
from tests.support.machine.patience import HANG_GUARD_S

TWO = f"""
stream_secret = "s"

[tenants.alice]
keys = ["{hash_of("a1")}", "{hash_of("a2")}"]
requests_per_minute = 60
tokens_per_minute = 9000
priority = 2
adapters = ["sql"]

[tenants.bob]
keys = ["{hash_of("b")}"]
sees_cluster = true
"""


def test_tenants_are_found_by_each_of_their_keys() -> None:
    tenants = Tenants(parse_keys(TWO))
    alice, again, bob = (tenants.find([key]) for key in ("a1", "a2", "b"))
    assert alice is not None and alice is again and bob is not None
    assert tenants.find(("wrong", "b")) is bob
    assert (alice.requests_per_minute, alice.tokens_per_minute, alice.priority) == (60, 9000, 2)
    assert alice.may_use("sql") and not alice.may_use("other") and bob.may_use("other")
    assert bob.sees_cluster and not alice.sees_cluster
    assert tenants.now.stream_secret == "s"
    assert [tenant.name for tenant in tenants.all()] == ["alice", "bob"]


@pytest.mark.parametrize("given", [(), ("",), ("a3",), (hash_of("a1"),), (hash_of("a1").removeprefix("sha256:"),)])
def test_a_key_of_nobody_s_finds_nobody(given: tuple[str, ...]) -> None:
    """What stands in the file opens nothing."""
    assert Tenants(parse_keys(TWO)).find(given) is None


def test_one_bare_key_is_one_tenant_that_sees_all() -> None:
    tenants = Tenants(parse_keys(" sk-1=\n"))
    assert tenants.find(["sk-1="]) is EVERYBODY and tenants.find(["sk-1"]) is None
    assert tenants.now.stream_secret == "sk-1=" and EVERYBODY.sees_cluster


def test_without_a_file_everybody_is_let_in() -> None:
    assert read_keys("") is NO_KEYS and Tenants(NO_KEYS).find(()) is EVERYBODY


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("clé", "plain letters"),
        ("x" * 5000, "plain letters"),
        ("[tenants.a]\nkeys = [\n", "neither one key nor TOML"),
        ("\n# nobody\n[tenants]\n", "everybody would be let in"),
        ('[tenants.a]\nkeys = ["sha256:00"]\n', "keys"),
        ("[tenants.a]\nkeys = []\n", "keys"),
        (f'[tenants.a]\nkeys = ["{hash_of("k")}"]\nlimit = 1\n', "limit"),
        (f'[tenants.a]\nkeys = ["{hash_of("k")}"]\nrequests_per_minute = -1\n', "requests_per_minute"),
        (f'[tenants."a b"]\nkeys = ["{hash_of("k")}"]\n', "tenants"),
        (f'[tenants.a]\nkeys = ["{hash_of("k")}"]\n[tenants.b]\nkeys = ["{hash_of("k")}"]\n', "one tenant"),
    ],
)
def test_a_file_that_can_t_be_taken_says_why(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_keys(text)


def test_what_is_wrong_is_told_without_the_text() -> None:
    """A secret that was put on two lines must not end up in a log."""
    with pytest.raises(ConfigError) as failed:
        parse_keys("sk-very\nsk-secret\n")
    assert "secret" not in failed.value.message and "line 1" in failed.value.message


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_file_that_others_may_read_is_none(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(TWO)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"--api-key-file .*chmod 600 {file}"):
        read_keys(str(file))


class Following:
    """A book, its file and its log."""

    def __init__(self, file: Path) -> None:
        self.file, self.told = file, io.StringIO()
        write_key(file, TWO)
        self.tenants = Tenants(read_keys(str(file)))
        self.follower = KeysFollower(str(file), self.tenants, Logger("r", self.told))

    def look(self) -> None:
        found = self.follower.look()
        if found is not None:
            self.follower.take_keys(*found)

    def finds(self, key: str) -> bool:
        return self.tenants.find([key]) is not None


@pytest.mark.parametrize("breaks", ["text", "mode", "away"])
def test_a_broken_file_keeps_the_old_one_and_says_so_once(breaks: str, tmp_path: Path) -> None:
    following = Following(tmp_path / "keys")
    for _ in range(3):  # written again and again by somebody who does not look
        if breaks == "away":
            following.file.unlink(missing_ok=True)
        else:
            write_key(following.file, "[tenants.a]\nkeys" if breaks == "text" else TWO + "\n")
            following.file.chmod(0o644 if breaks == "mode" else 0o600)
        following.look()
        assert following.finds("a1") and following.finds("b") and not following.finds("c")
    assert following.told.getvalue().count("keys stay as they were") == 1
    write_key(following.file, TWO.replace(hash_of("b"), hash_of("c")))
    following.file.chmod(0o600)
    following.look()
    assert following.finds("c") and not following.finds("b")
    assert following.told.getvalue().count("keys were read again") == 1


def test_a_file_is_parsed_only_if_it_changed(tmp_path: Path) -> None:
    following = Following(tmp_path / "keys")
    assert following.follower.look() is not None and following.follower.look() is None
    write_key(following.file, TWO.replace(hash_of("b"), hash_of("c")))
    assert following.follower.look() is not None and following.follower.look() is None


def test_a_file_that_is_away_twice_is_complained_of_twice(tmp_path: Path) -> None:
    following = Following(tmp_path / "keys")
    following.look()
    for _ in range(2):
        following.file.unlink()
        following.look()
        write_key(following.file, TWO)
        following.look()
    assert following.told.getvalue().count("keys stay as they were") == 2


def test_the_file_is_followed_while_the_router_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "FOLLOW_S", 0.001)
    following = Following(tmp_path / "keys")

    async def run() -> None:
        changed = asyncio.Event()
        following.tenants.on_change = changed.set
        task = asyncio.create_task(following.follower.follow())
        write_key(following.file, TWO.replace(hash_of("b"), hash_of("c")))
        await asyncio.wait_for(changed.wait(), HANG_GUARD_S)
        task.cancel()

    asyncio.run(run())
    assert following.finds("c")


# ---- baton keys tenant


def make_tenant(file: Path, name: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the key that was printed."""
    assert cli.main(["keys", "tenant", str(file), name, *flags]) == 0
    return capsys.readouterr().out.splitlines()[0].rpartition(" ")[2]


def test_the_command_makes_keys_that_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    first = make_tenant(file, "alice", capsys, "--requests-per-minute", "60", "--priority", "-1")
    file.write_text(file.read_text() + "# my note\n")
    second = make_tenant(file, "bob", capsys, "--tokens-per-minute", "5000")
    third = make_tenant(file, "alice", capsys)
    tenants = Tenants(read_keys(str(file)))
    alice, bob = tenants.find([first]), tenants.find([second])
    assert alice is not None and bob is not None and tenants.find([third]) is alice
    assert (alice.name, alice.requests_per_minute, alice.priority) == ("alice", 60, -1)
    assert (bob.name, bob.tokens_per_minute) == ("bob", 5000)
    assert tenants.now.stream_secret and "# my note" in file.read_text()
    assert not any(key in file.read_text() for key in (first, second, third)), "only hashes are stored"
    assert file.stat().st_mode & 0o077 == 0


def test_the_command_leaves_a_file_alone_that_it_can_t_add_to(tmp_path: Path) -> None:
    bare, table = tmp_path / "bare", tmp_path / "table"
    write_key(bare, "sk-1\n")
    write_key(
        table, TWO.replace("keys = [", "keys = \\\n[").replace("\\\n", " ").replace("[tenants.bob]", "[tenants.'bob']")
    )
    for file, name, why in ((bare, "bob", "one bare key"), (table, "bob", "by hand"), (table, "a b", "can't name")):
        before = file.read_text()
        assert cli.main(["keys", "tenant", str(file), name]) != 0, why
        assert file.read_text() == before


def test_our_probes_show_the_operator_s_key_if_there_are_tenants(tmp_path: Path) -> None:
    bare, table, admin = (tmp_path / name for name in ("bare", "table", "admin"))
    for file, text in ((bare, "sk-1\n"), (table, TWO), (admin, "op\n")):
        write_key(file, text)
    assert seers_key("", str(admin)) == ""
    assert seers_key(str(bare), str(admin)) == "sk-1"
    assert seers_key(str(table), str(admin)) == "op" and seers_key(str(table), "") == ""


def test_a_tenant_knows_of_its_own_adapters_only() -> None:
    every = {"sql": "d1", "other": "d2"}
    resolver = Resolver("base", load_text_model("hashlm"), LimitsConfig(), lambda: every)
    alice, bob = (Tenants(parse_keys(TWO)).find([key]) for key in ("a1", "b"))
    assert alice is not None and bob is not None
    assert resolver.for_tenant(alice).adapters() == {"sql": "d1"}
    assert resolver.for_tenant(bob).adapters() == every
    resolver.for_tenant(alice).check_model("base")
    with pytest.raises(ModelNotFound):
        resolver.for_tenant(alice).check_model("other")
    every.clear()
    assert resolver.for_tenant(alice).adapters() == {}, "asked anew each time"


def test_the_operator_s_table_says_who_waits_and_what_is_left() -> None:
    waiting = {"tenant": "bob", "priority": -1, "requests": 3, "tokens": 900, "oldest_s": 1.25}
    left = [{"tenant": "alice", "requests": 2, "tokens": 70}, {"tenant": "bob", "tokens": 0}]
    shown = table({"open_requests": 3, "nodes": [], "queue": [waiting], "limits": left}).splitlines()
    assert shown[2:] == [
        "bob: 3 requests wait (900 tokens), the first for 1.2 s; priority -1",
        "alice: 2 requests and 70 tokens left of its limits",
        "bob: 0 tokens left of its limits",
    ]
    assert len(table({"open_requests": 3, "nodes": []}).splitlines()) == 2, "an older router says neither"
