"""Two versions of the protocol side by side: which ones work together, and which messages they send each other."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from shared.core.errors import NoNodes
from shared.core.sampling_params import SamplingParams
from shared.wire.codec import MESSAGE_TYPES, decode, encode, sampling_of, to_wire
from shared.wire.fitting import misfit
from shared.wire.messages import Drain, Goodbye, Message
from shared.wire.peers import peer_name
from shared.wire.sampling import Sampling
from shared.wire.versions import FIRST, GONE, PROTOCOL_VERSION, SINCE, work_together
from shared.wire.zeromq import parts
from shared.wire.zeromq.link import NodeLinks
from tests.support.clusters.neighbours import NEXT, next_version, of_neighbour, version_before
from tests.support.house.doc_pages import all_messages, messages_page
from tests.support.house.doc_pages import parts as parts_of_messages
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.wire.node_links import next_message
from tests.support.wire.wire_samples import MESSAGES
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig, failures

STRUCTS: dict[str, Any] = {kind.__name__: kind for kind in (*all_messages(), *parts_of_messages())}
NEW, OLD = FINGERPRINT, msgspec.structs.replace(FINGERPRINT, protocol=PROTOCOL_VERSION - 1)


def test_neighbours_work_together_and_no_others() -> None:
    together = [(one, other) for one in range(12, 18) for other in range(one, 18) if work_together(one, other)]
    alike = [(one, one) for one in range(12, 18)]
    assert together == sorted([*alike, (14, 15), (15, 16), (16, 17)])
    assert all(work_together(other, one) for one, other in together)


def test_a_row_names_a_message_or_a_field_with_a_default() -> None:
    for row, version in [*SINCE.items(), *GONE.items()]:
        kind, _, name = row.partition(".")
        fields = {field.name: field for field in msgspec.structs.fields(STRUCTS[kind])}
        assert row in MESSAGE_TYPES or not fields[name].required, row
        assert FIRST < version <= PROTOCOL_VERSION, row


def test_a_sender_of_no_parameters_means_neutral_ones() -> None:
    """Of any but max_tokens: an earlier version knows fewer of them."""
    wire = msgspec.convert({"max_tokens": 7}, Sampling)
    assert sampling_of(wire) == SamplingParams(7) and to_wire(sampling_of(wire)) == to_wire(SamplingParams(7))


# ---- pairs


def test_versions_keep_neighbours_together_and_numerics_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.wire.versions.FIRST", 1)
    assert misfit(OLD, NEW) is None and misfit(NEW, OLD) is None
    other = msgspec.structs.replace(OLD, numerics=2)
    assert misfit(other, NEW) == misfit(NEW, other) == "numerics"
    far = msgspec.structs.replace(OLD, protocol=PROTOCOL_VERSION - 2)
    assert misfit(far, NEW) == misfit(NEW, far) == "protocol"


def test_neighbours_with_other_numerics_serve_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the status says so."""
    monkeypatch.setattr("shared.wire.versions.FIRST", 1)
    rig, other = RouterRig(), msgspec.structs.replace(OLD, numerics=2)
    for name, fingerprint in (("new", NEW), ("old", other)):
        rig.join("prefill", f"{name}-p", fingerprint=fingerprint)
        rig.join("decode", f"{name}-d", fingerprint=fingerprint)
    sent = [(rig.open()[0], rig.opened.sends[0][0]) for _ in range(8)]
    assert {(peer, generate.decode_node) for generate, peer in sent} == {("new-p@1", "new-d"), ("old-p@1", "old-d")}
    misfits = rig.registry.misfit_status(rig.now)["misfits"]
    assert isinstance(misfits, list) and {"a": "new-d", "b": "old-p", "differs": "numerics"} in misfits


# ---- parameters


def test_new_parameters_go_to_nodes_that_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SINCE, "Sampling.min_p", PROTOCOL_VERSION)
    monkeypatch.setattr("shared.wire.versions.FIRST", 1)
    rig, with_it = RouterRig(), SamplingParams(5, min_p=0.1)
    rig.join("decode", "old", fingerprint=OLD)
    rig.open(sampling=with_it)
    rig.now += 10.0
    assert [*failures(rig.opened), *failures(rig.dispatcher.tick(rig.now))] == [NoNodes.code]
    rig.join("prefill", "old-p", fingerprint=OLD)
    assert rig.registry.misfit_status(rig.now) == {"misfits": [], "strangers": []}
    rig.join("decode", "new", fingerprint=NEW)
    rig.join("prefill", "new-p", fingerprint=NEW)
    for _ in range(4):
        (generate,) = rig.open(sampling=with_it)
        assert generate.decode_node == "new" and rig.opened.sends[0][0] == peer_name("new-p", 1)
    assert {rig.open()[0].decode_node for _ in range(8)} == {"old", "new"}


# ---- messages


@pytest.mark.parametrize(("said", "version"), [("15", 15), ("-1", 0), ("x", 0), ("9" * 10_000, 0)])
def test_a_version_that_is_none_harms_nobody(said: str, version: int) -> None:
    """Without keys anybody may say anything in a handshake."""
    context = zmq.Context.instance()
    with closing(context.socket(zmq.ROUTER)) as socket, closing(context.socket(zmq.DEALER)) as dialler:
        socket.bind("tcp://127.0.0.1:*")
        dialler.setsockopt(zmq.METADATA, f"{parts.VERSION_PROPERTY}:{said}".encode())
        dialler.connect(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        dialler.send(b"hello")
        assert parts.version_of(socket.recv_multipart(copy=False)[-1]) == version


@pytest.mark.parametrize("dialler_is_newer", [True, False])
def test_a_newer_message_goes_only_to_who_knows_it(monkeypatch: pytest.MonkeyPatch, *, dialler_is_newer: bool) -> None:
    """A Goodbye tells that a Drain before it did not come: messages keep their order."""
    monkeypatch.setitem(SINCE, "Drain", PROTOCOL_VERSION + 1)
    drain, goodbye = Drain("n", ""), {"p": Goodbye("p", 7), "d": Goodbye("d", 8)}

    def links(node_id: str, epoch: int, *, is_newer: bool) -> NodeLinks:
        monkeypatch.setattr(parts, "PROTOCOL_VERSION", PROTOCOL_VERSION + is_newer)
        return NodeLinks(node_id, epoch)

    with (
        closing(links("d", 8, is_newer=not dialler_is_newer)) as bound,
        closing(links("p", 7, is_newer=dialler_is_newer)) as dialler,
    ):
        dialler.dial("d@8", bound.endpoint)
        for message in (drain, goodbye["p"]):  # the dialler does not know yet whom it talks to
            assert dialler.send("d@8", message)
        assert next_message(bound).message == goodbye["p"]
        for message in (drain, goodbye["d"]):
            assert bound.send("p@7", message)
        assert next_message(dialler).message == (drain if dialler_is_newer else goodbye["d"])
        for message in (drain, goodbye["p"]):
            assert dialler.send("d@8", message)
        assert next_message(bound).message == (goodbye["p"] if dialler_is_newer else drain)


# ---- the neighbour's page of messages, beside ours

RENAMED = {"Ticket": "NodeTicket"}  # parts since the neighbour's commit; their names are not on the wire
ROW = re.compile(r"^\| `(\w+)` \| ((?:[^|\\]|\\\|)*) \|")


def fields_in(page: str) -> dict[str, dict[str, str]]:
    """Return, for each message and part, its fields in their order, with what the page says of their types."""
    sections = (section.partition("\n") for section in page.split("\n### ")[1:])
    return {kind: {row[1]: row[2] for row in map(ROW.match, text.split("\n")) if row} for kind, _, text in sections}


def with_new_names(page: str) -> str:
    for old, new in RENAMED.items():
        page = page.replace(f"[{old}](#{old.lower()})", f"[{new}](#{new.lower()})").replace(
            f"### {old}\n", f"### {new}\n"
        )
    return page


def test_no_change_of_the_protocol_is_without_a_row() -> None:
    """A failure names the missing row: in SINCE, or in GONE for the release of grace before a field is deleted."""
    theirs: dict[str, Any] = {}
    exec(of_neighbour("shared/wire/versions.py"), theirs)
    assert work_together(theirs["PROTOCOL_VERSION"], PROTOCOL_VERSION), "neighbour.txt is old"
    before = fields_in(with_new_names(of_neighbour("docs/messages.md")))
    now = fields_in(messages_page())
    assert len(before) > 30 and {name for kind in before for name in before[kind]} > {"key", "fingerprint", "min_p"}
    news = {kind for kind in MESSAGE_TYPES if kind not in before}
    for kind, old in before.items():
        new = now.get(kind, {})
        news |= {f"{kind}.{name}" for name in new if name not in old}
        check_fields(kind, old, new, theirs["GONE"])
    without = {name for name in news if not theirs["PROTOCOL_VERSION"] < SINCE.get(name, 0) == PROTOCOL_VERSION}
    assert not without, "SINCE lacks them"


def check_fields(kind: str, old: dict[str, str], new: dict[str, str], gone: dict[str, int]) -> None:
    """No field has changed or moved, and each one that lacks was in the neighbour's GONE."""
    kept = [name for name in old if name in new]
    assert {name: new[name] for name in kept} == {name: old[name] for name in kept}, kind
    assert list(new)[: len(kept)] == kept, f"{kind}: new fields come last"
    deleted = {name for name in old if name not in new}
    assert deleted <= {name for name in old if f"{kind}.{name}" in gone}, kind
    assert not deleted or not STRUCTS[kind].__struct_config__.array_like, f"{kind}: an array has no names"


# ---- messages there and back again

ANSWER = """
import sys
import msgpack
sys.path.insert(0, sys.argv[1])
from shared.wire.codec import decode, encode
from shared.wire.versions import PROTOCOL_VERSION
echoes = [encode(decode(data)) for data in msgpack.unpackb(sys.stdin.buffer.read())]
sys.stdout.buffer.write(msgpack.packb([PROTOCOL_VERSION, echoes]))
"""


def lacking(version: str, message: Message) -> Message:
    """Return what the other version keeps of a message: the fields that it lacks have their defaults."""
    lost = {"before": SINCE, "next": {"Heartbeat.lacks": NEXT}}[version]
    fields = [field for field in msgspec.structs.fields(message) if f"{type(message).__name__}.{field.name}" in lost]
    made = (one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory() for one in fields)
    return msgspec.structs.replace(message, **dict(zip((one.name for one in fields), made, strict=True)))


@pytest.mark.parametrize("version", ["before", "next"])
def test_each_message_is_read_and_written_by_the_neighbour(version: str, tmp_path: Path) -> None:
    """By its own code."""
    code = {"before": version_before, "next": next_version}[version](tmp_path / version)
    sent = [message for message in MESSAGES if version == "next" or type(message).__name__ not in SINCE]
    packed = msgspec.msgpack.encode([encode(message) for message in sent])
    command = [sys.executable, "-P", "-c", ANSWER, str(code)]
    done = subprocess.run(command, input=packed, capture_output=True, timeout=HANG_GUARD_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    protocol, echoes = msgspec.msgpack.decode(done.stdout)
    assert work_together(protocol, PROTOCOL_VERSION) and (version == "before" or protocol == NEXT)
    assert [decode(echo) for echo in echoes] == [lacking(version, message) for message in sent]
