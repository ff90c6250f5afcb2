"""Where a prompt starts: what is learnt of heartbeats, and what is weighed against what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deploy.cluster.admin import table
from router.api.admin.admin import node_status
from router.fleet.prompt_cost import (
    ENOUGH_STEPS,
    FRESH_S,
    HALF_LIFE_STEPS,
    MOST_LOCAL_TOKENS,
    SETTLED_STEPS,
    PromptFigures,
)
from router.fleet.registry import RegisteredNode
from router.policy.interface import Reason, Wanted
from router.policy.least_load import LeastLoad
from router.policy.placement import Placer
from router.policy.prefix_aware import PrefixAware
from router.requests.new_request import NewRequest
from shared.config.settings.router_settings import BY_COST, UNMEASURED_LOCAL_TOKENS
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Heartbeat, NodeLoad
from tests.support.worlds.gateway_rig import GatewayRig
from tests.support.worlds.router_rig import RouterRig

STEP_S, TOKEN_S = 0.010, 0.001  # of all nodes here, unless a test says otherwise
LENGTHS = (16, 40, 200, 600)
PAGES = 4096


def counters(steps: float, tokens: float, seconds: float) -> dict[str, float]:
    return {"prompt_steps": steps, "prompt_step_tokens": tokens, "prompt_step_seconds": seconds}


class Reporter:
    """A node's totals, and the heartbeats that tell them."""

    def __init__(self, step_s: float = STEP_S, token_s: float = TOKEN_S) -> None:
        self.step_s, self.token_s = step_s, token_s
        self.steps = self.tokens = self.seconds = 0.0

    def compute(self, lengths: Sequence[int]) -> dict[str, float]:
        for length in lengths:
            self.steps += 1
            self.tokens += length
            self.seconds += self.step_s + length * self.token_s
        return counters(self.steps, self.tokens, self.seconds)


def learnt(
    step_s: float = STEP_S, token_s: float = TOKEN_S, beats: int = 40, lengths: Sequence[int] = LENGTHS
) -> PromptFigures:
    node, figures = Reporter(step_s, token_s), PromptFigures()
    for beat in range(beats):
        figures.learn(node.compute([lengths[beat % len(lengths)]]), (), 0.5 * beat)
    return figures


class Site(RouterRig):
    """One prefill node and one decode node; a beat says what they measured and what they have before them."""

    def __init__(self, local_tokens: int = BY_COST) -> None:
        super().__init__(local_tokens=local_tokens)
        self.placer = Placer(self.registry, LeastLoad(), local_tokens)
        self.prefill, self.decode = self.join("prefill", "p"), self.join("decode", "d")
        self.reporters = {"p": Reporter(), "d": Reporter()}

    def beat(
        self,
        node: RegisteredNode,
        lengths: Sequence[int] = (),
        *,
        running: int = 0,
        waiting_tokens: int = 0,
        handoffs: Sequence[float] = (),
        free_pages: int = PAGES,
    ) -> None:
        total = self.reporters[node.node_id].compute(lengths)
        rows = {"free": 64 - running, "running": running}
        pages, samples = {"free": free_pages}, {"handoff_cost_seconds": list(handoffs)}
        load = NodeLoad(PAGES, pages, 64, rows, 0, waiting_tokens, 1, total, samples, {}, "")
        self.registry.heartbeat(Heartbeat(node.node_id, 1, load, False), self.now)

    def measured(self, handoff_s: float, *, running: int = 0, waiting_tokens: int = 0) -> Site:
        """Both have computed prompts of all lengths, one a beat, and hand-offs took so long."""
        for turn in range(4 * ENOUGH_STEPS):
            self.now += 0.5
            self.beat(self.prefill, [LENGTHS[turn % 4]], waiting_tokens=waiting_tokens, handoffs=[handoff_s])
            self.beat(self.decode, [LENGTHS[turn % 4]], running=running)
        return self

    def goes_to(self, num_tokens: int) -> str:
        placed = self.placer.place(Wanted(num_tokens, self.now))
        assert placed.decode is self.decode
        return "pair" if placed.prefill is not None else "alone"

    def ways(self, *lengths: int) -> list[str]:
        return [self.goes_to(length) for length in lengths]


# ---- where a prompt starts


def test_a_slow_hand_off_is_worth_it_only_above_the_break_even() -> None:
    """One stream would stand still for a millisecond a token: 150 ms are lost at 150 tokens."""
    site = Site().measured(0.150, running=1)
    assert site.ways(20, 100, 140, 160, 400) == ["alone", "alone", "alone", "pair", "pair"]


def test_each_stream_that_would_stand_still_counts() -> None:
    site = Site().measured(0.150, running=10)
    assert site.ways(14, 16, 32, 100) == ["alone", "pair", "pair", "pair"], "below the constant, too"


def test_an_idle_decode_node_takes_what_would_wait_elsewhere() -> None:
    site = Site().measured(0.002, running=2)
    assert site.goes_to(400) == "pair"
    site.prefill.ours.open_prompt_tokens = site.prefill.ours.open_prompt_work = 5000
    assert site.goes_to(400) == "alone"
    site.decode.ours.open_prompt_tokens = site.decode.ours.open_prompt_work = 5000
    assert site.goes_to(400) == "pair", "it would wait there as long"


def test_without_figures_the_constant_holds() -> None:
    site = Site()
    around = (UNMEASURED_LOCAL_TOKENS, UNMEASURED_LOCAL_TOKENS + 1)
    assert site.ways(*around) == ["alone", "pair"]
    site.beat(site.prefill, LENGTHS * 4)
    assert site.ways(*around) == ["alone", "pair"], "nothing is known of hand-offs"
    site = Site()
    site.beat(site.decode, LENGTHS * 4)
    site.beat(site.prefill, handoffs=[5.0] * 20)
    assert site.ways(*around) == ["alone", "pair"], "nothing is known of the prefill node"


def test_short_prompts_alone_do_not_make_a_decode_node_slow() -> None:
    """Of prompts of one length its step's own part is unknown: it is taken to be as large beside the rest as there."""
    site = Site()
    site.reporters["d"] = Reporter(2 * STEP_S, 2 * TOKEN_S)
    for turn in range(40):
        site.now += 0.5
        site.beat(site.prefill, [LENGTHS[turn % 4]], handoffs=[0.150])
        site.beat(site.decode, [20])
    assert site.ways(135, 145) == ["alone", "pair"], "it takes twice as long: 10 ms and a millisecond a token more"


def test_a_constant_that_was_asked_for_is_kept() -> None:
    site = Site(local_tokens=50).measured(5.0)
    assert site.ways(50, 51, 600) == ["alone", "pair", "pair"]
    assert Site(local_tokens=0).measured(5.0).ways(1) == ["pair"]


def test_there_is_a_longest_prompt_that_a_decode_node_starts() -> None:
    site = Site().measured(60.0)
    assert site.ways(MOST_LOCAL_TOKENS, MOST_LOCAL_TOKENS + 1) == ["alone", "pair"]


def test_a_decode_node_without_room_starts_nothing_by_cost() -> None:
    site = Site().measured(5.0)
    site.beat(site.decode, free_pages=30)  # 480 tokens
    assert site.ways(480, 481) == ["alone", "pair"]
    site.decode.ours.open_prompt_tokens = site.decode.ours.open_prompt_work = 300
    assert site.ways(180, 181) == ["alone", "pair"], "what was sent there and is in no report yet needs room too"


def test_old_figures_count_no_more() -> None:
    """What is never done is never measured: without this a bad minute would last for ever."""
    site = Site().measured(5.0)
    site.now += FRESH_S - 1
    for node in (site.prefill, site.decode):
        site.beat(node, LENGTHS * 4)
    assert site.goes_to(600) == "alone"
    site.now += 2
    assert site.goes_to(600) == "pair", "nothing was handed over for a while"
    site.beat(site.prefill, handoffs=[0.002])
    assert site.prefill.figures.prompts.handoff(site.now) == 0.002, "the bad minute is forgotten"
    site.beat(site.prefill, handoffs=[0.002, 0.1])
    assert site.prefill.figures.prompts.handoff(site.now) > 0.002, "all hand-offs of a heartbeat count"


def test_a_node_that_was_slow_long_ago_is_tried_again() -> None:
    """Else no prompt would come there any more, by which it could show that it is fast."""
    site = Site()
    site.reporters["d"] = Reporter(step_s=5.0)
    site.measured(0.150)
    assert site.goes_to(600) == "pair"
    site.now += FRESH_S + 1
    site.beat(site.prefill, LENGTHS * 4, handoffs=[0.150])
    assert site.goes_to(600) == "alone", "taken to be as fast as its prefill node"
    site.reporters["d"].step_s = STEP_S
    for turn in range(2 * ENOUGH_STEPS):
        site.beat(site.decode, [LENGTHS[turn % 4]])
    speed = site.decode.figures.prompts.speed(site.now)
    assert speed is not None and speed.step_s == pytest.approx(STEP_S), "the slow steps are forgotten"


def test_requests_that_start_by_cost_are_counted() -> None:
    told = GatewayRig(Site().measured(5.0))
    for length, count in ((30, 1), (MOST_LOCAL_TOKENS + 1, 1), (20, 2)):
        told.gateway.open([NewRequest([length] * length, 1, SamplingParams(max_tokens=2), seed=7)])
        assert told.metrics.get_sample_value("baton_started_by_cost_total") == count
    assert [generate.decode_node for _, generate in told.link.generates] == ["", "d", ""]


def test_the_operator_sees_what_was_measured() -> None:
    site = Site().measured(0.0042)
    rows = [node_status(node, site.now) for node in (site.prefill, site.decode)]
    printed = table({"open_requests": 0, "nodes": rows}).splitlines()
    assert "p: prompts at 1000 tokens/s and 10.0 ms a step, hand-offs end 4.2 ms behind their prompts" in printed
    assert "d: prompts at 1000 tokens/s and 10.0 ms a step" in printed
    site.now += FRESH_S + 1
    quiet = [node_status(node, site.now) for node in (site.prefill, site.decode)]
    assert "prompts" not in table({"open_requests": 0, "nodes": quiet})
    old = [{name: value for name, value in row.items() if "prompt" not in name} for row in quiet]
    for row in old:
        del row["handoff_s"]
    assert table({"open_requests": 0, "nodes": old}), "an older router says nothing of it"


# ---- which prefill node


def picked(a: PromptFigures, b: PromptFigures, waiting: tuple[int, int]) -> str:
    """Which of two nodes with these figures and waiting tokens gets a prompt of 100 tokens."""
    site = RouterRig(policy="prefix_aware")
    nodes = [site.join("prefill", "a"), site.join("prefill", "b")]
    for node, figures, num_tokens in zip(nodes, (a, b), waiting, strict=True):
        node.figures.prompts, node.ours.open_prompt_tokens, node.ours.open_prompt_work = figures, num_tokens, num_tokens
    one, other = (PrefixAware().pick(ordered, Wanted(100, site.now)) for ordered in (nodes, nodes[::-1]))
    assert one == other and one.reason is Reason.LOAD
    return one.node.node_id


@pytest.mark.parametrize(
    "slowness, waiting, target", [(1, (236, 500), "a"), (1, (500, 236), "b"), (3, (236, 236), "b")]
)
def test_a_node_with_a_rate_is_compared_by_a_line(slowness: int, waiting: tuple[int, int], target: str) -> None:
    """Node a has computed prompts of 112 tokens only, which took 20 ms, mostly the fixed part of a step. At that rate
    336 tokens would take longer than 600 tokens take on node b, which has a line."""
    beats = 3 * SETTLED_STEPS
    a = learnt(slowness * 0.014, slowness * 5e-5, beats, lengths=(112,))
    assert picked(a, learnt(0.014, 5e-5, beats), waiting) == target


@pytest.mark.parametrize("num_steps, target", [(SETTLED_STEPS // 2, "a"), (3 * SETTLED_STEPS, "b")])
def test_few_steps_do_not_tell_two_nodes_apart(num_steps: int, target: str) -> None:
    """The first steps of node a took three times as long. It has less to compute, so it gets the prompt."""
    assert picked(learnt(3 * STEP_S, 3 * TOKEN_S, num_steps), learnt(beats=3 * SETTLED_STEPS), (100, 200)) == target


# ---- what is learnt


def test_the_cost_of_a_step_and_of_a_token_are_told_apart() -> None:
    speed = learnt().speed(20.0)
    assert speed is not None
    assert (speed.step_s, speed.token_s) == pytest.approx((STEP_S, TOKEN_S))
    assert speed.tokens_per_s == pytest.approx(1 / TOKEN_S) and speed.seconds(100) == pytest.approx(0.110)


def test_times_that_shrink_with_the_length_are_no_rate() -> None:
    figures = PromptFigures()
    tokens = seconds = 0.0
    for beat in range(1, 40):
        length = 10 + 10 * (beat % 5)
        tokens, seconds = tokens + length, seconds + 0.2 - 0.001 * length
        figures.learn(counters(beat, tokens, seconds), (), 0.5 * beat)
    speed = figures.speed(20.0)
    assert speed is not None and speed.step_s == 0.0 and 0.004 < speed.token_s < 0.008


def test_work_from_before_this_router_is_not_measured_now() -> None:
    """A router that starts today hears yesterday's totals first."""
    node, figures = Reporter(), PromptFigures()
    figures.learn(node.compute(LENGTHS * 10), (), 0.0)
    assert figures.speed(0.0) is None
    figures.learn(node.compute(LENGTHS * 10), (), 0.5)
    assert figures.speed(0.5) is not None


def test_a_few_steps_are_no_figures() -> None:
    node, figures = Reporter(), PromptFigures()
    figures.learn(counters(0, 0, 0.0), (), 0.0)
    figures.learn(node.compute(LENGTHS[:3] * 2), (), 0.0)
    assert figures.speed(0.0) is None
    figures.learn(node.compute(LENGTHS), (), 0.5)
    assert figures.speed(0.5) is not None


@pytest.mark.parametrize(
    "nonsense",
    [
        counters(5, 1000, 0.0),  # no time
        counters(5, 1e15, 1e-9),  # a giant rate
        counters(5, 3, 1.0),  # steps of less than a token
        counters(0, 1000, 1.0),
        counters(-5, -1000, -1.0),
        counters(5, 1000, 1e15),
        counters(1e15, 1e15, 1e15),
        {},
        {"prompt_steps": 7.0},
    ],
)
def test_nonsense_is_no_figure_and_ends_none(nonsense: dict[str, float]) -> None:
    figures = learnt()
    before, base = figures.speed(20.0), Reporter()
    base.compute([LENGTHS[beat % 4] for beat in range(40)])
    known = counters(base.steps, base.tokens, base.seconds)
    figures.learn({name: known[name] + nonsense[name] for name in known if name in nonsense}, (), 20.0)
    assert figures.speed(20.0) == before
    fresh = PromptFigures()
    fresh.learn(nonsense, [-1.0, 1e15], 0.0)
    assert fresh.speed(0.0) is None and fresh.handoff(0.0) is None


def test_a_heartbeat_s_long_past_does_not_outweigh_what_follows() -> None:
    """As a router that has just started gets it."""
    node, figures = Reporter(token_s=20 * TOKEN_S), PromptFigures()
    figures.learn(node.compute(LENGTHS * 5000), (), 0.0)
    node.token_s = TOKEN_S
    for beat in range(6 * HALF_LIFE_STEPS):
        figures.learn(node.compute([LENGTHS[beat % 4]]), (), 0.1 * beat)
    speed = figures.speed(40.0)
    assert speed is not None and speed.seconds(200) == pytest.approx(STEP_S + 200 * TOKEN_S, rel=0.3)
