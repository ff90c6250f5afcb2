"""Four prefill and four decode nodes in virtual time, one of them slow for a while: what it costs with and without
step times in heartbeats. Without them the router takes all nodes for equal, as it did before it looked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deploy.tools.traffic.figures.summary import Summary
from deploy.tools.traffic.load_plan import LoadPlan
from router.fleet.slowness import Share
from tests.support.worlds import plan_cases as made
from tests.support.worlds.slow_nodes import Slow, TellingCluster, flat, play_telling

BEGIN, END = 5.0, 30.0
ALWAYS = ("--duration", "45", "--warmup", "5", "--drain", "60", "--slo", "ttft<0.5s,tpot<40ms")
DECODING = made.plan(*ALWAYS, "--rate", "14", "--prompt-tokens", "10", "--output-tokens", "100")
PROMPTS = made.plan(*ALWAYS, "--rate", "8", "--prompt-tokens", "30", "--output-tokens", "10")
OTHERS = ("decode-4", "decode-6", "decode-7")
PROFILES = {"10 ms and 1 ms a row": made.profile(), "20 ms": flat(made.profile(), 0.020)}


def play(
    plan: LoadPlan,
    slow: Mapping[str, Slow],
    *,
    measures: bool,
    policy: str = "least_load",
    profile: str = "10 ms and 1 ms a row",
) -> tuple[Summary, TellingCluster]:
    summary, world = play_telling(
        made.layout(4, 4), PROFILES[profile], made.tokens(), plan, policy=policy, slow=slow, measures=measures
    )
    itl, ttft = summary.latencies["itl"], summary.latencies["ttft"]
    print(
        f"{'with' if measures else 'without'} step times: goodput {summary.goodput.value:.2f}/s, "
        f"ITL p95 {1e3 * itl['p95'].value:.1f} ms, p99 {1e3 * itl['p99'].value:.1f} ms, "
        f"TTFT p99 {1e3 * ttft['p99'].value:.0f} ms; "
        + ", ".join(f"{name} {share} at {at:.1f} s" for at, name, share in world.shares)
    )
    return summary, world


@pytest.mark.parametrize(("profile", "policy"), list(zip(PROFILES, ["least_load", "prefix_aware"], strict=True)))
def test_a_decode_node_of_a_third_of_the_speed(profile: str, policy: str) -> None:
    slow = {"decode-5": Slow(3.0, BEGIN, END)}
    before, blind = play(DECODING, slow, measures=False, policy=policy, profile=profile)
    after, world = play(DECODING, slow, measures=True, policy=policy, profile=profile)
    assert not blind.shares
    assert [(name, share) for _, name, share in world.shares] == [("decode-5", Share.EASED), ("decode-5", Share.WHOLE)]
    (eased_at, _, _), (back_at, _, _) = world.shares
    assert BEGIN < eased_at < BEGIN + 10.0 and END < back_at < END + 10.0
    slowed = world.sequences(18.0, END)
    assert slowed["decode-5"] < 0.5 * min(slowed[name] for name in OTHERS)
    assert after.goodput.value > 1.02 * before.goodput.value
    assert after.latencies["itl"]["p95"].value < 0.8 * before.latencies["itl"]["p95"].value
    assert after.latencies["itl"]["p99"].value <= before.latencies["itl"]["p99"].value
    back = world.sequences(back_at + 2.0, 45.0)
    assert back["decode-5"] > 0.8 * min(back[name] for name in OTHERS)


def test_a_decode_node_of_an_eighth_of_the_speed() -> None:
    slow = {"decode-5": Slow(8.0, BEGIN, END)}
    before, _ = play(DECODING, slow, measures=False)
    after, world = play(DECODING, slow, measures=True)
    assert [share for _, _, share in world.shares] == [Share.EASED, Share.WHOLE]
    assert world.sequences(22.0, END)["decode-5"] <= 1.0
    assert after.goodput.value > before.goodput.value
    assert after.latencies["itl"]["p99"].value < 0.9 * before.latencies["itl"]["p99"].value


def test_a_prefill_node_of_a_third_of_the_speed() -> None:
    slow = {"prefill-1": Slow(3.0, BEGIN, END)}
    before, _ = play(PROMPTS, slow, measures=False)
    after, world = play(PROMPTS, slow, measures=True)
    assert [share for _, _, share in world.shares] == [Share.EASED, Share.WHOLE]
    assert world.shares[0][1] == "prefill-1"
    assert after.goodput.value > before.goodput.value
    assert after.latencies["ttft"]["p99"].value < 0.8 * before.latencies["ttft"]["p99"].value


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_nodes_that_are_equally_slow_change_nothing(times: float) -> None:
    slow = {f"decode-{number}": Slow(times) for number in range(4, 8)}
    slow |= {f"prefill-{number}": Slow(times) for number in range(4)}
    before, _ = play(PROMPTS, slow, measures=False)
    after, world = play(PROMPTS, slow, measures=True)
    assert not world.shares and after == before
