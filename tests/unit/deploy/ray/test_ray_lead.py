"""Who decides how many nodes a fleet on Ray has: a leader for the time of its lease, else the fleet's own rules."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from deploy.metrics_page import Page, parse_page
from deploy.ray.fleet import Fleet
from deploy.ray.launch_plan import names_at_start
from deploy.ray.lead import LEASE_S, LeadOrder, Lease
from deploy.ray.own_rules import OwnRules
from deploy.ray.report import DECODE, DRAINED, PREFILL, RUNNING, ActorPlace, ActorReport
from shared.config.processes import RayClusterConfig
from shared.config.settings.ray_settings import RayConfig, ScalingConfig

HERE = ActorPlace("127.0.0.1", "a", "n", (0,))
SCALING = ScalingConfig(max_decode=3, up_after_s=15.0, down_after_s=60.0, settle_s=30.0)
CONFIG = RayClusterConfig(ray=RayConfig(prefill=2, decode=1), scaling=SCALING)
START = {"prefill-0": PREFILL, "prefill-1": PREFILL, "decode-0": DECODE}
TICK_S = 5.0


def fleet_of(*later: str) -> Fleet:
    fleet = Fleet(CONFIG, names_at_start(CONFIG), 0.0)
    for name in later:
        fleet.add_member(name, 0.0)
    for name in fleet.members:
        run(fleet, name)
    return fleet


def run(fleet: Fleet, name: str, state: str = RUNNING) -> None:
    fleet.hear(ActorReport(name, "1", HERE, state), 0.0)


def page(serving: Mapping[str, str], used: float) -> Page:
    lines = []
    for node, role in serving.items():
        labels = f'node="{node}",role="{role}"'
        lines += [
            f"baton_kv_pool_pages{{{labels}}} 100",
            f'baton_kv_pages{{{labels},state="active"}} {100 * used}',
            f'baton_kv_pages{{{labels},state="free"}} {100 - 100 * used}',
        ]
    return parse_page("\n".join(lines))


def play(
    fleet: Fleet, serving: Mapping[str, str], used: float, until_s: float, lease: Lease | None = None
) -> list[tuple[float, str]]:
    """The own rules under a load that does not change, until the first change: its time, and what."""
    rules, now, pages = OwnRules(CONFIG), 0.0, [page(serving, used)]
    while now < until_s:
        changes = rules.apply(fleet, pages, pages, now, is_led=lease is not None and lease.is_held(now))
        if changes:
            return [(now, change) for change in changes]
        now += TICK_S
    return []


def test_only_one_leads_at_a_time() -> None:
    lease = Lease()
    assert lease.take_lease("one", 0.0) and not lease.take_lease("two", LEASE_S - 1.0)
    assert lease.take_lease("one", LEASE_S - 1.0), "each call renews"
    assert not lease.take_lease("two", LEASE_S + 1.0)
    assert lease.take_lease("two", 2 * LEASE_S) and not lease.take_lease("one", 2 * LEASE_S)


def test_a_release_ends_only_the_own_lease() -> None:
    lease = Lease()
    lease.take_lease("one", 0.0)
    lease.release("two")
    assert lease.is_held(1.0)
    lease.release("one")
    assert not lease.is_held(1.0) and lease.take_lease("two", 1.0)


def test_own_rules_rest_while_a_leader_decides() -> None:
    """Its lease runs out after a kill. Then a role must be full for the whole wait."""
    lease = Lease()
    lease.take_lease("one", 0.0)
    grows = f"decode: +1 node at {decode_load(1, 1.0)}"
    assert play(fleet_of(), START, 1.0, 200.0, lease) == [(LEASE_S + SCALING.up_after_s, grows)]
    assert play(fleet_of(), START, 1.0, 200.0) == [(SCALING.up_after_s, grows)]


def test_own_rules_go_on_after_a_change_of_roles() -> None:
    """The defect: a name's role is that of its start, and nothing ever grew or shrank again."""
    serving = START | {"prefill-1": DECODE}
    fleet = fleet_of()
    assert play(fleet, serving, 1.0, 200.0) == [(15.0, f"decode: +1 node at {decode_load(2, 1.0)}")]
    assert "decode-1" in fleet.members


def decode_load(num: int, busy: float) -> str:
    return f"RoleLoad(nodes={num}, waiting=0, busy={busy}, latency=0.0)"


def test_own_rules_take_no_node_from_the_start() -> None:
    """prefill-1 serves as a decode node, and would be the newest of them."""
    fleet = fleet_of("decode-1")
    serving = START | {"prefill-1": DECODE, "decode-1": DECODE}
    assert "decode-1 leaves" in play(fleet, serving, 0.0, 200.0)[0][1]
    assert fleet.members["decode-1"].leaving and not fleet.members["prefill-1"].leaving
    assert play(fleet_of(), START | {"prefill-1": DECODE}, 0.0, 400.0) == []


def test_a_role_has_its_most_nodes_by_their_names() -> None:
    """Keys are made for these names. A node that changed its role still has its name."""
    fleet = fleet_of("decode-1", "decode-2")
    assert fleet.view().may_grow == ()
    assert play(fleet, START | {"decode-1": PREFILL, "decode-2": PREFILL}, 1.0, 200.0) == []
    fleet.forget_member("decode-2")
    assert fleet.view().may_grow == (DECODE,)


def test_a_leader_s_order_is_carried_out() -> None:
    fleet = fleet_of()
    assert fleet.follow(LeadOrder("one", grow=DECODE), 1.0) and "decode-1" in fleet.members
    run(fleet, "decode-1")
    assert fleet.view().extra == ("decode-1",)
    assert fleet.follow(LeadOrder("one", give="decode-1"), 1.0) and fleet.members["decode-1"].leaving


@pytest.mark.parametrize(
    "order",
    [
        LeadOrder("one", grow=PREFILL),
        LeadOrder("one", grow="router"),
        LeadOrder("one", give="decode-0"),
        LeadOrder("one", give="router-0"),
        LeadOrder("one", give="nobody-1"),
    ],
)
def test_an_order_beyond_the_limits_is_refused(order: LeadOrder) -> None:
    fleet = fleet_of("decode-1")
    assert not fleet.follow(order, 1.0)
    assert len(fleet.members) == 5 and not any(member.leaving for member in fleet.members.values())


def test_no_order_while_a_node_starts_or_leaves() -> None:
    fleet = fleet_of("decode-1")
    fleet.leave("decode-1")
    assert not fleet.view().is_steady and not fleet.follow(LeadOrder("one", grow=DECODE), 1.0)
    fleet = fleet_of()
    fleet.add_member("decode-1", 0.0)
    assert not fleet.view().is_steady and not fleet.follow(LeadOrder("one", grow=DECODE), 1.0)


def test_a_drained_node_does_not_count_for_a_leader() -> None:
    fleet = fleet_of("decode-1", "decode-2")
    run(fleet, "decode-1", DRAINED)
    view = fleet.view()
    assert view.is_steady and view.extra == ("decode-2",) and view.may_grow == (DECODE,)
    assert view.nodes == (*START, "decode-2")
