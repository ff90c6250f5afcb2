"""`baton plan act --ray`: when it asks for a node, which one it gives back, and what an unanswering fleet changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.ray.lead import FleetView
from deploy.tools.plan.act.act import fleet_config
from deploy.tools.plan.act.balance import DECODE, PREFILL, ClusterLook, Demand, NodeLook, Totals
from deploy.tools.plan.act.size import Sizer, Wish
from deploy.tools.plan.act.sizing import Sizing
from shared.config.settings.ray_settings import ScalingConfig
from shared.core.errors import ConfigError
from shared.core.states import NodeState

PERIOD_S, WINDOW_S = 2.0, 10.0
SCALING = ScalingConfig(up_after_s=20.0, down_after_s=60.0, settle_s=30.0)


class Plant:
    """Nodes by role, the first of each from the start. Wishes come true at once."""

    def __init__(self, prefill: int, decode: int, most: int = 8, least: int = 1) -> None:
        self.now = 0.0
        self.most = most
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.roles = {name: name.partition("-")[0] for name in names}
        self.at_start = {"prefill-0", "decode-0"}
        self.streams: dict[str, int] = {}
        self.sizer = Sizer(SCALING, WINDOW_S, least)

    def look(self) -> ClusterLook:
        self.now += PERIOD_S
        nodes = (NodeLook(n, r, NodeState.READY, "1", self.streams.get(n, 0)) for n, r in self.roles.items())
        return ClusterLook(self.now, tuple(nodes), Totals(), 0.001, 0.0, 0.0, 8.0)

    def view(self) -> FleetView:
        extra = tuple(name for name in self.roles if name not in self.at_start)
        may_grow = (DECODE,) if len(self.roles) < self.most else ()
        return FleetView(tuple(self.roles), extra, may_grow, True, SCALING)

    def take(self, demand: Demand | None) -> Wish | None:
        wish = self.sizer.see(self.look(), demand, self.view())
        if wish is not None and wish.grow:
            self.roles[f"{wish.grow}-{10 + len(self.roles)}"] = wish.grow
        elif wish is not None and wish.give:
            del self.roles[wish.give]
        elif wish is not None and wish.move is not None:
            self.roles[wish.move.node] = wish.move.role
        return wish

    def until(self, demand: Demand | None, seconds: float = 300.0) -> tuple[float, Wish | None]:
        """The first wish, and the time until it."""
        begin = self.now
        while self.now - begin < seconds:
            wish = self.take(demand)
            if wish is not None:
                return self.now - begin, wish
        return self.now - begin, None


def test_a_load_beyond_every_split_gets_a_node() -> None:
    plant = Plant(2, 2)
    seconds, wish = plant.until(Demand(1.0, 3.5))
    assert wish is not None and (wish.grow, wish.give, wish.move) == (DECODE, "", None)
    least = WINDOW_S + SCALING.up_after_s
    assert least <= seconds <= least + 2 * PERIOD_S, "a window to see the load, then the stated time"


def test_no_node_where_another_split_is_enough() -> None:
    assert Plant(3, 1).until(Demand(0.5, 2.5))[1] is None


def test_no_more_than_the_most_nodes() -> None:
    plant = Plant(1, 1, most=3)
    assert plant.until(Demand(5.0, 5.0))[1] is not None
    assert plant.until(Demand(5.0, 5.0), 1000.0)[1] is None and len(plant.roles) == 3


def test_the_short_role_gets_the_node_if_it_may() -> None:
    for may_grow, expected in (((PREFILL, DECODE), PREFILL), ((DECODE,), DECODE)):
        plant = Plant(2, 2)
        view = replace(plant.view(), may_grow=may_grow)
        wishes = [plant.sizer.see(plant.look(), Demand(3.5, 1.0), view) for _ in range(30)]
        assert [wish.grow for wish in wishes if wish is not None][0] == expected


def test_a_node_that_the_others_can_spare_is_given_back() -> None:
    plant = Plant(2, 2)
    plant.streams = {"prefill-1": 3}
    seconds, wish = plant.until(Demand(0.6, 0.6))
    assert wish is not None and wish.grow == ""
    assert wish.give in ("prefill-1", "decode-1")
    least = WINDOW_S + SCALING.down_after_s
    assert least <= seconds <= least + 2 * PERIOD_S
    assert Plant(2, 2).until(Demand(0.75, 0.75), 1000.0)[1] is None, "one node less would be nearly full"


def test_the_idlest_of_a_role_leaves() -> None:
    plant = Plant(1, 4)
    plant.streams = {"decode-1": 3, "decode-2": 1, "decode-3": 2}
    wish = plant.until(Demand(0.1, 0.1))[1]
    assert wish is not None and wish.give == "decode-2"


def test_nodes_from_the_start_and_the_least_stay() -> None:
    plant = Plant(3, 3, least=2)
    while plant.until(Demand(0.0, 0.0), 1000.0)[1] is not None:
        pass
    assert sorted(plant.roles.values()) == [DECODE, DECODE, PREFILL, PREFILL]
    plant = Plant(3, 3)
    while plant.until(Demand(0.0, 0.0), 1000.0)[1] is not None:
        pass
    assert set(plant.roles) == plant.at_start


def test_a_node_from_the_start_takes_a_later_one_s_role() -> None:
    """The two from the start are prefill nodes now, and a later one is the only decode node."""
    plant = Plant(1, 2)
    plant.roles["decode-0"] = PREFILL
    moved, given = plant.until(Demand(0.1, 0.1))[1], plant.until(Demand(0.1, 0.1))[1]
    assert moved is not None and moved.move is not None and given is not None
    assert (moved.move.node, moved.move.role, given.give) == ("decode-0", DECODE, "decode-1")
    assert plant.until(Demand(0.1, 0.1), 1000.0)[1] is None


@given(st.floats(0.0, 6.0), st.floats(0.0, 6.0), st.integers(1, 4), st.integers(1, 4))
def test_a_constant_load_makes_it_grow_or_shrink_once(
    prefill: float, decode: float, num_prefill: int, num_decode: int
) -> None:
    plant, steps = Plant(num_prefill, num_decode), []
    demand = Demand(prefill, decode)
    for _ in range(600):
        wish = plant.take(demand)
        steps += [] if wish is None or wish.move is not None else [1 if wish.grow else -1]
    assert len(set(steps)) <= 1, "never both"
    assert len(plant.roles) == 8 or not demand.exceeds(len(plant.roles), 1)


def test_waits_begin_again_when_nothing_is_known() -> None:
    plant = Plant(1, 1)
    for _ in range(20):
        assert plant.until(Demand(1.5, 1.5), SCALING.up_after_s)[1] is None
        assert plant.take(None) is None


@pytest.mark.parametrize("change", [{"is_steady": False}, {"nodes": ("prefill-0", "decode-0", "decode-1")}])
def test_no_wish_while_a_node_is_on_its_way(change: dict[str, object]) -> None:
    """Or runs and no router sees it yet."""
    plant = Plant(1, 1)
    view = replace(plant.view(), **change)  # type: ignore[arg-type]  # one of its fields
    assert all(plant.sizer.see(plant.look(), Demand(5.0, 5.0), view) is None for _ in range(200))


def test_a_new_node_is_seen_for_a_window_first() -> None:
    plant = Plant(1, 1)
    plant.sizer = Sizer(replace(SCALING, settle_s=0.0), WINDOW_S, 1)
    plant.until(Demand(5.0, 5.0))
    seconds, wish = plant.until(Demand(5.0, 5.0))
    assert wish is not None and seconds >= WINDOW_S + SCALING.up_after_s


class FakeFleet:
    """Notes calls. `refusal`: an error that each call raises. `is_led`: by another caller."""

    def __init__(self, plant: Plant) -> None:
        self.plant, self.calls, self.refusal, self.is_led = plant, list[tuple[str, ...]](), "", False

    def look(self) -> FleetView:
        self._note("look")
        return self.plant.view()

    def lead(self, grow: str = "", give: str = "") -> FleetView | None:
        self._note("lead", grow, give)
        return None if self.is_led else self.plant.view()

    def release(self) -> None:
        self._note("release")

    def _note(self, *call: str) -> None:
        self.calls.append(call)
        if self.refusal:
            raise ConfigError(self.refusal)


def sizing(*, is_dry: bool = False) -> tuple[Plant, FakeFleet, Sizing, list[str]]:
    plant, said = Plant(1, 1), list[str]()
    fleet = FakeFleet(plant)
    return plant, fleet, Sizing(fleet, plant.sizer, said.append, is_dry=is_dry), said


def test_each_turn_renews_the_lease_and_passes_wishes_on() -> None:
    plant, fleet, sizes, said = sizing()
    for _ in range(20):
        assert sizes.turn(plant.look(), Demand(1.5, 1.5)) is None
    wished = ("lead", DECODE, "")
    assert fleet.calls.count(wished) == 1 and fleet.calls.count(("lead", "", "")) == 20
    assert said == ["asks Ray for one more node, decode: work for 1.5 prefill and 1.5 decode nodes"]
    sizes.end()
    assert fleet.calls[-1] == ("release",)


def test_a_dry_run_does_not_lead() -> None:
    plant, fleet, sizes, said = sizing(is_dry=True)
    for _ in range(20):
        sizes.turn(plant.look(), Demand(1.5, 1.5))
    sizes.end()
    assert set(fleet.calls) == {("look",)} and said[0].endswith("(dry run)")


def test_while_another_leads_it_waits() -> None:
    plant, fleet, sizes, said = sizing()
    fleet.is_led = True
    for _ in range(40):
        sizes.turn(plant.look(), Demand(1.5, 1.5))
    assert len(said) == 1 and "another `baton plan act`" in said[0]
    assert set(fleet.calls) == {("lead", "", "")}
    fleet.is_led = False
    sizes.turn(plant.look(), Demand(1.5, 1.5))
    assert len(said) == 1, "it sees the load for the stated time first"


def test_a_fleet_that_does_not_answer_is_asked_again() -> None:
    plant, fleet, sizes, said = sizing()
    fleet.refusal = "no manager"
    for _ in range(3):
        assert sizes.turn(plant.look(), Demand(1.5, 1.5)) is None
    sizes.end()
    assert said == ["no manager", "no manager"] and len(fleet.calls) == 4, "once, and once at the end"


def test_waits_begin_again_after_trouble_with_the_fleet() -> None:
    plant, fleet, sizes, said = sizing()
    for turn in range(100):
        fleet.refusal = "no manager" if turn % 10 == 9 else ""
        sizes.turn(plant.look(), Demand(1.5, 1.5))
    assert set(said) == {"no manager"}


@pytest.mark.parametrize(
    ("ray", "period_s", "message"),
    [("prefill = 0\ndecode = 2", 2.0, "needs prefill and decode nodes"), ("prefill = 1", 11.0, "at most 10")],
)
def test_what_can_not_be_led_is_refused(tmp_path: Path, ray: str, period_s: float, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f"[ray]\n{ray}\n")
    with pytest.raises(ConfigError, match=message):
        fleet_config(path, period_s)
