"""The small books of the hand-off: tombstones, page ranges, fingerprints, routers, conversions, jobs."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import pytest
import torch

from shared.core.errors import HandoffFailed
from shared.core.keys import RequestKey, sequence_seed
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.engine.future_map import FutureMap, RelaySpec
from shared.engine.transfer_jobs import TransferJobs
from shared.kv.layout import PlaneSpec
from shared.model.math.interface import ModelSpec
from shared.node.assembly.fingerprint import difference, make_fingerprint
from shared.node.records.convert import (
    draft_state_of_bytes,
    drafts_within,
    prebuilt_of,
    requests_of,
)
from shared.node.records.page_ranges import PageRanges
from shared.node.records.tombstones import Tombstones
from shared.node.routers.dialled import Routers, RouterState
from shared.node.routers.lives import RouterLife, SessionKey
from shared.sched.steps.events import PrefillDone
from shared.transfer.interface import Part
from shared.wire.codec import decode, encode, to_wire
from shared.wire.fitting import misfit
from shared.wire.messages import Fingerprint, Generate
from tests.support.cores.core_rig import CoreKnobs, make_core

KEY = RequestKey("router", 3, "r1", 0, 0)
SAMPLING = SamplingParams(max_tokens=5, temperature=0.5, logit_bias=((1, 0.5),), stop_token_ids=(7,), num_logprobs=1)


# ---- tombstones


def test_a_tombstone_covers_one_key_or_all_sequences() -> None:
    stones = Tombstones(ttl_s=10)
    stones.bury(KEY.sibling(1), now=0)
    assert stones.covers(KEY.sibling(1)) and not stones.covers(KEY)
    stones.bury(KEY.sibling(5), now=0, all_sequences=True)
    assert all(stones.covers(KEY.sibling(i)) for i in range(8))
    assert not stones.covers(KEY._replace(attempt=1))


def test_tombstones_end() -> None:
    stones = Tombstones(ttl_s=10)
    stones.bury(KEY, now=0)
    stones.bury(KEY.sibling(1), now=5)
    stones.bury(KEY, now=6)  # lives on
    stones.expire(now=15.5)
    assert stones.covers(KEY) and not stones.covers(KEY.sibling(1))
    stones.expire(now=100)
    assert len(stones) == 0


def test_tombstones_are_bounded() -> None:
    stones = Tombstones(ttl_s=10, capacity=3)
    for index in range(5):
        stones.bury(KEY.sibling(index), now=index)
    assert len(stones) == 3
    assert [stones.covers(KEY.sibling(index)) for index in range(5)] == [False, False, True, True, True]


# ---- page ranges


def test_a_page_is_whole_when_all_its_layers_are_here() -> None:
    ranges = PageRanges(np.ones(3, np.int32), first=0, num_layers=4)
    first, rest = Part(0, 2), Part(2, 0)
    assert ranges.claim(0, 3, first) and ranges.claim(0, 3, rest)
    ranges.arrived(0, 3, first)
    assert ranges.num_whole == 0
    ranges.arrived(0, 1, rest)
    assert ranges.num_whole == 1 and not ranges.complete
    ranges.arrived(1, 2, rest)
    assert ranges.num_whole == 3 and ranges.complete


@pytest.mark.parametrize(("first", "count"), [(0, 1), (4, 2)])
def test_a_range_that_was_not_asked_for(first: int, count: int) -> None:
    with pytest.raises(HandoffFailed, match="asked for 1..4"):
        PageRanges(np.ones(5, np.int32), 1).claim(first, count)


def test_a_range_that_came_before_is_not_pulled_again() -> None:
    ranges = PageRanges(np.ones(5, np.int32), 0)
    assert ranges.claim(0, 3) and not ranges.claim(0, 3) and not ranges.claim(1, 1)
    with pytest.raises(HandoffFailed, match="overlap"):
        ranges.claim(2, 2)


def test_no_page_comes_for_what_a_window_never_reads() -> None:
    """Two page groups, the second one windowed: its pages 0 to 2 are not sent. Pages count on without them."""
    ranges = PageRanges(np.array([7, 0, 3, 0, 5, 0, 4, 8], np.int32), first=2)
    assert ranges.num_whole == 2 and ranges.entries(2, 3).tolist() == [2, 4, 6]
    assert ranges.claim(2, 1)
    ranges.arrived(2, 1)
    assert ranges.num_whole == 4
    assert ranges.claim(4, 3) and ranges.all_claimed
    with pytest.raises(HandoffFailed, match="4 pages from 2 on"):
        PageRanges(np.array([7, 0, 3, 0, 5], np.int32), 0).claim(2, 4)
    ranges.arrived(4, 3)
    assert ranges.complete


def test_many_pages_arrive_in_few_calls() -> None:
    """The node's loop counts them, and its steps wait meanwhile."""

    def calls(num_pages: int) -> int:
        count = 0

        def see(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(see)
        ranges = PageRanges(np.ones(num_pages, np.int32), 0)
        assert ranges.claim(0, num_pages)
        ranges.arrived(0, num_pages)
        sys.setprofile(None)
        assert ranges.complete
        return count

    assert calls(1000) == calls(2000) < 100


# ---- fingerprints


SPEC = ModelSpec("m", 96, 512, "int", "w", (95,))
PLANES = (PlaneSpec("kv", (2, 16), torch.int64),)


def test_every_field_but_two_keeps_nodes_apart() -> None:
    """Builds may differ in a rolling upgrade; grammars keep only requests apart that have one."""
    ours = make_fingerprint(SPEC, PLANES, 16, None, "1.0")
    assert difference(ours, ours) == ""
    for field in msgspec.structs.fields(Fingerprint):
        other = 99 if isinstance(getattr(ours, field.name), int) else "other"
        found = difference(ours, msgspec.structs.replace(ours, **{field.name: other}))
        assert found.startswith(f"{field.name} differs") if field.name not in ("build", "grammar") else found == ""


# ---- routers


# ---- routers

WORD = SessionKey(b"k", 0.0, 0.0)


def test_a_router_is_known_by_id_and_epoch() -> None:
    routers = Routers(("a", "b"))
    assert routers.dialled["a"].welcome(RouterLife("router", 3), WORD) is None
    assert routers.peer_of(KEY) == "a" and not routers.is_over(KEY)
    assert routers.peer_of(KEY._replace(router_epoch=2)) is None
    assert routers.is_over(KEY._replace(router_epoch=2)) and not routers.is_over(KEY._replace(router_epoch=4))


def test_of_two_that_are_up_under_one_name_the_first_is_served() -> None:
    routers = Routers(("a", "b", "c"))
    a, b = routers.dialled["a"], routers.dialled["b"]
    first, second = RouterLife("router", 3), RouterLife("router", 4)
    a.welcome(first, WORD)
    assert routers.rival("b", second) == "a" and routers.rival("a", second) is None
    assert routers.rival("b", first) is None, "one router at two addresses"
    assert b.refuse(second, "a") is None and b.session.rival == "a" and b.state is RouterState.REFUSED
    assert routers.welcomed() == ["a"] and not routers.is_over(KEY)
    assert a.end(RouterState.DIALLED) == first and routers.take_heirs(RouterLife("another", 1)) == []
    assert routers.take_heirs(first) == [b] and b.session.rival is None and b.state is RouterState.GREETED
    assert routers.rival("b", second) is None and b.welcome(second, WORD) is None


# ---- conversions


def generate(**changes: object) -> Generate:
    fields = dict(
        key=to_wire(KEY),
        prompt_ids=[1, 2, 3],
        output_ids=[[], [9]],
        num_sequences=2,
        sampling=to_wire(SAMPLING),
        seed=11,
        decode_node="d",
        decode_epoch=1,
        decode_endpoint="tcp://127.0.0.1:1",
        remaining_ms=1500,
        ended=[],
        adapter="",
        scored=2,
        cache_salt=6,
    )
    return Generate(**(fields | changes))


@pytest.mark.rule("H18")
def test_a_generate_becomes_one_request_per_sequence() -> None:
    arrivals = iter((4, 5))
    first, second = requests_of(generate(), lambda: next(arrivals), now=10.0)
    assert (first.key, second.key) == (KEY, KEY.sibling(1))
    assert (first.ask.seed, second.ask.seed) == (11, sequence_seed(11, 1))
    assert (first.arrival, second.arrival) == (4, 5)
    assert (first.output_ids, second.output_ids) == ([], [9])
    assert first.ask.prompt_ids.tolist() == [1, 2, 3] and first.ask.sampling == SAMPLING
    assert first.deadline == 11.5 and first.handoff_to == "tcp://127.0.0.1:1"
    assert [req.ask.adapter for req in requests_of(generate(adapter="x"), lambda: 4, now=10.0)] == ["x", "x"]
    assert first.ask.cache_salt == second.ask.cache_salt == 6


def test_sequences_that_have_ended_are_not_run_again() -> None:
    (second,) = requests_of(generate(ended=[0]), lambda: 4, now=10.0)
    assert second.key == KEY.sibling(1) and second.ask.seed == sequence_seed(11, 1) and second.output_ids == [9]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32])
def test_draft_state_survives_the_wire(dtype: torch.dtype) -> None:
    """By name, in whatever order."""
    state = {"hidden_states": torch.arange(6).to(dtype), "topk_index": torch.arange(2)}
    req = Request(KEY, NodeAsk(np.asarray([1, 2], np.int64), SAMPLING, 0), 0)
    record = decode(encode(prebuilt_of(PrefillDone(req, 9, 2, (), state), lease=4)))
    specs = (RelaySpec("topk_index", (2,), torch.int64), RelaySpec("hidden_states", (6,), dtype))
    here = draft_state_of_bytes(record.draft_state, FutureMap(2, 8, specs), peer_drafts=True)
    assert here.keys() == state.keys() and all(torch.equal(here[name], state[name]) for name in state)
    assert (record.token, record.committed, record.lease) == (9, 2, 4)


HEAD = (RelaySpec("topk_p", (1,), torch.float32), RelaySpec("hidden_states", (5,), torch.int64))


@pytest.mark.parametrize(
    ("num_bytes", "specs", "peer_drafts", "needed"),
    [(0, HEAD, True, 44), (4, HEAD, True, 44), (48, HEAD, True, 44), (44, HEAD, False, 0), (44, (), True, 0)],
)
def test_draft_state_of_another_size_is_refused(
    num_bytes: int, specs: tuple[RelaySpec, ...], peer_drafts: bool, needed: int
) -> None:
    with pytest.raises(HandoffFailed, match=f"{needed} are needed"):
        draft_state_of_bytes(bytes(num_bytes), FutureMap(2, 8, specs), peer_drafts=peer_drafts)


def test_a_peer_without_a_head_leaves_zeros() -> None:
    state = draft_state_of_bytes(b"", FutureMap(2, 8, HEAD), peer_drafts=False)
    assert {name: value.tolist() for name, value in state.items()} == {"topk_p": [0.0], "hidden_states": [0] * 5}
    assert draft_state_of_bytes(b"", FutureMap(2, 8), peer_drafts=True) == {}


@pytest.mark.parametrize(
    ("drafts", "within"), [((0, 95), True), ((0, 96), False), ((96, 0), False), ((-1, 95), False), ((95, -1), False)]
)
def test_each_draft_is_a_token_of_the_vocabulary(drafts: tuple[int, ...], within: bool) -> None:
    state = {"topk_index": torch.tensor(drafts), "hidden_states": torch.tensor([-1.0, 1000.0])}
    assert drafts_within(state, vocab_size=96) is within and drafts_within({}, vocab_size=96)


class Named:
    def __init__(self, state_name: str) -> None:
        self.state_name = state_name


@pytest.mark.parametrize(
    ("prefill", "decode", "apart"),
    [
        ("none", "none", None),
        ("eagle", "eagle", None),
        ("none", "eagle", None),  # its planes are our first ones
        ("eagle", "none", "page_layout"),
        ("eagle", "mtp", "page_layout"),
        ("eagle", "eagle of other weights", "spec"),
        ("none of other planes", "eagle", "page_layout"),
    ],
)
def test_which_drafters_make_a_pair(prefill: str, decode: str, apart: str | None) -> None:
    def fingerprint(name: str) -> Fingerprint:
        kind, *other = name.split()
        planes = (PlaneSpec("kv", (4, 8), torch.int64),) if kind == "none" and other else PLANES
        if kind == "none":
            return make_fingerprint(SPEC, planes, 16, None, "1.0")
        planes += (PlaneSpec(kind, (16, 4), torch.int64),)
        return make_fingerprint(SPEC, planes, 16, Named(name), "1.0")  # type: ignore[arg-type]

    assert misfit(fingerprint(prefill), fingerprint(decode)) == apart


# ---- jobs on the transfer stream


def test_a_job_that_raises_fails_alone() -> None:
    core = make_core(CoreKnobs())
    jobs: TransferJobs[str, int] = TransferJobs(core.engine)

    def fail() -> int:
        raise ValueError("broken")

    def refuse() -> int:
        raise HandoffFailed("refused")

    for tag, job in (("a", lambda: 1), ("b", fail), ("c", refuse), ("d", lambda: 4)):
        jobs.launch(tag, job, tag)
    done = {job.tag: job for job in jobs.take_done()}
    assert (done["a"].value, done["d"].value) == (1, 4) and not len(jobs)
    assert "broken" in str(done["b"].error) and "refused" in str(done["c"].error)


# ---- load
