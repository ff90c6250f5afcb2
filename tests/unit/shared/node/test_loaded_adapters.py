"""Adapters that a node loads and removes while it runs, on HashLM: streams are exact, before, during and after."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.config.processes import NodeParts
from shared.config.settings.adapter_settings import AdapterConfig
from shared.config.settings.settings import ModelConfig, ParallelConfig
from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.model.math.adapter_bank import bank_of
from shared.model.math.interface import path_digest
from shared.node.loop import adapters
from shared.node.loop.adapters import MOST_WHY, NO_FOLDER, AdapterDesk, check_lora_dir, path_below
from shared.node.loop.node import Node
from shared.node.routers.dialled import RouterState
from shared.wire.messages import AdapterOrder, Key, LoadAdapter, Offer, RemoveAdapter
from shared.wire.ranges import MAX_ORDERS
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import Net, assert_clean, make_node, name_of

KNOBS = CoreKnobs(spare_adapters=2)
PROMPT = tuple(random.Random(4).randrange(95) for _ in range(70))
SAMPLING = SamplingParams(max_tokens=12, min_tokens=12, temperature=0.0)


class Reader(Executor):
    """Reads files when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.is_held = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.jobs.append(job)
        if not self.is_held:
            self.read()
        return future

    def read(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


class Rig:
    def __init__(self, folder: Path, knobs: CoreKnobs = KNOBS) -> None:
        self.folder, self.number = folder, 0
        self.p = make_node("prefill", "p0", knobs, lora_dir=str(folder))
        self.d = make_node("decode", "d0", knobs, lora_dir=str(folder))
        self.readers = {node: reader_of(node) for node in (self.p, self.d)}
        self.net = Net([self.p, self.d])

    def digest(self, path: str) -> str:
        return path_digest(str(self.folder.resolve() / path))

    def tell(self, kind: type[LoadAdapter | RemoveAdapter], name: str, what: str | int, *nodes: Node) -> None:
        self.number += 1
        for node in nodes or (self.p, self.d):
            self.net.to_node(name_of(node), kind(node.ctx.facts.node_id, self.number, name, what))

    def load(self, name: str, path: str, *nodes: Node) -> None:
        self.tell(LoadAdapter, name, path, *nodes)
        self.net.run()

    def remove(self, name: str, *nodes: Node, after_ms: int = 60_000) -> None:
        self.tell(RemoveAdapter, name, after_ms, *nodes)

    def start(self, rid: int, path: str) -> Key:
        return self.net.generate(self.p, self.job(rid, path), self.d)

    def job(self, rid: int, path: str) -> Job:
        return Job(rid, PROMPT, SAMPLING, 5, adapter=self.digest(path) if path else "")

    def answer(self, rid: int, path: str) -> int:
        """Return how many tokens of the prompt were cached."""
        key = self.start(rid, path)
        self.net.run()
        self.check(key, rid, path)
        return self.net.router.end(key).cached_tokens

    def check(self, key: Key, rid: int, path: str) -> None:
        assert self.net.router.end(key).reason != "error", self.net.router.end(key)
        assert self.net.router.streams[key] == self.job(rid, path).expected()

    def order(self, node: Node, number: int = 0) -> AdapterOrder:
        self.net.at(1.0)
        self.net.run()
        told = self.net.router.heartbeats[node.ctx.facts.node_id].adapter_orders
        return next(order for order in told if order.number == (number or self.number))

    def named(self, node: Node) -> dict[str, str]:
        """Return what the node's last Hello offers."""
        said = [hello for hello in self.net.router.hellos if hello.node_id == node.ctx.facts.node_id]
        return {own.name: own.digest for own in said[-1].adapters}


def reader_of(node: Node) -> Reader:
    reader = Reader()
    node.adapters = AdapterDesk(
        node.ctx, bank_of(node.ctx.core.model), node.side.outside, node.side.abort, executor=reader
    )
    return reader


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_loaded_adapter_answers_and_the_hello_names_it(rig: Rig) -> None:
    rig.load("sql", "v1")
    for node in (rig.p, rig.d):
        assert rig.named(node) == {"sql": rig.digest("v1")}
        assert rig.order(node) == AdapterOrder(1, "sql", "loaded", rig.digest("v1"))
    assert [rig.answer(1, "v1"), rig.answer(2, ""), rig.answer(3, "v1")] == [0, 0, 64]
    assert_clean(rig.p, rig.d)


def test_a_removed_adapter_stays_until_its_streams_end(rig: Rig) -> None:
    rig.load("sql", "v1")
    key = rig.start(1, "v1")
    rig.net.run(until=lambda: len(rig.net.router.streams[key]) >= 3)
    rig.remove("sql")
    rig.net.run(until=lambda: not rig.named(rig.d))
    told = [(order.state, order.requests) for order in rig.d.adapters.orders() if order.number == rig.number]
    assert not rig.net.router.ends[key] and told == [("leaving", 1)]
    late = rig.start(2, "v1")
    rig.net.run()
    rig.check(key, 1, "v1")
    assert rig.net.router.end(late).error_code == "adapter_missing"
    for node in (rig.p, rig.d):
        assert rig.order(node) == AdapterOrder(rig.number, "sql", "removed", rig.digest("v1"))
        assert node.ctx.core.settings.adapters.digests == []
    assert_clean(rig.p, rig.d)


def test_streams_end_when_the_time_is_up(rig: Rig) -> None:
    rig.load("sql", "v1")
    keys = [rig.start(1, "v1"), rig.start(2, "")]
    rig.net.run(until=lambda: all(rig.net.router.streams[key] for key in keys))
    rig.remove("sql", after_ms=0)
    rig.net.run()
    end = rig.net.router.end(keys[0])
    assert (end.reason, end.error_code) == ("error", "adapter_missing") and "was removed" in end.error_message
    rig.check(keys[1], 2, "")
    assert rig.order(rig.d).state == "removed"
    assert_clean(rig.p, rig.d)


def test_a_name_with_other_weights_never_meets_old_pages(rig: Rig) -> None:
    """Of the same name in the same slot; and the old weights find their pages again."""
    cached = []
    for rid, path in enumerate(("v1", "v2", "v1")):
        rig.load("sql", path)
        assert rig.p.ctx.core.settings.adapters.slot(rig.digest(path)) == 1
        cached.append(rig.answer(rid, path))
        rig.remove("sql")
        rig.net.run()
    assert cached == [0, 0, 64]


def test_an_offer_made_before_the_removal_is_granted(rig: Rig) -> None:
    rig.load("sql", "v1")
    first = rig.start(1, "v1")
    rig.net.run(until=lambda: bool(rig.net.router.streams[first]))
    rig.net.hold = lambda source, target, message: isinstance(message, Offer)
    second = rig.start(2, "v1")
    rig.net.run(until=lambda: bool(rig.net.kept))
    rig.remove("sql", rig.d)
    rig.net.run(until=lambda: not rig.named(rig.d))
    rig.net.hold = lambda source, target, message: False
    rig.net.release_held()
    rig.net.run()
    rig.check(first, 1, "v1")
    rig.check(second, 2, "v1")


@pytest.mark.parametrize("path", ["../v1", "/etc", "", ".", "a/../../v1", "link", "link/v1", "a\0b", "x/../.."])
def test_a_path_outside_the_operators_folder_is_refused(path: str, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (outside / "v1").mkdir(parents=True)
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    rig = Rig(inside)
    rig.readers[rig.p].is_held = True
    rig.load("sql", path, rig.p)
    told = rig.order(rig.p)
    assert told.state == "refused" and told.why
    assert not rig.readers[rig.p].jobs, "nothing was opened"
    assert rig.named(rig.p) == {}


def test_a_link_in_an_adapter_that_leads_out_is_refused_by_name(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside / "v1", inside / "shared", outside):
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").touch()
    linked = inside / "v1" / "more.safetensors"
    linked.symlink_to("../shared/weights.safetensors")
    rig, read = Rig(inside), list[Path]()
    bank = bank_of(rig.d.ctx.core.model)
    bank.read, own = lambda folder: (read.append(folder), own(folder))[1], bank.read  # type: ignore[method-assign,union-attr]
    rig.load("sql", "v1", rig.d)
    assert rig.order(rig.d).state == "loaded" and len(read) == 1
    linked.unlink()
    linked.symlink_to(outside / "weights.safetensors")
    rig.load("other", "v1", rig.d)
    told = rig.order(rig.d)
    assert told.state == "refused" and "more.safetensors is a link" in told.why and "--lora-dir" in told.why
    assert len(read) == 1, "nothing was opened"


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "newest").symlink_to("v1")
    assert path_below(str(tmp_path), "newest") == tmp_path.resolve() / "v1"


def test_a_node_without_a_folder_says_what_to_type(tmp_path: Path) -> None:
    node = make_node("decode", "d0", CoreKnobs())
    net = Net([node])
    net.to_node(name_of(node), LoadAdapter("d0", 1, "sql", "v1"))
    net.run()
    net.at(1.0)
    net.run()
    assert net.router.heartbeats["d0"].adapter_orders == [AdapterOrder(1, "sql", "refused", "", NO_FOLDER)]
    assert "--lora-dir DIR" in NO_FOLDER


def test_an_adapter_of_the_start_can_be_removed(tmp_path: Path) -> None:
    """Also on a node that can load none."""
    node = make_node("decode", "d0", CoreKnobs(adapters=("one",)))
    net = Net([node])
    net.to_node(name_of(node), RemoveAdapter("d0", 1, "one", 0))
    net.run()
    assert net.router.hellos[-1].adapters == []
    key = net.generate(node, Job(1, PROMPT, SAMPLING, 5, adapter="one"))
    net.run()
    assert net.router.end(key).error_code == "adapter_missing"


@pytest.mark.parametrize(
    ("before", "asked", "why"),
    [
        ([("sql", "v1")], ("sql", "v2"), "sql has other weights here"),
        ([("a", "v1"), ("b", "v2")], ("c", "v3"), "all 2 slots (--lora-slots) are taken"),
    ],
)
def test_what_can_not_be_loaded(before: list[tuple[str, str]], asked: tuple[str, str], why: str, rig: Rig) -> None:
    for name, path in before:
        rig.load(name, path)
    rig.load(*asked)
    told = rig.order(rig.d)
    assert told.state == "refused" and why in told.why
    assert rig.named(rig.d) == {name: rig.digest(path) for name, path in before}


def test_files_that_can_not_be_read_do_not_end_the_node(rig: Rig) -> None:
    bank = bank_of(rig.d.ctx.core.model)
    for error in (ConfigError("no such folder"), OSError("disk"), MemoryError("much")):
        bank.read = raiser(error)  # type: ignore[method-assign,union-attr]
        rig.load("sql", "v1", rig.d)
        told = rig.order(rig.d)
        assert told.state == "refused" and str(error) in told.why


def raiser(error: Exception) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        raise error

    return read


def test_a_model_without_room_for_adapters_does_not_end_the_node(rig: Rig) -> None:
    rig.d.adapters = AdapterDesk(rig.d.ctx, None, rig.d.side.outside, rig.d.side.abort, executor=Reader())
    rig.load("sql", "v1", rig.d)
    assert rig.order(rig.d).why == "its model takes no adapters"


def test_a_file_can_not_make_heartbeats_large(rig: Rig) -> None:
    bank_of(rig.d.ctx.core.model).read = raiser(ConfigError("x" * 100_000))  # type: ignore[method-assign,union-attr]
    rig.load("sql", "v1", rig.d)
    assert rig.order(rig.d).why == "x" * MOST_WHY


def test_a_router_that_has_not_answered_hears_of_adapters(tmp_path: Path) -> None:
    """Its Welcome to the first Hello would end the Hellos."""
    node = make_node("decode", "d0", KNOBS, lora_dir=str(tmp_path))
    reader_of(node)
    net = Net([node])
    (link,) = node.ctx.routers.dialled.values()
    link.state = RouterState.GREETED
    net.to_node(name_of(node), LoadAdapter("d0", 1, "sql", "v1"))
    net.run()
    assert [own.name for own in net.router.hellos[-1].adapters] == ["sql"]


def test_a_name_removed_while_it_loads_is_not_loaded(rig: Rig) -> None:
    rig.readers[rig.d].is_held = True
    rig.load("sql", "v1", rig.d)
    assert rig.order(rig.d).state == "loading"
    rig.remove("sql", rig.d)
    rig.net.run()
    rig.readers[rig.d].read()
    assert rig.order(rig.d).state == "removed"
    assert "removed before" in rig.order(rig.d, 1).why
    assert rig.named(rig.d) == {}


def test_an_old_order_said_again_changes_nothing(rig: Rig) -> None:
    """When heartbeats no longer tell of it, too."""
    rig.load("sql", "v1", rig.d)
    rig.remove("sql", rig.d)
    for _ in range(MAX_ORDERS):
        rig.load("sql", "v2", rig.d)
    assert {order.number for order in rig.d.adapters.orders()}.isdisjoint({1, 2})
    rig.net.to_node(name_of(rig.d), RemoveAdapter("d0", 2, "sql", 0))
    rig.net.to_node(name_of(rig.d), LoadAdapter("d0", 1, "other", "v1"))
    rig.net.run()
    assert rig.named(rig.d) == {"sql": rig.digest("v2")}


def test_numbers_are_not_kept_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_NUMBERS", 20)
    for _ in range(30):
        rig.remove("sql", rig.d)
    rig.net.run()
    assert list(rig.d.adapters._numbers) == list(range(11, 31))


def test_a_second_removal_changes_the_time_that_is_left(rig: Rig) -> None:
    rig.load("sql", "v1")
    key = rig.start(1, "v1")
    rig.net.run(until=lambda: bool(rig.net.router.streams[key]))
    rig.remove("sql")
    rig.tell(LoadAdapter, "other", "v2")
    rig.net.run(until=lambda: list(rig.named(rig.d)) == ["other"])
    assert not rig.net.router.ends[key]
    rig.remove("other", after_ms=0)
    rig.remove("sql", after_ms=0)
    told = rig.number
    rig.net.run()
    assert rig.net.router.end(key).error_code == "adapter_missing"
    assert rig.order(rig.d, told) == AdapterOrder(told, "sql", "removed", rig.digest("v1"))
    assert_clean(rig.p, rig.d)


def test_drafts_and_late_steps_keep_streams_exact(tmp_path: Path) -> None:
    """With overlap, a step of an ended request may still be in flight when its slot is taken by other weights."""
    rig = Rig(tmp_path, replace(KNOBS, width=3, spare_adapters=1))
    for rid in range(6):
        path = f"v{rid % 2}"
        rig.load("sql", path)
        rig.answer(rid, path)
        rig.remove("sql")
        rig.net.run()
    assert_clean(rig.p, rig.d)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"parallel": ParallelConfig(tp=2)}, "ranks load adapters only at the start"),
        ({"parallel": ParallelConfig(dp=2)}, "ranks load adapters only at the start"),
        ({"parallel": ParallelConfig(pp=2)}, "pipeline stages load adapters only at the start"),
        ({"model": ModelConfig(model="scripted")}, "scripted can't be used with --lora-dir"),
    ],
)
def test_nodes_that_can_not_load_refuse_the_flag(parts: dict[str, Any], why: str) -> None:
    NodeParts(**parts)
    with pytest.raises(ConfigError, match=why):
        NodeParts(**parts, adapters=AdapterConfig(lora_dir="/adapters"))


def test_the_flag_is_checked_before_the_model_loads(tmp_path: Path) -> None:
    parts = NodeParts(adapters=AdapterConfig(lora_dir=str(tmp_path)))
    check_lora_dir(parts, "cpu")
    with pytest.raises(ConfigError, match="on cuda adapters are loaded only at the start"):
        check_lora_dir(parts, "cuda")
    with pytest.raises(ConfigError, match="is not a folder"):
        check_lora_dir(NodeParts(adapters=AdapterConfig(lora_dir=str(tmp_path / "none"))), "cpu")
    check_lora_dir(NodeParts(), "cuda")
