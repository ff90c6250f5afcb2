"""Pages that travel layer by layer: each layer is announced when it is written, not later and not earlier, and what was
announced of a step that failed is never installed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from shared.model.math.interface import ModelInputs, ModelOutput
from shared.node.loop.node import Node
from shared.wire.messages import Grant, Installed, Ready
from tests.support.cores.core_rig import CoreKnobs, draw_jobs
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.faulty_pair import job
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node, name_of

KNOBS = CoreKnobs(chunk_size=32, layer_ends=(1,))
Forward = Callable[..., ModelOutput]


@pytest.fixture
def close() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.side.close()
        node.ctx.core.close()


def linked(close: list[Node], transport: str = "zmq", **changes: object) -> tuple[Net, Node, Node]:
    knobs = replace(KNOBS, **changes)
    p = make_node("prefill", "p0", knobs, transport=transport)
    d = make_node("decode", "d0", replace(knobs, backend="inline"), transport=transport)
    close += [p, d]
    return Net([p, d]), p, d


def parts(net: Net) -> list[tuple[int, int, int, int]]:
    return [
        (ready.first_page, len(ready.pages), ready.first_layer, ready.num_layers)
        for ready in net.messages(Ready)
        if isinstance(ready, Ready) and ready.pages
    ]


@pytest.mark.parametrize("transport", ["shm", "zmq", "gloo"])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("page_size", [4, 16])
def test_streams_equal_the_reference(close: list[Node], transport: str, width: int, page_size: int) -> None:
    net, p, d = linked(close, transport, width=width, page_size=page_size)
    jobs = draw_jobs(random.Random(width + page_size), 8)
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert net.messages(Installed) and any(part[3] for part in parts(net))
    assert_clean(p, d)


def test_each_layer_of_each_page_travels_once(close: list[Node]) -> None:
    """70 tokens in chunks of 32: the grant finds two steps launched, and the layers of both go ahead together."""
    net, p, d = linked(close)
    net.generate(p, job(), d)
    net.run()
    sent = [(page, layer) for first, n, low, count in parts(net) for page in range(first, first + n)
            for layer in range(low, low + count if count else 2)]  # fmt: skip
    assert sorted(sent) == [(page, layer) for page in range(5) for layer in range(2)]
    assert {(0, 4, 0, 1), (0, 2, 1, 0), (4, 1, 0, 1)} <= set(parts(net))
    assert_clean(p, d)


class SlowSecondLayer:
    """A forward that stays behind its first layer until it is let go on."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.armed, self.go_on = True, threading.Event()
        self.behind: int | None = None  # where its chunk begins, once it is behind its first layer

    def __call__(self, inputs: ModelInputs, kv: object) -> ModelOutput:
        output = self._forward(inputs, kv)
        if self.armed and inputs.layers is not None:
            inputs.layers.reached(1)
            self.behind = int(inputs.positions[0])
            assert self.go_on.wait(HANG_GUARD_S)
        return output


def until(net: Net, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_GUARD_S
    while not holds():
        assert time.monotonic() < end
        net.turn()


def test_the_first_layer_is_there_while_the_second_is_computed(close: list[Node]) -> None:
    net, p, d = linked(close, "shm", backend="cpu")
    slow = p.ctx.core.model.forward = SlowSecondLayer(p.ctx.core.model.forward)  # type: ignore[method-assign]
    key = net.generate(p, job(), d)
    until(net, lambda: any(part[3] == 1 for part in parts(net)))
    (handoff,) = d.side.transfers.open.values()
    until(net, lambda: not handoff.num_pulling and not handoff.num_fetching)
    assert handoff.ranges._claimed[0].tolist() == [True, False], "granted while the step was computing already"
    slow.go_on.set()
    net.run_until_ended([key])
    assert net.router.streams[key] == expected(job())
    net.settle(p, d)


def test_a_step_failing_before_its_first_layer_announces_nothing(close: list[Node]) -> None:
    net, p, d = linked(close)

    whole = p.ctx.core.model.forward

    def forward(inputs: ModelInputs, kv: object) -> ModelOutput:
        if inputs.layers is None:  # a step of nobody's
            return whole(inputs, kv)
        raise RuntimeError("on fire")

    def busy(block: bool = False) -> bool:
        return True

    p.ctx.core.model.forward = forward  # type: ignore[method-assign]
    loop = p.ctx.core.loop
    net.on_message = lambda src, dst, message: setattr(loop, "step", busy) if isinstance(message, Grant) else None
    key = net.generate(p, job(), d)
    net.run(until=lambda: loop.step is busy)
    for _ in range(5):  # the failure is there, and the loop has not looked at it
        net.tick(name_of(p))
    assert not parts(net)
    del loop.step
    net.run()
    assert net.router.end(key).error_code == "step_failed"
    assert not parts(net) and not net.messages(Installed)
    assert_clean(p, d)
