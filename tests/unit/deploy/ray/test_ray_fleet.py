"""What the manager of a Ray cluster tells whom, in virtual time: starts, restarts, moves, ends; and the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.ray import launch_plan as plan
from deploy.ray.fleet import LOST_AFTER_S, PLACED_WITHIN_S, ROUTERS_WITHIN_S, Fleet
from deploy.ray.report import (
    AWAY,
    DRAINED,
    FAILED,
    IDLE,
    RUNNING,
    STOPPED,
    ActorPlace,
    ActorReport,
    StartOrder,
    StatusRow,
    StopOrder,
)
from shared.config.core_plan import CorePlan
from shared.config.processes import NodeParts, RayClusterConfig
from shared.config.settings.event_settings import EventsConfig
from shared.config.settings.probe_settings import ProbeConfig
from shared.config.settings.ray_settings import RayConfig, ScalingConfig, ShareConfig
from shared.config.settings.router_settings import RouterConfig
from shared.config.settings.settings import MemoryConfig, NodeConfig, ParallelConfig, SchedConfig, SecurityConfig
from shared.core.errors import ConfigError
from tests.support.cores.changed_config import replaced

HERE = ActorPlace("10.0.0.1", "a", "n1", (0, 1, 2, 3))
THERE = ActorPlace("10.0.0.2", "b", "n2", (0, 1, 2, 3))
KEYS = SecurityConfig(keys="/keys")


def config(**fields) -> RayClusterConfig:
    ray = {name: fields.pop(name) for name in list(fields) if name in RayConfig.__slots__}
    share = {name: fields.pop(name) for name in list(fields) if name in ShareConfig.__slots__}
    nodes = NodeParts(**{name: fields.pop(name) for name in list(fields) if name in NodeParts.__slots__})
    return RayClusterConfig(ray=RayConfig(**ray), share=ShareConfig(**share), nodes=nodes, **fields)


class Story:
    """A fleet, and actors that do at once what they are told."""

    def __init__(self, settings: RayClusterConfig) -> None:
        self.now = 0.0
        self.fleet = Fleet(settings, plan.names_at_start(settings), 0.0)
        self.reports: dict[str, ActorReport] = {}

    def place(self, name: str, where: ActorPlace = HERE, life: str = "1") -> None:
        self.reports[name] = ActorReport(name, life, where, IDLE)
        self.fleet.hear(self.reports[name], self.now)

    def tick(self, step_s: float = 1.0) -> dict[str, object]:
        """Carries out what is ordered; returns it."""
        self.now += step_s
        orders = self.fleet.orders(self.now)
        for name, order in orders.items():
            self.reports[name] = self.done(self.reports[name], order)
        for name, report in self.reports.items():
            if name in self.fleet.members:
                self.fleet.hear(report, self.now)
        return orders

    def done(self, report: ActorReport, order: object) -> ActorReport:
        if not isinstance(order, StartOrder):
            return replace(report, state=STOPPED, pid=0, routers=(), cores=())
        routers = order.config.parts.node.router if hasattr(order.config, "parts") else ()
        return replace(report, state=RUNNING, pid=7, routers=routers, cores=order.config.cores.cpus)

    def state(self, name: str) -> str:
        return self.fleet.members[name].state


def running(settings: RayClusterConfig) -> Story:
    story = Story(settings)
    for name in story.fleet.names:
        story.place(name)
    story.tick()
    assert all(story.state(name) == RUNNING for name in story.fleet.names)
    return story


def with_later(*names: str) -> Story:
    """One node of each role at the start, and these came later."""
    story = running(config())
    for name in names:
        story.fleet.add_member(name, story.now)
        story.place(name)
    story.tick()
    return story


def seen(role: str, num: int) -> dict[str, str]:
    """Return the nodes that routers see: the first `num` names of this role, serving it."""
    return {f"{role}-{index}": role for index in range(num)}


def test_nodes_start_when_all_routers_have_a_place():
    story = Story(config(routers=2))
    story.place("prefill-0")
    assert story.tick() == {}
    story.place("router-0")
    assert list(story.tick()) == ["router-0"]
    story.place("router-1")
    orders = story.tick()
    assert list(orders) == ["router-1", "prefill-0"]
    assert orders["prefill-0"].config.parts.node.router == ("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")
    assert orders["router-1"].config.router.port == 8001 and orders["router-1"].config.router.router_id == "router-1"


def test_there_may_be_any_number_of_routers():
    """There were 16 at most."""
    story = Story(config(routers=40, prefill=1, decode=1))
    for name in story.fleet.names:
        story.place(name)
    story.tick()
    (dialled,) = {story.reports[name].routers for name in ("prefill-0", "decode-0")}
    assert len(set(dialled)) == 40


def test_after_a_while_nodes_start_with_the_routers_there_are():
    story = Story(config(routers=2))
    story.place("router-0")
    story.place("decode-0")
    assert list(story.tick()) == ["router-0"]
    assert list(story.tick(ROUTERS_WITHIN_S)) == ["decode-0"]


def test_on_several_machines_addresses_are_the_machines_own():
    story = Story(config(security=KEYS))
    for name, where in (("router-0", HERE), ("prefill-0", THERE), ("decode-0", HERE)):
        story.place(name, where)
    orders = story.tick()
    assert orders["router-0"].config.router.node_endpoint == "tcp://10.0.0.1:7001"
    assert orders["router-0"].config.router.host == "127.0.0.1", "the API stays on loopback"
    node = orders["prefill-0"].config.parts.node
    assert (node.router, node.bind_host) == (("tcp://10.0.0.1:7001",), "10.0.0.2")


def test_without_keys_a_node_elsewhere_is_not_started():
    story = Story(config())
    for name, where in (("router-0", HERE), ("prefill-0", THERE), ("decode-0", HERE)):
        story.place(name, where)
    orders = story.tick()
    assert list(orders) == ["router-0", "decode-0"] and orders["decode-0"].config.parts.node.bind_host == "127.0.0.1"
    row = next(row for row in story.fleet.rows() if row.name == "prefill-0")
    assert "10.0.0.2" in row.words and "[security] keys" in row.words


def test_each_gets_cores_of_its_own_while_there_are_some():
    story = Story(config(prefill=2, decode=2, decode_cpus=2.0, security=KEYS))
    for name in story.fleet.names:
        story.place(name, HERE if name != "decode-1" else THERE)
    story.tick()
    dealt = {name: report.cores for name, report in story.reports.items()}
    nodes = {"prefill-0": (1,), "prefill-1": (2,), "decode-0": (), "decode-1": (0, 1)}
    assert dealt == {"router-0": (0,), **nodes}, "one core is left for decode-0 and it wants two: it floats"


def test_a_dying_actor_restarts_later_each_time_then_no_more():
    story = running(config(max_restarts=3))
    delays = []
    for life in range(2, 5):
        story.place("decode-0", life=str(life))
        begin = story.now
        while "decode-0" not in story.tick(0.25):
            assert story.now - begin < 60
        delays.append(story.now - begin)
    assert delays == [0.5, 1.0, 2.0]
    story.place("decode-0", life="9")
    assert story.tick(1000.0) == {} and story.state("decode-0") == FAILED
    row = next(row for row in story.fleet.rows() if row.name == "decode-0")
    assert row.restarts == 4 and "kept dying" in row.words and HERE.ip in row.words


def test_an_actor_whose_daemon_never_ran_is_not_punished():
    story = running(config())
    story.place("decode-0", life="2")
    story.place("decode-0", life="3")
    assert story.fleet.members["decode-0"].policy.deaths and len(story.fleet.members["decode-0"].policy.deaths) == 1


def test_a_daemon_that_dies_unseen_is_restarted_the_same_way():
    story = running(config(max_restarts=3))
    story.fleet = Fleet(story.fleet.config, story.fleet.names, story.now)
    story.place("router-0")
    story.place("decode-0")
    begin, starts = story.now, []
    while story.now < begin + 60:
        story.now += 0.25
        if "decode-0" in story.fleet.orders(story.now):
            starts.append(story.now - begin)
            story.place("decode-0", life=f"after {len(starts)}")
    assert starts == [0.25, 0.75, 1.75, 3.75] and story.state("decode-0") == FAILED


@pytest.mark.parametrize("state", [DRAINED, FAILED])
def test_what_was_drained_or_can_not_work_stays_down(state):
    story = running(config())
    story.reports["decode-0"] = replace(story.reports["decode-0"], state=state, words="why")
    story.tick()
    assert story.tick(100.0) == {} and story.state("decode-0") == state


def test_an_actor_dead_for_good_is_remade_ever_later_then_never():
    story = running(config(max_restarts=3))
    del story.reports["decode-0"]
    waits = []
    for _ in range(3):
        story.fleet.lose("decode-0", story.now, "no such module")
        assert story.state("decode-0") == AWAY
        begin = story.now
        while not story.fleet.may_be_made("decode-0", story.now):
            story.now += 0.25
        waits.append(story.now - begin)
    assert waits == [0.5, 1.0, 2.0]
    story.fleet.lose("decode-0", story.now, "no such module")
    assert not story.fleet.may_be_made("decode-0", story.now + 1000) and story.state("decode-0") == FAILED
    assert "no such module" in row_of(story, "decode-0").words and story.tick() == {}


def test_an_actor_that_is_made_again_starts_its_daemon_at_once():
    story = running(config())
    del story.reports["decode-0"]
    story.fleet.lose("decode-0", story.now, "killed by hand")
    story.place("decode-0", life="2")
    assert isinstance(story.tick(0.25)["decode-0"], StartOrder), "its death was counted, and waited for, once"
    assert row_of(story, "decode-0").words == "" and row_of(story, "decode-0").restarts == 1


def test_whoever_is_away_is_listed_with_what_it_needs_and_why():
    story = Story(config(decode_cpus=4.0, decode_gpus=1.0))
    assert "4 CPU, 1 GPU" in row_of(story, "decode-0").words
    story.place("decode-0")
    assert row_of(story, "decode-0").words == ""
    story.fleet.miss("decode-0", 1.0, "the machine is gone")
    story.fleet.miss("decode-0", 2.0)
    words = row_of(story, "decode-0").words
    assert "4 CPU, 1 GPU" in words and "the machine is gone" in words, "the last error stays"


def row_of(story: Story, name: str) -> StatusRow:
    return next(row for row in story.fleet.rows() if row.name == name)


def test_when_the_only_router_moves_all_nodes_follow_at_once():
    story = running(config(security=KEYS, decode=2))
    nodes = ["prefill-0", "decode-0", "decode-1"]
    story.place("router-0", THERE, life="2")
    orders = story.tick(5.0)
    assert isinstance(orders.pop("router-0"), StartOrder) and orders == dict.fromkeys(nodes, StopOrder())
    assert list(story.tick()) == nodes
    assert {story.reports[name].routers for name in nodes} == {("tcp://10.0.0.2:7001",)}


def test_when_one_of_two_routers_moves_nodes_follow_one_by_one():
    story = running(config(security=KEYS, routers=2, prefill=1, decode=2))
    story.place("router-1", THERE, life="2")
    moved = ("tcp://10.0.0.1:7001", "tcp://10.0.0.2:7002")
    while any(report.routers not in ((), moved) for name, report in story.reports.items() if "router" not in name):
        before = dict(story.reports)
        story.tick()
        stopped = [name for name, report in story.reports.items() if report.state == STOPPED]
        assert len(stopped) <= 1, "the others serve meanwhile"
        assert before and story.now < 120
    story.tick()
    assert all(report.state == RUNNING for report in story.reports.values())


@pytest.mark.parametrize("end", [DRAINED, FAILED, "given up", "lost"])
def test_whoever_will_not_run_again_keeps_nobody_from_following(end):
    story = running(config(security=KEYS, routers=2, decode=3))
    out = story.fleet.members["decode-0"]
    if end == "given up":
        story.reports["decode-0"] = replace(story.reports["decode-0"], state=IDLE)
        out.start_at = None
    elif end == "lost":
        del story.reports["decode-0"]
        story.fleet.miss("decode-0", story.now)
        story.now += LOST_AFTER_S
    else:
        story.reports["decode-0"] = replace(story.reports["decode-0"], state=end)
    story.tick()
    story.place("router-1", THERE, life="2")
    for _ in range(10):
        story.tick()
    moved = {story.reports[name].routers for name in ("prefill-0", "decode-1", "decode-2")}
    assert moved == {("tcp://10.0.0.1:7001", "tcp://10.0.0.2:7002")}


def test_whoever_is_away_for_a_moment_is_waited_for():
    story = running(config(security=KEYS, routers=2, decode=2))
    story.fleet.miss("decode-0", story.now)
    story.place("router-1", THERE, life="2")
    assert list(story.fleet.orders(story.now + LOST_AFTER_S)) == ["router-1"]


def test_a_router_that_is_missing_for_a_while_moves_nobody():
    """A manager that was started again knows of no place where a router is that it can't ask."""
    story = running(config(routers=2))
    story.fleet = Fleet(story.fleet.config, story.fleet.names, story.now)
    missing = story.reports.pop("router-1")
    story.tick()
    assert story.tick(ROUTERS_WITHIN_S) == {}
    story.reports["router-1"] = missing
    assert story.tick() == {} and story.tick() == {}


def test_whoever_leaves_is_stopped_first():
    story = with_later("decode-1")
    story.fleet.leave(story.fleet.newest("decode", seen("decode", 2)))
    assert story.fleet.gone(story.now) == [] and not story.fleet.is_steady("decode", seen("decode", 2))
    assert story.tick() == {"decode-1": StopOrder()}
    assert story.fleet.gone(story.now) == ["decode-1"]
    story.fleet.forget_member("decode-1")
    assert story.tick() == {}


def test_a_leaving_node_that_is_silent_gets_time_to_drain():
    story = running(config(decode=2))
    story.fleet.leave("decode-1")
    story.fleet.miss("decode-1", 10.0)
    story.fleet.miss("decode-1", 40.0)
    assert story.fleet.gone(10.0 + LOST_AFTER_S) == []
    assert story.fleet.gone(10.5 + LOST_AFTER_S) == ["decode-1"]


def test_only_a_later_node_is_given_up_for_lack_of_room():
    story = running(config())
    story.fleet.forget_member("decode-0")
    story.fleet.add_member("decode-0", 0.0)
    story.fleet.add_member("decode-1", 100.0)
    assert story.fleet.gone(100.0 + PLACED_WITHIN_S) == []
    assert story.fleet.gone(100.5 + PLACED_WITHIN_S) == ["decode-1"]


def test_a_load_counts_only_when_the_routers_see_every_node():
    """A node that runs and has not arrived yet is no reason for another one."""
    fleet = running(config(decode=2)).fleet
    assert fleet.is_steady("decode", seen("decode", 2)) and fleet.is_steady("prefill", seen("prefill", 1))
    fleet.add_member("decode-2", 1.0)
    assert not fleet.is_steady("decode", seen("decode", 2)) and not fleet.is_steady("decode", seen("decode", 3))
    assert not fleet.is_steady("prefill", {}), "gone from a router's view, and running"


@pytest.mark.parametrize("end", [FAILED, DRAINED])
def test_a_node_that_will_not_run_again_does_not_stop_scaling(end):
    """It would be waited for: the role would never grow or shrink again."""
    story = with_later("decode-1", "decode-2")
    story.reports["decode-2"] = replace(story.reports["decode-2"], state=end, words="why")
    story.tick()
    two, three = seen("decode", 2), seen("decode", 3)
    assert story.fleet.is_steady("decode", two) and not story.fleet.is_steady("decode", three)
    assert story.fleet.newest("decode", two) == "decode-1", "a node that bears no load is not the one to take away"
    assert story.fleet.next_name("decode") == "decode-3"


def test_a_role_whose_new_nodes_all_fail_is_not_grown_for_ever():
    story = running(config())
    grown = 0
    while story.fleet.may_grow("decode", 4):
        name = story.fleet.next_name("decode")
        story.fleet.add_member(name, story.now)
        story.place(name)
        story.tick()
        story.reports[name] = replace(story.reports[name], state=FAILED, words="no such model")
        story.tick()
        assert story.fleet.is_steady("decode", seen("decode", 1))
        grown += 1
    assert grown == 4


def test_names_of_new_nodes_fill_gaps():
    story = running(config(decode=3))
    assert story.fleet.next_name("decode") == "decode-3" and story.fleet.next_name("prefill") == "prefill-1"
    story.fleet.forget_member("decode-1")
    assert story.fleet.next_name("decode") == "decode-1"


# ---- the plan


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(router=RouterConfig(port=0)), "port is 0"),
        (config(router=RouterConfig(node_endpoint="ipc:///tmp/x")), "only its port is used"),
        (config(router=RouterConfig(node_endpoint="tcp://127.0.0.1:0")), "only its port is used"),
        (config(node=NodeConfig(bind_port=5)), "set when nodes are placed"),
        (config(node=NodeConfig(node_id="x")), "set when nodes are placed"),
        (config(probe=ProbeConfig(ready_port=5)), "ready_port can't be shared"),
        (config(events=EventsConfig("tcp://127.0.0.1:5557")), "kv_events_endpoint can't be shared"),
    ],
)
def test_what_is_dealt_out_is_not_chosen(settings, message):
    with pytest.raises(ConfigError, match=message):
        plan.check_config(settings)


def test_several_machines_need_keys_and_the_refusal_says_which():
    settings = config(decode=2, scaling=ScalingConfig(max_decode=3))
    with pytest.raises(ConfigError) as refused:
        plan.check_machines(settings, ["10.0.0.1", "10.0.0.2"])
    wanted = "baton keys create DIR --router router-0 --node prefill-0 decode-0 decode-1 decode-2`"
    assert wanted in str(refused.value) and "10.0.0.2" in str(refused.value)
    plan.check_machines(settings, ["10.0.0.1", "10.0.0.1"])
    plan.check_machines(replaced(settings, security={"keys": "/keys"}), ["10.0.0.1", "10.0.0.2"])


def test_a_bundle_that_no_machine_could_hold_is_refused_by_name():
    settings = config(decode=2, decode_cpus=4.0, decode_gpus=1.0)
    plan.check_bundles(settings, [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}])
    with pytest.raises(ConfigError, match="decode-0 needs 4 CPU, 1 GPU on one machine"):
        plan.check_bundles(settings, [{"CPU": 8.0}, {"CPU": 3.0, "GPU": 4.0}])


def test_resources_of_a_bundle():
    settings = config(router_cpus=0.0, decode_cpus=4.0, decode_gpus=1.0)
    assert plan.resources(settings, "router-0") == {"CPU": 0.001}
    assert plan.resources(settings, "prefill-3") == {"CPU": 1.0}
    assert plan.resources(settings, "decode-0") == {"CPU": 4.0, "GPU": 1.0}
    assert plan.most_cpus(replace(settings, scaling=ScalingConfig(max_decode=3))) == 13.0


@pytest.mark.parametrize(
    ("cpus", "taken", "threads", "cores"),
    [
        (2.0, (0,), 2, (1, 2)),
        (0.5, (), 1, (0,)),
        (2.9, (), 2, (0, 1)),
        (2.0, (0, 1, 2), 2, ()),
        (4.0, (), 4, (0, 1, 2, 3)),
    ],
)
def test_cores_are_dealt_whole_or_not_at_all(cpus, taken, threads, cores):
    dealt = plan.deal_cores(cpus, (0, 1, 2, 3), taken)
    assert (dealt.threads, dealt.cpus) == (threads, cores)


def test_nodes_of_one_machine_leave_memory_free():
    settings = config(prefill=4, decode=4, memory=MemoryConfig(mem_fraction=0.5))
    assert plan.with_memory_share(settings, 1).nodes.memory.mem_fraction == pytest.approx(0.1)
    assert plan.with_memory_share(settings, 8).nodes.memory.mem_fraction == 0.5


@pytest.mark.parametrize(("num_gpus", "share"), [(0.0, 0.8), (0.5, 0.4), (1.0, 0.8)])
def test_nodes_of_one_gpu_share_its_memory(num_gpus: float, share: float):
    settings = config(decode_gpus=num_gpus, memory=MemoryConfig(gpu_mem_fraction=0.8))
    made = plan.node_config(settings, "decode-0", HERE, {}, CorePlan())
    assert made.parts.memory.gpu_mem_fraction == pytest.approx(share)


def gpus_of(settings: RayClusterConfig, there: float) -> list[tuple[float, str]]:
    """(GPUs that it reserves, its --device) of a prefill and a decode node, on machines with this many GPUs."""
    made = plan.with_gpus(settings, there)
    nodes = [plan.node_config(made, name, HERE, (), CorePlan()) for name in ("prefill-0", "decode-0")]
    kept = [plan.resources(made, name).get("GPU", 0.0) for name in ("prefill-0", "decode-0")]
    return [(gpus, node.parts.sched.device) for gpus, node in zip(kept, nodes, strict=True)]


def test_each_node_reserves_a_gpu_where_ray_has_some():
    on_cuda, on_cpu = (config(sched=SchedConfig(device=device)) for device in ("cuda", "cpu"))
    assert gpus_of(config(), 8.0) == [(1.0, "auto")] * 2
    assert gpus_of(config(), 0.0) == [(0.0, "cpu")] * 2
    assert gpus_of(on_cuda, 0.0) == [(1.0, "cuda")] * 2
    assert gpus_of(on_cpu, 8.0) == [(0.0, "cpu")] * 2
    assert gpus_of(config(prefill_gpus=0.5, decode_gpus=0.5), 1.0) == [(0.5, "auto")] * 2


def test_a_node_takes_no_gpu_that_it_did_not_reserve():
    assert gpus_of(config(prefill_gpus=1.0), 8.0) == [(1.0, "auto"), (0.0, "cpu")]


def test_gpus_for_ray_that_can_t_be_are_refused():
    eight = plan.with_gpus(config(prefill=4, decode=5), 8.0)
    with pytest.raises(ConfigError, match="want 9 GPU, this Ray cluster has 8: start fewer.*share.*device = .cpu"):
        plan.check_resources(eight, {"CPU": 16.0, "GPU": 8.0})
    with pytest.raises(ConfigError, match="want 10 CPU, this Ray cluster has 2$"):
        plan.check_resources(eight, {"CPU": 2.0, "GPU": 9.0})
    ranks = config(parallel=ParallelConfig(tp=2))
    assert gpus_of(ranks, 0.0) == [(0.0, "cpu")] * 2
    with pytest.raises(ConfigError, match="--tp 2 --device auto: on Ray a node gets one GPU"):
        plan.with_gpus(ranks, 8.0)
    with pytest.raises(ConfigError, match="--dp 2 --device auto: .* beside an idle GPU"):
        plan.with_gpus(config(parallel=ParallelConfig(dp=2)), 8.0)
    with pytest.raises(ConfigError, match="decode_gpus beside .* device = 'cpu': leave out one"):
        config(decode_gpus=1.0, sched=SchedConfig(device="cpu"))
    with pytest.raises(ConfigError, match="--decode-gpus is 2.0; it must be at most 1"):
        config(decode_gpus=2.0)


@pytest.mark.parametrize(
    ("given", "prefill", "decode"),
    [({"tp": 2}, (2, 1, 1), (2, 1, 1)), ({"dp": 3}, (1, 1, 1), (1, 3, 1)), ({"pp": 2}, (1, 1, 2), (1, 1, 2))],
)
def test_nodes_get_their_ranks_and_prefill_never_splits_rows(given, prefill, decode):
    settings = config(parallel=ParallelConfig(**given))
    for name, expected in (("prefill-0", prefill), ("decode-0", decode)):
        parallel = plan.node_config(settings, name, HERE, (), CorePlan()).parts.parallel
        assert (parallel.tp, parallel.dp, parallel.pp) == expected
