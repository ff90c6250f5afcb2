"""Twenty slips of a line in the protocol between router, prefill and decode nodes, each shown: what happens without it
and with it. The list is bugs.toml.

    PYTHONPATH=$PWD python bugs/show_bugs.py [name ...]        all, or these; exit code 1 if one shows no difference

Each case runs twice in a process of its own, as imports can't be taken back; in the second the text `old` of one
function is replaced by `new` before its module is imported. A case sets up the sans-IO objects, with the tests' rigs.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import io
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 180  # a hang guard: torch and the compiled kernels take their seconds on a busy machine
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
Bug = dict[str, str]
Case = Callable[[], list[str]]
CASES: dict[str, Case] = {}


# ---- the text of one function


def bugs() -> list[Bug]:
    return tomllib.loads((Path(__file__).parent / "bugs.toml").read_text())["bug"]


def split(at: str) -> tuple[str, list[str]]:
    """(module, qualified name in it)"""
    names = at.split(".")
    for end in range(len(names) - 1, 0, -1):
        if ROOT.joinpath(*names[:end]).with_suffix(".py").exists():
            return ".".join(names[:end]), names[end:]
    raise SystemExit(f"{at}: no such module")


def with_bug(source: str, path: Sequence[str], old: str, new: str) -> str:
    """`old` must stand exactly once in the function."""
    node: ast.AST = ast.parse(source)
    for name in path:
        node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", "") == name)
    assert isinstance(node, ast.FunctionDef)
    lines = source.splitlines(keepends=True)
    begin, end = node.lineno - 1, node.end_lineno
    text = "".join(lines[begin:end])
    if text.count(old) != 1:
        raise SystemExit(f"{'.'.join(path)}: {old!r} stands there {text.count(old)} times")
    return "".join(lines[:begin]) + text.replace(old, new) + "".join(lines[end:])


class Patch(importlib.abc.MetaPathFinder):
    """Gives one module with one text replaced; no .pyc is written or read for it."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug
        self._module, self._path = split(bug["at"])
        self.num_loaded = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        source = with_bug(Path(spec.origin).read_text(), self._path, self._bug["old"], self._bug["new"])
        code = compile(source, spec.origin, "exec", dont_inherit=True)
        self.num_loaded += 1

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return code

        spec.loader = Loader(fullname, spec.origin)
        return spec


# ---- running


def main(names: Sequence[str]) -> int:
    wanted = [bug for bug in bugs() if not names or bug["name"] in names]
    assert {bug["name"] for bug in bugs()} == set(CASES), "list and cases differ"
    num_equal = 0
    for number, bug in enumerate(wanted, 1):
        print(f"{number:2} {bug['name']}  ({bug['at']})", flush=True)
        without, with_it = (run_child(bug["name"], how) for how in ("without", "with"))
        print(f"     without:  {without}\n     with it:  {with_it}", flush=True)
        if without == with_it:
            num_equal += 1
            print("     NO DIFFERENCE")
    print(f"{len(wanted) - num_equal} of {len(wanted)} bugs shown")
    return 1 if num_equal else 0


def run_child(name: str, how: str) -> str:
    argv = [sys.executable, str(Path(__file__)), "--one", name, how]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{name}, {how}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip().replace("\n", "\n               ")


def run_one(name: str, how: str) -> int:
    if how == "without":
        print("\n".join(CASES[name]()))
        return 0
    patch = Patch(next(bug for bug in bugs() if bug["name"] == name))
    sys.meta_path.insert(0, patch)
    print("\n".join(CASES[name]()))
    return 0 if patch.num_loaded == 1 else 2


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


# ---- router


def told(effects) -> str:  # noqa: ANN001
    """The sends and news of some Effects in words."""
    return in_words(effects.sends, effects.news)


def in_words(sends, news=()) -> str:  # noqa: ANN001
    from router.effects import Failure
    from shared.wire.messages import Abort, Generate

    said = []
    for peer, message in sends:
        if isinstance(message, Generate):
            target = f" for {message.decode_node}" if message.decode_node else ""
            emitted = message.output_ids[0]
            said.append(f"Generate #{message.key.attempt} to {peer}{target} behind {emitted}")
        elif not isinstance(message, Abort):
            said.append(f"{type(message).__name__} to {peer}")
    for entry in news:
        if isinstance(entry, Failure):
            said.append(f"the client gets {entry.error.code}")
        else:
            end = f", end: {entry.end.reason}" if entry.end else ""
            said.append(f"the client gets {list(entry.ids)}{end}")
    return "; ".join(said) or "nothing happens"


@case
def begun_by_decode_survives_attempt() -> list[str]:
    from router_rig import RouterRig, generates

    rig = RouterRig(max_attempts=4)
    p1, d1 = rig.join("prefill", "p1"), rig.join("decode", "d1")
    first = rig.open()[0]
    rig.run(d1, first.key, 0, [10])
    d2 = rig.join("decode", "d2")
    rig.registry.remove(d1)
    second = generates(rig.dispatcher.node_lost(d1, "killed", rig.now))[0]
    rig.join("prefill", "p2")
    rig.registry.remove(p1)
    after = rig.dispatcher.node_lost(p1, "killed", rig.now)
    said = [
        f"d1 begins and dies: Generate #{second.key.attempt} to p1 for {second.decode_node}; p1 dies: {told(after)}"
    ]
    for third in generates(after):
        rig.run(d2, third.key, 1, [11])
        said.append(f"d2 goes on: {told(rig.end(d2, third.key, 2))}")
    if len(rig.journal):
        rig.now = 61.0
        said.append(f"a minute later: {told(rig.dispatcher.tick(rig.now))}")
    return said


@case
def placed_and_still_parked() -> list[str]:
    from router_rig import RouterRig, generates

    rig = RouterRig(max_attempts=4, resume_wait_s=30.0)
    d1 = rig.join("decode", "d1")
    key = rig.open()[0].key
    rig.run(d1, key, 0, [10])
    rig.registry.remove(d1)
    rig.dispatcher.node_lost(d1, "killed", rig.now)
    rig.now = 1.0
    d2, sent = rig.join("decode", "d2"), []
    for _ in range(5):
        sent += generates(rig.dispatcher.tick(rig.now))
        rig.now += 0.25
    rig.run(d2, sent[0].key, 1, [11])
    rig.end(d2, sent[0].key, 2)
    left = f"{d2.open_sequences} open sequences, {d2.open_prompt_tokens} prompt tokens"
    return [f"{len(sent)} Generates in 5 ticks; when it has ended, and {len(rig.journal)} are open, d2 has {left}"]


@case
def ahead_of_a_gap_is_kept() -> list[str]:
    from router_rig import RouterRig, generates, ids_of

    rig = RouterRig(max_attempts=4)
    d1 = rig.join("decode", "d1")
    key = rig.open()[0].key
    got = ids_of(rig.run(d1, key, 0, [10]))
    got += ids_of(rig.run(d1, key, 2, [66]))  # position 1 was lost on its way, and d1 is not well
    d2 = rig.join("decode", "d2")
    rig.registry.remove(d1)
    key = generates(rig.dispatcher.node_lost(d1, "killed", rig.now))[0].key
    alarms = []
    for position, token in enumerate([11, 12, 13], 1):
        effects = rig.run(d2, key, position, [token])
        got += ids_of(effects)
        alarms += [alarm.kind for alarm in effects.alarms]
    return [f"d2 gives [11, 12, 13] behind [10]; the client reads {got}; alarms: {alarms}"]


@case
def stop_seen_in_the_wrong_place() -> list[str]:
    from router_rig import RouterRig

    from router.dispatch import NewRequest
    from shared.core.sampling_params import SamplingParams

    rig = RouterRig(max_attempts=4)
    d1 = rig.join("decode", "d1")
    sampling = SamplingParams(max_tokens=50, stop_token_ids=(2,))
    _, effects = rig.dispatcher.open([NewRequest([1, 2, 3], 1, sampling, seed=7)], rig.now)
    rig.run(d1, effects.sends[0][1].key, 0, [10, 11, 2])
    rig.join("decode", "d2")
    rig.registry.remove(d1)
    return [f"[10, 11, stop] are here, d1 dies: {told(rig.dispatcher.node_lost(d1, 'killed', rig.now))}"]


@case
def all_failed_hands_over_again() -> list[str]:
    from router_rig import RouterRig, generates

    rig = RouterRig(max_attempts=3)
    nodes = {node.node_id: node for node in (rig.join("prefill", "p"), rig.join("decode", "d"))}
    generate, said = rig.open()[0], []
    for _ in range(3):
        if not generate.decode_node:
            rig.run(nodes["d"], generate.key, 0, [10])
            said.append(f"d alone: {told(rig.end(nodes['d'], generate.key, 1))}")
            break
        effects = rig.end(nodes["p"], generate.key, 0, "error", "handoff_failed")
        said.append(f"hand-off fails: {told(effects)}")
        generate = generates(effects)[0] if generates(effects) else generate
    return said


@case
def breaker_remembers_old_openings() -> list[str]:
    from router.breaker import Breaker

    breaker, now = Breaker(), 0.0
    for _ in range(7):  # the morning: three faults, then probes that fail
        breaker.failed(now)
        now += 100.0
    breaker.sent()
    breaker.succeeded()
    now += 3 * 3600.0
    for _ in range(3):
        breaker.failed(now)
    waits = next(s for s in range(100) if breaker.allows(now + s))
    return [f"three faults, hours after it has recovered: shut out for {waits} s"]


class FakeLink:
    """What the gateway sends; `refuses` some of it, as a full queue does."""

    endpoint = "tcp://router"

    def __init__(self) -> None:
        self.sent: list = []
        self.refuses: Callable[[object], bool] = lambda message: False

    async def receive(self) -> list:
        return []

    def send(self, peer: str, message: object) -> bool:
        if self.refuses(message):
            return False
        self.sent.append((peer, message))
        return True

    def take(self) -> list:
        sent, self.sent = self.sent, []
        return sent


def make_gateway():  # noqa: ANN201
    """(gateway, its link, its registry, a clock to be set)"""
    from prometheus_client import CollectorRegistry

    from router.dispatch import Dispatcher, DispatchLimits
    from router.gateway import Gateway
    from router.journal import Journal
    from router.placement import Placer
    from router.policy.least_load import LeastLoad
    from router.registry import Registry
    from shared.observe.log import Logger
    from shared.observe.metrics import ClusterMetrics

    registry, link, clock = Registry(silence_s=5.0), FakeLink(), [0.0]
    limits = DispatchLimits(100, 3, request_timeout_s=60.0, resume_wait_s=5.0)
    dispatcher = Dispatcher(("r", 9), registry, Placer(registry, LeastLoad(), 0), Journal(lambda: "n"), limits)
    metrics, log = ClusterMetrics(CollectorRegistry()), Logger("r", io.StringIO())
    return Gateway(("r", 9), registry, dispatcher, link, metrics, log, lambda: clock[0]), link, registry, clock


def say(gateway, message) -> None:  # noqa: ANN001
    from shared.wire.peers import Received, peer_name

    gateway.handle(Received(peer_name(message.node_id, message.epoch), message))


def new_request():  # noqa: ANN201
    from router.dispatch import NewRequest
    from shared.core.sampling_params import SamplingParams

    return NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7)


def beat(node_id: str, epoch: int = 1, draining: bool = False):  # noqa: ANN201
    from router_rig import load

    from shared.wire.messages import Heartbeat

    return Heartbeat(node_id, epoch, load(), draining)


@case
def reconnect_compared_with_itself() -> list[str]:
    from router_rig import hello

    from shared.wire.messages import Generate, SequenceEnd, TokenRun, Tokens

    gateway, link, _, clock = make_gateway()
    say(gateway, hello("decode", "d"))
    mailbox = gateway.open([new_request()])
    link.take()
    clock[0] = 1.0
    say(gateway, hello("decode", "d", connection=2))  # d saw the first one break, and dropped the request
    sent = link.take()
    for _, message in sent:
        if isinstance(message, Generate):  # the only one that d knows of
            end = SequenceEnd(message.key, "stop", 1, 0, "", "")
            say(gateway, Tokens("d", 1, [TokenRun(message.key, 0, [10], [])], [end]))
    while clock[0] < 61.0:
        clock[0] += 0.25
        say(gateway, beat("d"))
        gateway.tick()
    return [f"Hello on a second connection: {in_words(sent)}; within a minute: {in_words([], mailbox._news)}"]


@case
def drain_believed_to_be_heard() -> list[str]:
    from router_rig import hello

    from shared.wire.messages import Drain

    gateway, link, registry, clock = make_gateway()
    for node_id in ("d1", "d2"):
        say(gateway, hello("decode", node_id))
    link.refuses = lambda message: isinstance(message, Drain)
    gateway.drain(registry.named("d1"), Drain("d1", "restart"), 5.0)
    link.refuses = lambda message: False
    link.take()
    while clock[0] < 60.0:
        clock[0] += 0.5
        is_told = any(isinstance(message, Drain) for _, message in link.sent)
        say(gateway, beat("d1", draining=is_told))
        say(gateway, beat("d2"))
        gateway.tick()
    drains = [peer for peer, message in link.sent if isinstance(message, Drain)]
    state = "draining" if registry.named("d1").is_draining else "serving"
    return [f"the Drain met a full queue; in the next minute it is said {len(drains)} more times; state shown: {state}"]


@case
def old_life_takes_the_new_along() -> list[str]:
    from router_rig import hello

    from shared.wire.messages import Welcome
    from shared.wire.peers import PeerClosed

    gateway, link, registry, clock = make_gateway()
    say(gateway, hello("decode", "d", epoch=1))
    clock[0] = 1.0
    say(gateway, hello("decode", "d", epoch=2))  # it was started anew; its former connection lingers half open
    gateway.open([new_request()])
    link.take()
    clock[0] = 4.0
    say(gateway, beat("d", epoch=2))
    gateway.handle(PeerClosed("d@1"))
    known = "known" if registry.named("d") else "forgotten"
    clock[0] = 4.5
    say(gateway, beat("d", epoch=2))
    if any(isinstance(message, Welcome) for _, message in link.sent):
        clock[0] = 6.5
        say(gateway, hello("decode", "d", epoch=2))  # as it does two seconds after a Welcome to nobody
        gateway.tick()
    return [f"the former connection closes: d@2 is {known}; its next heartbeat: {in_words(link.take())}"]


@case
def counts_taken_by_reference() -> list[str]:
    from shared.wire.peers import WireTotals

    totals, counts, reported = WireTotals(), Counter(), []
    for amount in (3, 4, 50):
        counts["wire_dropped"] += amount
        counts["wire_refused.key"] += amount
        reported.append(totals.take(counts).get("wire_errors", 0))
    return [f"3, 4 and 50 frames dropped before three heartbeats; reported: {reported}"]


# ---- nodes


def job(rid: int, num_prompt: int, max_tokens: int):  # noqa: ANN201
    from rig import Job

    from shared.core.sampling_params import SamplingParams

    prompt = tuple((7 * rid + 3 * i * i + i) % 90 for i in range(num_prompt))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), seed=rid)


def make_pair(prefill=None, decode=None):  # noqa: ANN001, ANN201
    """(network, prefill node, decode node)"""
    from pair import Net, make_node
    from rig import CoreKnobs

    plain = {"width": 1, "prefix_cache": False}
    nodes = (
        make_node("prefill", "p", CoreKnobs(**plain | (prefill or {}))),
        make_node("decode", "d", CoreKnobs(**plain | (decode or {}))),
    )
    return Net(nodes), *nodes


def outcome(net, key, what) -> str:  # noqa: ANN001
    """How a request went, as its router knows it."""
    tokens = net.router.streams[key]
    right = "right" if tokens == what.expected()[: len(tokens)] else "WRONG"
    ends = [f"{end.reason} {end.error_code} {end.error_message}".strip() for end in net.router.ends[key]]
    return f"{len(tokens)} of {what.sampling.max_tokens} tokens, {right}; end: {', '.join(ends) or 'none'}"


@case
def expiry_takes_the_newest() -> list[str]:
    from shared.wire.messages import Offer

    net, p, d = make_pair()
    net.generate(p, job(1, 40, 3), d)
    net.run()  # leaves a tombstone at 0 s
    net.at(50)
    net.hold = lambda source, target, message: isinstance(message, Offer)
    late = job(2, 40, 30)
    key = net.generate(p, late, d)
    net.run()
    net.abort(d, key, all_sequences=True)  # the prefill node's Abort met a full queue
    net.run()
    net.at(11)
    net.run()
    net.hold = lambda source, target, message: False
    net.release_held()
    net.run()
    num_run = len(net.router.by_node["d", key])
    return [f"the Offer comes 11 s behind the Abort: the decode node runs {num_run} tokens for nobody"]


@case
def newer_router_is_over() -> list[str]:
    import msgspec
    from pair import ROUTER, ROUTER_ID, name_of

    from shared.wire.codec import key_of, to_wire
    from shared.wire.messages import Generate, Refuse, Welcome
    from shared.wire.peers import PeerClosed, PeerUp

    net, p, d = make_pair()
    net.run()
    what = job(1, 40, 8)

    def restart(node) -> None:  # noqa: ANN001
        net.inboxes[name_of(node)] += [PeerClosed(ROUTER), PeerUp(ROUTER)]
        net.to_node(name_of(node), Welcome(ROUTER_ID, 2, connection=2))

    restart(p)
    old = net.generate(p, what, d)
    key = to_wire(key_of(old)._replace(router_epoch=2))
    inbox = net.inboxes[name_of(p)]
    received = inbox.pop()
    assert isinstance(received.message, Generate)
    net.to_node(name_of(p), msgspec.structs.replace(received.message, key=key))
    net.run()
    restart(d)
    net.run()
    refused = [message.reason for message in net.messages(Refuse)]
    return [f"refused: {refused}; {outcome(net, key, what)}"]


@case
def idle_with_offers_waiting() -> list[str]:
    from collections import deque

    from pair import ROUTER, ROUTER_EPOCH, ROUTER_ID, name_of

    from shared.handoff.daemon import Daemon
    from shared.observe.log import Logger
    from shared.wire.messages import Drain, Welcome
    from shared.wire.peers import PeerClosed, PeerUp

    net, p, d = make_pair()
    name, other = name_of(d), "tcp://127.0.0.1:7002"
    d.ctx.routers.peers = (ROUTER, other)
    net.inboxes[other] = deque()
    net.inboxes[name].append(PeerUp(other))
    net.to_node(name, Welcome("other", 1, connection=1), source=other)
    net.run()
    net.inboxes[name].append(PeerClosed(ROUTER))  # for a moment
    net.run()
    what = job(1, 40, 8)
    key = net.generate(p, what, d)
    net.run()
    waiting = len(d.side.outside())
    net.to_node(name, Drain("d", "stop"), source=other)
    net.run()
    daemon = Daemon(d, None, Logger("d", io.StringIO()), drain_s=30.0, clock=lambda: net.now)
    said = f"{waiting} Offer waits for its router's Welcome, and another router drains the node: "
    if daemon.finished:
        said += "it ends"
        net.kill(d)
    else:
        said += "it stays"
        net.inboxes[name].append(PeerUp(ROUTER))
        net.to_node(name, Welcome(ROUTER_ID, ROUTER_EPOCH, connection=2))
    net.run()
    return [f"{said}; {outcome(net, key, what)}; ended in the end: {daemon.finished}"]


@case
def oldest_offer_stays() -> list[str]:
    from shared.wire.messages import Wait

    net, p, d = make_pair(decode={"num_pages": 12})
    long, large, short = job(1, 64, 60), job(2, 120, 20), job(3, 20, 10)
    first = net.generate(d, long)
    net.run(until=lambda: len(net.router.streams[first]) > 3)
    waiting = net.generate(p, large, d)
    net.run(until=lambda: bool(net.messages(Wait)))
    net.abort(p, waiting, all_sequences=True)
    net.run(until=lambda: not d.side.outside())
    last = net.generate(d, short)
    net.run()
    return [
        f"behind an Offer that was taken back: {outcome(net, last, short)}",
        f"the node's rows then: {d.ctx.core.kv.row_gauges()}",
    ]


@case
def sibling_offered_since_birth() -> list[str]:
    from pair import sibling

    from shared.core.keys import sequence_seed

    net, p, d = make_pair({"prefix_cache": True}, {"num_pages": 24, "prefix_cache": True})
    holder, what = job(1, 200, 150), job(2, 200, 6)
    first = net.generate(d, holder)
    net.run(until=lambda: len(net.router.streams[first]) > 1)
    key = net.generate(p, what, d, num_sequences=2)
    for _ in range(15):
        net.at(5)
        for name in net.nodes:
            net.tick(name)
    assert not net.router.ends[first] and not net.router.ends[key]
    net.abort(d, first)
    net.run()
    second = sibling(key, 1)
    tokens = net.router.streams[second]
    right = tokens == what.expected_of(sequence_seed(what.seed, 1))[: len(tokens)]
    ends = [f"{end.reason} {end.error_code} {end.error_message}".strip() for end in net.router.ends[second]]
    said = f"{len(tokens)} of 6 tokens, right: {right}; end: {', '.join(ends) or 'none'}"
    return [f"first sequence: {outcome(net, key, what)}", f"second: {said}"]


@case
def unpinned_keeps_its_record() -> list[str]:
    from shared.wire.codec import key_of
    from shared.wire.messages import Grant

    net, p, d = make_pair({"num_pages": 12, "chunk_size": 5})
    what, other = job(1, 100, 8), job(2, 90, 3)
    net.hold = lambda source, target, message: isinstance(message, Grant)
    key = net.generate(p, what, d)
    net.run()
    handoff = p.side.bootstrap.find(key_of(key))
    assert handoff is not None and handoff.record is not None
    net.generate(p, other)

    def half_way() -> bool:  # a page is begun, and far from full
        return handoff.request.incarnation == 1 and handoff.num_final_tokens in (5, 20, 25, 40)

    net.run(until=half_way)
    assert half_way()
    net.hold = lambda source, target, message: False
    net.release_held()
    net.run()
    return [outcome(net, key, what)]


@case
def failed_pull_never_over() -> list[str]:
    from shared.core.errors import HandoffFailed

    net, p, d = make_pair(decode={"num_pages": 24, "max_running": 4})
    receiver = d.side.transfers._receivers["zmq"]

    def torn(ready, frames, pages) -> None:  # noqa: ANN001
        raise HandoffFailed("page 3: its digest differs from the one announced")

    receiver.pull, pull = torn, receiver.pull
    for rid in range(1, 4):
        net.generate(p, job(rid, 100, 5), d)
        net.run()
    receiver.pull = pull
    what = job(9, 100, 5)
    key = net.generate(p, what, d)
    net.run()
    kv = d.ctx.core.kv
    return [
        f"three pulls failed; rows: {kv.row_gauges()}, pages free: {kv.num_available} of {kv.allocator.num_total}",
        f"the next request: {outcome(net, key, what)}",
    ]


@case
def late_abort_ends_running() -> list[str]:
    from pair import ROUTER, name_of

    from shared.wire.messages import Installed
    from shared.wire.peers import PeerClosed

    net, p, d = make_pair()
    what = job(1, 40, 40)
    net.hold = lambda source, target, message: isinstance(message, Installed)
    key = net.generate(p, what, d)
    net.run(until=lambda: len(net.router.by_node["d", key]) > 5)
    net.inboxes[name_of(p)].append(PeerClosed(ROUTER))
    net.run()
    return [f"the prefill node lost its router, Installed is under way: {outcome(net, key, what)}"]


@case
def former_life_fails_the_next() -> list[str]:
    from rig import CoreKnobs, Outcome, make_core

    from shared.core.errors import StepFailed
    from shared.engine.plan import RowId

    core, seen, what = make_core(CoreKnobs(width=1)), Outcome(), job(1, 40, 12)
    core.scheduler.submit(req := what.request())
    while len(req.output_ids) < 4:
        core.loop.step(block=True)
    before = RowId(req.key, req.incarnation)
    core.scheduler.retract(req)  # for memory, with a step in flight
    core.scheduler.step_failed((before,), (), StepFailed("step 9: out of memory"))
    while core.scheduler.requests or not core.loop.idle:
        core.loop.step(block=True)
    seen.take(core)
    end = seen.ends["r1"]
    tokens = seen.streams["r1"]
    right = tokens == what.expected()[: len(tokens)]
    return [f"{len(tokens)} of 12 tokens, right: {right}; end: {end.reason.value} {end.error_message}"]


@case
def waiting_prompt_counts_as_sent() -> list[str]:
    from shared.wire.messages import Ready

    net, p, d = make_pair({"num_pages": 13})
    holder, what = job(1, 100, 70), job(2, 100, 8)
    first = net.generate(p, holder)
    net.run(until=lambda: len(net.router.streams[first]) > 1)
    key = net.generate(p, what, d)
    for _ in range(10):
        net.at(10)
        for name in net.nodes:
            net.tick(name)
    assert not net.router.ends[first]
    renewals = sum(not message.pages for message in net.messages(Ready))
    net.run()
    return [f"granted, and 100 s behind another prompt: {renewals} renewals; {outcome(net, key, what)}"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.exit(run_one(*sys.argv[2:4]))
    sys.exit(main(sys.argv[1:]))
