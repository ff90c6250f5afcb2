"""The doctor's checks: facts in, findings out. Each row changes one thing of a cluster where all is well."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from deploy.tools.doctor.check_clocks import check_clocks
from deploy.tools.doctor.check_keys import check_keys
from deploy.tools.doctor.check_links import check_dial, check_handoffs, check_links, check_routers
from deploy.tools.doctor.check_machine import check_machine
from deploy.tools.doctor.check_nodes import check_nodes, differs
from deploy.tools.doctor.check_pages import check_pages
from deploy.tools.doctor.facts import (
    DaemonFacts,
    DialFacts,
    Disk,
    Facts,
    ForeignNode,
    KeysFolder,
    Misfit,
    ReadyFacts,
    Secret,
    SeenPair,
)
from deploy.tools.doctor.finding import BROKEN, LOOK, OK, Finding, worst
from deploy.tools.doctor.visit import examine
from shared.wire.fitting import misfit
from shared.wire.messages import Fingerprint
from tests.support.worlds.doctor_facts import AT_REST, FINGERPRINT, GIB, NOW, PAIR, cluster, machine, node, page, status

P, D = PAIR


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    """(level, where) of all that is not well; each of them says what to do."""
    found = [finding for finding in findings if finding.level != OK]
    assert all(finding.advice and finding.what for finding in found), found
    return [(finding.level, finding.where) for finding in found]


def facts(**changes: object) -> Facts:
    given = Facts("http://r", cluster(), "", False, (), machine())
    return replace(given, **changes)  # type: ignore[arg-type]


def test_where_all_is_well_each_check_says_so() -> None:
    found = examine(facts(dials=(DialFacts("router", "tcp://127.0.0.1:7001", 0.001, ""),)))
    assert bad(found) == []
    checks = {finding.check for finding in found}
    assert checks == {"nodes", "pairs", "transports", "leaks", "counters", "hand-offs", "clocks", "ports", "reach",
                     "routers", "cpu", "memory", "disk"}  # fmt: skip


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (ReadyFacts(False, False, 0, ()), (BROKEN, "no node has dialled in")),
        (ReadyFacts(False, False, 2, ()), (BROKEN, "no node takes requests")),
        (ReadyFacts(True, False, 2, ()), (LOOK, "one role only")),
    ],
)
def test_who_is_there(ready: ReadyFacts, expected: tuple[str, str]) -> None:
    found = check_nodes(cluster(ready=ready))
    assert bad(found) == [(expected[0], "http://r")] and expected[1] in found[0].what


def test_a_node_of_another_version_is_named() -> None:
    ready = ReadyFacts(True, True, 2, (), (ForeignNode("new", 14, 13),))
    found = [finding for finding in check_nodes(cluster(ready=ready)) if finding.where == "new"]
    assert bad(found) == [(BROKEN, "new")] and "protocol 14, not 13" in found[0].what


@pytest.mark.parametrize(("state", "level"), [("silent", BROKEN), ("avoided", LOOK), ("draining", LOOK)])
def test_states(state: str, level: str) -> None:
    assert bad(check_nodes(cluster(P, node("decode-0", state=state)))) == [(level, "decode-0")]


def test_without_the_admin_key_the_first_field_is_known() -> None:
    ready = ReadyFacts(True, True, 2, (Misfit("decode-0", "prefill-0", "page_size"),))
    found = check_nodes(cluster(ready=ready, status=None, no_status="/admin/status answers 401: no"))
    assert bad(found) == [(LOOK, "http://r"), (BROKEN, "decode-0, prefill-0")]
    assert "answers 401" in found[1].what and "page_size" in found[2].what and "--page-size" in found[2].advice


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_every_field_that_differs_is_found_with_both_values(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    other = value * 2 if isinstance(value, int) else value + "-other"
    strange = node("prefill-0", **{field: other})
    found = [finding for finding in check_nodes(cluster(strange, D)) if finding.check == "pairs"]
    assert bad(found) == [(LOOK if field in ("build", "grammar") else BROKEN, "decode-0, prefill-0")]
    assert f"{value} on decode-0" in found[0].what and f"{other} on prefill-0" in found[0].what


def test_all_fields_that_differ_are_named_not_the_first_only() -> None:
    strange = node("prefill-0", page_size=32, dtype="float32", weights="x")
    found = [finding.what.partition(":")[0] for finding in check_nodes(cluster(strange, D)) if finding.check == "pairs"]
    assert found == ["weights", "dtype", "page_size"]


def test_a_prefill_node_without_a_head_is_a_partner() -> None:
    with_head = msgspec.structs.replace(FINGERPRINT, spec="eagle", page_layout="k;v;dk")
    assert misfit(FINGERPRINT, with_head) is None
    assert not any(differs(FINGERPRINT, with_head, name) for name in Fingerprint.__struct_fields__)
    assert differs(with_head, FINGERPRINT, "page_layout") and differs(with_head, FINGERPRINT, "spec")
    assert bad(check_nodes(cluster(P, node("decode-0", spec="eagle", page_layout="k;v;dk")))) == []


def test_a_rolling_upgrade_with_a_partner_for_each_is_not_broken() -> None:
    nodes = (P, D, node("prefill-1", weights="new"), node("decode-1", weights="new"))
    found = [finding for finding in check_nodes(cluster(*nodes)) if finding.check == "pairs"]
    assert bad(found) == [(LOOK, "decode-0, decode-1, prefill-0, prefill-1")]
    assert bad(check_nodes(cluster(*nodes[:3])))[0][0] == BROKEN


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({"transports": ["zmq"]}, LOOK),
        ({"transports": ["zmq"], "host_id": "there"}, OK),
        ({"host_id": "there"}, OK),
        ({"transports": ["shm"], "host_id": "there"}, BROKEN),
        ({"transports": []}, BROKEN),
        ({"transports": ["shm"]}, OK),
    ],
)
def test_transports(changed: dict[str, object], level: str) -> None:
    found = [one for one in check_nodes(cluster(P, node("decode-0", **changed))) if one.check == "transports"]
    assert worst(found) == level


def test_the_smallest_context_limits_all() -> None:
    found = check_nodes(cluster(P, node("decode-0", max_context=512)))
    assert bad(found) == [(LOOK, "decode-0")] and "2048 on prefill-0" in found[-1].what


HELD = AT_REST | {"decode-0": {"held": 7}}


@pytest.mark.parametrize(
    ("before", "after", "level"),
    [
        (page(HELD), page(HELD), BROKEN),
        (page(AT_REST | {"decode-0": {"held": 5}}), page(HELD), BROKEN),  # it grows
        (page(AT_REST | {"prefill-0": {"active": 1}}), page(AT_REST | {"prefill-0": {"active": 1}}), BROKEN),
        (page(AT_REST | {"decode-0": {"running": 1}}), page(AT_REST | {"decode-0": {"running": 1}}), BROKEN),
        (page(HELD), page(), OK),  # once only: on its way back
        (page(), page(HELD), OK),
        (page(AT_REST | {"decode-0": {"granted": 7}}), page(HELD), OK),  # it moves on
        (page(HELD, num_open=1), page(HELD, num_open=1), OK),
        (page(HELD, num_open=1), page(HELD, num_open=0), OK),
        (page(HELD, num_done=5), page(HELD, num_done=6), OK),  # one came and went in between
        (page(HELD), page(HELD, counters={"decode-0": {"steps": 3}}), LOOK),  # another router's
        (page(AT_REST | {"decode-0": {"cached": 90}}), page(AT_REST | {"decode-0": {"cached": 90}}), OK),
    ],
)
def test_leaks_are_what_stays_in_use_at_rest_twice(before: object, after: object, level: str) -> None:
    found = [one for one in check_pages(cluster(before=before, after=after)) if one.check == "leaks"]
    assert worst(found) == level
    if level == BROKEN:
        assert len(bad(found)) == 1 and "twice in a row" in found[0].what


def test_a_node_that_reports_seldom_is_not_called_leaking() -> None:
    seldom = (P, node("decode-0", last_seen_s=2.9))
    assert bad(check_pages(cluster(*seldom, before=page(HELD), after=page(HELD)))) == [(LOOK, "decode-0")]


def test_pages_in_no_state() -> None:
    found = check_pages(cluster(after=page(lost=3)))
    assert sorted(bad(found)) == [(BROKEN, "decode-0"), (BROKEN, "prefill-0")]
    assert "3 of 100 pages" in found[1].what


@pytest.mark.parametrize("name", ["failed_steps", "retractions", "wire_errors", "refused.key", "refused.epoch"])
def test_counters_of_trouble(name: str) -> None:
    found = check_pages(cluster(after=page(counters={"decode-0": {name: 2}})))
    assert bad(found) == [(LOOK, "decode-0")] and found[-1].what.startswith("2 ")


@pytest.mark.parametrize(
    ("before", "after", "level"),
    [(0, 2, LOOK), (2, 3, LOOK), (2, 2, OK), (0, 0, OK)],
)
def test_knocks_without_a_key_are_bad_while_they_come(before: int, after: int, level: str) -> None:
    """Those of the doctor's last visit are none."""
    looks = [page(counters={"decode-0": {"refused.key": count}}) for count in (before, after)]
    found = [one for one in check_pages(cluster(before=looks[0], after=looks[1])) if one.check == "counters"]
    assert worst(found) == level and (not after or f"{after} refused" in found[0].what)


def test_names_under_other_keys_are_bad_whenever_they_came() -> None:
    look = page(counters={"decode-0": {"refused.identity": 1}})
    assert bad(check_pages(cluster(before=look, after=look))) == [(LOOK, "decode-0")]


@pytest.mark.parametrize(
    ("dial", "level"),
    [
        (DialFacts("p", "tcp://10.0.0.1:1", 0.001, ""), OK),
        (DialFacts("p", "tcp://10.0.0.1:1", 0.2, ""), LOOK),
        (DialFacts("p", "tcp://10.0.0.1:1", 3.0, "timed out"), BROKEN),
    ],
)
def test_ports(dial: DialFacts, level: str) -> None:
    assert check_dial(dial).level == level


def test_loopback_addresses_of_nodes_that_are_not_side_by_side() -> None:
    far = node("decode-0", host_id="there", node_endpoint="tcp://10.0.0.3:7002#ab")
    assert bad(check_links(cluster(P, far))) == [(LOOK, "prefill-0")]
    assert bad(check_links(cluster())) == []


def handoffs(seconds: dict[str, list[float]], each_bytes: float) -> list[Finding]:
    num = float(sum(map(len, seconds.values())))
    counters = {"decode-0": {"handoffs": num, "handoff_bytes": num * each_bytes}}
    return check_handoffs(page(AT_REST | {"prefill-1": {}}, counters=counters, handoffs=seconds))


@pytest.mark.parametrize(
    ("seconds", "each_bytes", "expected"),
    [
        ({"prefill-0": [0.01] * 10}, 10e6, []),
        ({"prefill-0": [2.0] * 10}, 1e9, [(LOOK, "prefill-0")]),
        ({"prefill-0": [2.0] * 4}, 1e9, []),  # too few
        ({"prefill-0": [0.01] * 10, "prefill-1": [0.2] * 10}, 1e8, [(LOOK, "prefill-1")]),
        ({"prefill-0": [0.001] * 10, "prefill-1": [0.02] * 10}, 1e8, []),  # nobody notices
        ({"prefill-0": [0.5] * 10}, 10e6, [(LOOK, "cluster")]),  # 20 MB/s at most
        ({"prefill-0": [0.5] * 10}, 1e5, []),  # latency, not rate
        ({}, 0.0, []),
    ],
)
def test_slow_links(seconds: dict[str, list[float]], each_bytes: float, expected: list[tuple[str, str]]) -> None:
    assert bad(handoffs(seconds, each_bytes)) == expected


def test_a_pair_that_can_t_connect_is_broken_and_says_what_to_do() -> None:
    cut = SeenPair("prefill-0", "decode-0", "tcp://10.0.0.2:7002", 12.4, 3)
    found = check_links(cluster(status=status(*PAIR, unreachable=(cut,))))
    assert bad(found) == [(BROKEN, "prefill-0, decode-0")]
    (reach,) = [finding for finding in found if finding.check == "reach"]
    assert "can't connect" in reach.what and "12 s" in reach.what
    assert "tcp://10.0.0.2:7002" in reach.advice and "prefill-0's machine" in reach.advice


@pytest.mark.parametrize(
    ("router_s", "asked_s", "answered_s", "level"),
    [
        (NOW, NOW - 0.01, NOW + 0.01, OK),
        (NOW, NOW - 20.0, NOW + 0.01, OK),  # a slow answer proves nothing
        (NOW + 5.0, NOW - 0.01, NOW + 0.01, LOOK),
        (NOW - 5.0, NOW - 0.01, NOW + 0.01, LOOK),
        (NOW + 500.0, NOW - 0.01, NOW + 0.01, BROKEN),
        (NOW - 500.0, NOW - 0.01, NOW + 0.01, BROKEN),
    ],
)
def test_this_clock_against_the_router_s(router_s: float, asked_s: float, answered_s: float, level: str) -> None:
    found = check_clocks(status(time_s=router_s, asked_s=asked_s, answered_s=answered_s))
    assert worst(found) == level
    if level != OK:
        assert ("behind" if router_s > NOW else "ahead of") in found[0].what


@pytest.mark.parametrize(
    ("epoch_s", "known_s", "level"),
    [
        (NOW - 105.0, 100.0, OK),  # it took five seconds to start
        (NOW - 90.0, 100.0, LOOK),  # it started before it started: ten seconds ahead
        (NOW + 900.0, 100.0, BROKEN),
        (NOW - 50_000.0, 100.0, LOOK),  # behind, or very slow to start
        (NOW - 50_000.0, 3599.0, OK),  # it was there before the router
    ],
)
def test_a_node_s_clock_by_its_epoch(epoch_s: float, known_s: float, level: str) -> None:
    found = check_clocks(status(P, node("decode-0", epoch=int(epoch_s * 1e6), known_s=known_s)))
    assert worst(found) == level and (level == OK or bad(found) == [(level, "decode-0")])


def daemon(
    pid: int, cores: tuple[int, ...], threads: int = 0, *, command: str = "decode", spins: bool = False
) -> DaemonFacts:
    return DaemonFacts(pid, command, 1000, cores, threads, spins)


@pytest.mark.parametrize(
    ("daemons", "expected"),
    [
        ((daemon(1, (0, 1)), daemon(2, (2, 3))), []),
        ((daemon(1, (0, 1), 2), daemon(2, (1, 2), 2)), [LOOK, LOOK]),  # core 1 has two threads
        ((daemon(1, (0, 1, 2, 3)), daemon(2, (0, 1, 2, 3))), [LOOK, LOOK]),  # not told: one thread per core each
        ((daemon(1, (0, 1, 2, 3), 2), daemon(2, (0, 1, 2, 3), 2)), []),  # four threads on four cores
        ((daemon(1, (0,)), daemon(2, (0,), spins=True)), [LOOK, BROKEN]),
        ((daemon(1, (0,), command="router"), daemon(2, (0,))), []),
        ((daemon(1, (0,), 4),), [LOOK]),
        ((daemon(1, (0,), spins=True),), []),
    ],
)
def test_cores_that_are_fought_over(daemons: tuple[DaemonFacts, ...], expected: list[str]) -> None:
    assert [level for level, _ in bad(check_machine(machine(*daemons)))] == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"load": 5.9}, []),
        ({"load": 6.1}, [LOOK]),
        ({"load": 6.1, "cores": (0,), "num_cpus": 64}, []),  # load is the whole machine's, whatever cores are ours
        ({"steal_share": 0.04}, []),
        ({"steal_share": 0.1}, [LOOK]),
        ({"steal_share": 0.3}, [BROKEN]),
        ({"throttled_share": 0.3}, [BROKEN]),
        ({"governors": frozenset({("acpi-cpufreq", "powersave")})}, [LOOK]),
        ({"governors": frozenset({("intel_pstate", "powersave")})}, []),
        ({"available_bytes": GIB}, [LOOK]),
        ({"available_bytes": GIB // 4}, [BROKEN]),
        ({"disks": (Disk("/", GIB // 2), Disk("/tmp", 1000))}, [LOOK, BROKEN]),
        ({"open_files": 256}, [LOOK]),
    ],
)
def test_the_machine(changed: dict[str, object], expected: list[str]) -> None:
    assert [level for level, _ in bad(check_machine(machine(**changed)))] == expected


@pytest.mark.parametrize(
    ("secret", "expected"),
    [
        (Secret("/k", True, 1000, 0o700), ""),
        (Secret("/k/allowed", False, 0, 0o600), "chown 1000 /k/allowed"),  # which a node of uid 1000 can't open
        (Secret("/k", True, 1000, 0o750), "chmod 700 /k"),
        (Secret("/k/a.secret", False, 1000, 0o644), "chmod 600 /k/a.secret"),
        (Secret("/k", True, 1001, 0o700), "chown 1000 /k"),
        (Secret("/k", False, -1, 0, "No such file or directory"), "`baton keys create` makes a folder, see its --help"),
    ],
)
def test_secrets(secret: Secret, expected: str) -> None:
    found = check_keys([KeysFolder("/k", 1000, (secret,), "")])
    assert [finding.advice for finding in found] == [expected]
    assert worst(found) == (BROKEN if expected else OK)


def test_keys_that_a_node_would_refuse() -> None:
    own = Secret("/k", True, 1000, 0o700)
    found = check_keys([KeysFolder("/k", 1000, (own,), "allowed does not list the key of p")])
    assert bad(found) == [(BROKEN, "/k")]
    assert check_keys([]) == []


def test_a_folder_that_is_closed_to_who_asks_is_not_judged() -> None:
    closed = KeysFolder("/k", 1000, (Secret("/k", True, 1000, 0o700),), "", is_open=False)
    assert bad(check_keys([closed])) == [(LOOK, "/k")]


def test_a_daemon_of_which_not_all_is_known() -> None:
    found = check_machine(machine(replace(daemon(7, (0, 1)), problem="--config /x: Permission denied")))
    assert bad(found) == [(LOOK, "decode (pid 7)")] and "uid 1000" in found[-1].advice


@pytest.mark.parametrize(("must_answer", "level"), [(False, LOOK), (True, BROKEN)])
def test_no_router_is_broken_where_one_was_asked_for(must_answer: bool, level: str) -> None:
    found = examine(facts(cluster=None, no_cluster="no router answers: refused", must_answer=must_answer))
    assert bad(found) == [(level, "http://r")] and "refused" in found[0].what
    assert {"cpu", "memory", "disk"} <= {finding.check for finding in found}


def test_a_router_of_the_list_that_can_t_be_reached_is_named() -> None:
    lacking = replace(node("decode-0"), lacks_routers=("tcp://10.0.0.9:7001",))
    found = check_routers(status(lacking, node("decode-1")))
    assert [(one.level, one.where) for one in found] == [(BROKEN, "decode-0")]
    assert "tcp://10.0.0.9:7001" in found[0].what
    assert [one.level for one in check_routers(status(node("decode-0")))] == [OK]
