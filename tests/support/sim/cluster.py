"""One seed from start to rest: builds the cluster, lets clients and faults loose, then demands that everything ends,
that nothing is left anywhere, and that the cluster serves again."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from prefill_node.side import PrefillSide
from shared.config.settings.silence import link_silence
from shared.core.errors import BatonError
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Message
from shared.wire.peers import Inbound
from tests.support.sim.clients import Client, WrongStream
from tests.support.sim.faults import Faults
from tests.support.sim.free import FreeWatch, has_room
from tests.support.sim.hosts import NodeHost, RouterHost
from tests.support.sim.ledger import Ledger
from tests.support.sim.moods import draw_plan
from tests.support.sim.oracles import AnswerWatch, DrainWatch, RouterOracle, Violation, check_node_s_friends
from tests.support.sim.pauses import PauseWatch
from tests.support.sim.plan import ClientPlan, ClusterPlan, RequestPlan
from tests.support.sim.rare import RareEvents
from tests.support.sim.report import SeedReport
from tests.support.sim.step_files import StepFiles
from tests.support.sim.timers import Timers
from tests.support.sim.trace import Trace
from tests.support.sim.waiting import is_due
from tests.support.sim.watch import Watch, watching_requests
from tests.support.sim.wire import Network, Port

CALM_S = 30.0  # after the last fault every request must have ended by then
TRY_AGAIN = ("connection refused", "no_nodes")
MAX_REFUSALS, RETRY_AFTER_S = 12, 0.25
CHECK_SHARE = 0.02  # of all rounds of a node end with its books being checked
SETTLE_S = 8.0  # and so long every node may take to be back in every registry
GRACE_S = 1.0  # a deadline is looked at a few times a second, by clocks that differ
FINE = ("done", "hung up")
PLENTY = 1024  # of requests that may wait at a node: nobody reaches it
STALL_LEASES = 0.6  # where one pair can't connect: a request is told of it twice, by a dial each, long before a lease
ALARMS = ("two nodes disagree on a token", "malformed token run")
# A router that has restarted may get what was meant for its last life, a harsh network brings things twice.
STRAYS = "tokens for a request that is not open"


class Cluster:
    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed ^ 0x5EED)
        self.trace, self.timers, self.watch = Trace(), Timers(), Watch()
        silence = link_silence(plan.silence_s)
        connect_s = plan.silence_s / 2 if is_due("E2") else float("inf")
        self.net = Network(self.timers, self.rng, self.trace, silence, plan.queue_messages, connect_s)
        self.nodes = [NodeHost(self.net, node, plan, self.rng) for node in plan.nodes]
        self.routers = [RouterHost(self.net, router, plan, self.rng) for router in plan.routers]
        self.clients = [Client(number, client) for number, client in enumerate(plan.clients)]
        self.serving = [host for host in self.routers if not host.plan.name]  # a twin gets no clients
        self.faults = Faults(self.net, self.nodes, self.routers, self.rng, plan.is_gentle)
        limited = frozenset(node.node_id for node in plan.nodes if node.max_waiting < PLENTY)
        self.ledger = Ledger(plan.silence_s, plan.lease_s, limited, plan.is_gentle)
        self.free, self.rare, self.drains = FreeWatch(), RareEvents(plan.lease_s), DrainWatch()
        self.pauses = PauseWatch()
        self.answers = AnswerWatch()
        self._by_name = {host.name: host for host in self.nodes}
        self._oracles: dict[tuple[str, int], RouterOracle] = {}  # one for each life of a router

    def run(self) -> None:
        self._start()
        calm_at = self._let_loose()
        self.timers.run_until(calm_at)
        self._calm_down()
        self._wait_for_clients(calm_at)
        self._check_ends()
        self._wait_for_rest()
        self._probe()
        self._wait_for_rest()
        self._check_rest()

    def record_steps(self, folder: Path) -> StepFiles:
        """Call it before the nodes start."""
        files = StepFiles(folder, lambda: self.timers.now)
        for host in self.nodes:
            host.on_life = files.begin_life
        return files

    def close(self) -> None:
        for host in self.nodes:
            if host.node is not None:
                host.node.ctx.core.close()

    # ---- phases

    def _start(self) -> None:
        self.net.on_send, self.net.on_arrival = self._sent, self._arrives
        self.faults.note = self.ledger.note
        if self.plan.mood == "drains":  # nothing else keeps a node
            self.faults.told_to_leave = lambda host, within_s: self.drains.told(host, within_s, self.timers.now)
        if self.plan.mood == "lost generates":  # elsewhere a heartbeat may be late
            self.faults.came_to_nothing = lambda generate: self.answers.came_to_nothing(generate.key, self.timers.now)
        for router in self.routers:
            router.on_round, router.on_tick, router.before = self._router_round, self._router_tick, self._router_hears
            if router.plan.starts_at:
                self.timers.at(router.plan.starts_at, router.start)
                self.ledger.note("twin", frozenset((router.name,)), 0.0, float("inf"))
            else:
                router.start()
        for host in self.nodes:
            host.on_round = self._node_round
            self.timers.after(self.rng.uniform(0, 0.3), host.start)

    def _let_loose(self) -> float:
        """Sets every arrival and fault; gives the time at which the last fault is over."""
        for client in self.clients:
            router = self.rng.choice(self.serving)
            self.timers.at(client.plan.at, lambda c=client, r=router: self._open(c, r))  # type: ignore[misc]
        for fault in self.plan.faults:
            self.timers.at(fault.at, lambda f=fault: self.faults.strike(f))  # type: ignore[misc]
        self.timers.at(0.9, lambda: self.faults.be_harsh(self.plan.message_faults))
        return max([self.plan.last_arrival + 2.0, *(fault.at + fault.lasts + 0.1 for fault in self.plan.faults)])

    def _open(self, client: Client, router: RouterHost) -> None:
        """A router that is away, or has no nodes, is tried again, or another one."""
        if router.is_frozen:
            self.timers.after(RETRY_AFTER_S, lambda: self._open(client, router))
            return
        client.open(router, self.timers.now)
        if client.outcome in TRY_AGAIN and client.refusals < MAX_REFUSALS:
            client.refused()
            other = self.rng.choice(self.serving)
            self.timers.after(RETRY_AFTER_S, lambda: self._open(client, other))
            return
        opened = [f"{router.name}/{rid}#" for rid in client.rids]
        self.trace.note(self.timers.now, client.name, f"opens {opened}: {client.outcome or 'fine'}")
        hang_up = client.plan.hangs_up_after
        if hang_up is not None and hang_up >= 0:
            self.timers.after(hang_up, lambda: self._hang_up(client))

    def _hang_up(self, client: Client) -> None:
        if client.router is not None and client.router.is_frozen:
            self.timers.after(RETRY_AFTER_S, lambda: self._hang_up(client))
            return
        client.hang_up(self.timers.now)
        self.trace.note(self.timers.now, client.name, f"hangs up {client.rids}")

    def _sent(self, port: Port, peer: str, message: Message, was_taken: bool) -> None:
        to = host_of(peer)
        self.ledger.sent(port.host, to, message, self.timers.now, was_taken=was_taken)
        self.rare.sent(port.host, message, to=peer)

    def _arrives(self, port: Port, peer: str, message: Message) -> None:
        host = self._by_name.get(port.host)
        if host is not None and host.port is port:
            self.rare.arrives(host, peer, message, self.timers.now)

    def _node_round(self, host: NodeHost) -> None:
        now = self.timers.now
        self.watch.look_at_node(host)
        self.free.look_at_node(host, now)
        self.drains.look(host, now)
        self.pauses.look(host)
        if host.node is not None:
            self.ledger.saw(host.name, host.lives, has_room=has_room(host.node), now=now)
        if host.node is not None and host.port is not None:
            check_node_s_friends(host)
        if self.rng.random() < CHECK_SHARE and host.node is not None:
            try:
                host.node.ctx.core.kv.check_integrity(idle=False)
            except BatonError as error:
                raise Violation(f"{host.name} while it runs: {error.message}", host.name) from error

    def _oracle(self, host: RouterHost) -> RouterOracle:
        return self._oracles.setdefault((host.name, host.lives), RouterOracle(self.plan.silence_s))

    def _router_hears(self, host: RouterHost, inbound: Inbound) -> None:
        self._oracle(host).before(inbound, host, self.timers.now)

    def _router_tick(self, host: RouterHost) -> None:
        self._oracle(host).check_mute(host, self.timers.now)
        self.answers.look(host, self.timers.now)
        self.free.look_at_router(host)

    def _router_round(self, host: RouterHost) -> None:
        self.watch.look_at_router(host)
        self._oracle(host).after(host, self.timers.now)
        for client in self.clients:
            if client.router is host and client.is_open:
                client.read(self.timers.now)
                if client.outcome is not None:
                    self.trace.note(self.timers.now, client.name, f"is over: {client.outcome}")

    def _calm_down(self) -> None:
        self.trace.note(self.timers.now, "network", "FAULTS are over")
        self.faults.end()
        for router in self.routers:
            router.restart()

    def _wait_for_clients(self, calm_at: float) -> None:
        limit = calm_at + (self.plan.request_timeout_s + GRACE_S if self.plan.may_take_long else CALM_S)
        self.timers.run_until(limit, stop=lambda: all(client.outcome for client in self.clients))
        for client in self.clients:
            client.read(self.timers.now)
            if client.outcome is None:
                assert client.router is not None
                waited = self.timers.now - client.opened_at
                word = f"{client.router.name}/{client.rids[0]}#"
                raise Violation(f"{client.name} ({word}) is still open after {waited:.1f} s", word)

    def _check_ends(self) -> None:
        for client in self.clients:
            if client.outcome not in FINE:
                self.ledger.ended(client.names, client.outcome or "open", client.ended_at)
            took, outcome = client.ended_at - client.opened_at, client.outcome
            word = f"{client.router.name}/{client.rids[0]}#" if client.router and client.rids else ""
            if took > self.plan.request_timeout_s + GRACE_S:
                raise Violation(f"{client.name} ({word}) took {took:.1f} s: its deadline was not kept", word)
            if outcome == "deadline_exceeded" and not self.plan.is_harsh:
                raise Violation(f"{client.name} ({word}) hung until its deadline", word)
            if self.plan.mood == "one way" and took > STALL_LEASES * self.plan.lease_s:
                raise Violation(
                    f"{client.name} ({word}) took {took:.1f} s: a pair that can't connect cost it that", word
                )
            if outcome not in FINE and self.plan.is_gentle:
                raise Violation(f"{client.name} ({word}) ended with {outcome} though nothing broke", word)
            if outcome not in (*FINE, "overloaded") and client.ended_at < self.faults.first_at:
                raise Violation(f"{client.name} ({word}) ended with {outcome} before any fault", word)
        self.ledger.check_pairs()
        for router in self.serving:
            alarms = (*ALARMS, STRAYS) if router.lives == 1 and not self.plan.is_harsh else ALARMS
            alarm = next((told for told in router.log.told if told in alarms), None)
            if alarm is not None:
                raise Violation(f"{router.name} says: {alarm}")

    def _wait_for_rest(self) -> None:
        """Lost aborts are made up for by leases and deadlines, within their time."""
        limit = self.timers.now + 2 * self.plan.lease_s + (self.plan.request_timeout_s if self.plan.is_harsh else 0.0)
        self.timers.run_until(limit, stop=self._all_idle)
        if not self._all_idle():
            raise Violation(f"not at rest: {'; '.join(filter(None, map(leftovers, self.nodes)))}")

    def _all_idle(self) -> bool:
        return all(host.node is not None and host.node.idle and not open_pulls(host) for host in self.nodes)

    def _probe(self) -> None:
        """Every node is back in every registry, and every router serves."""
        self.timers.run_until(self.timers.now + SETTLE_S, stop=self._all_known)
        if not self._all_known():
            raise Violation(f"not back: {self._missing()}")
        knobs = self.plan.nodes[0].knobs
        model = {"encoder": knobs.encoder, "windows": (knobs.window, knobs.lower_window)}
        # one after another: a node with a low limit on waiting offers may refuse offers of several routers at once
        for number, router in enumerate(self.serving):
            plan = RequestPlan((1, 2, 3) * 20, 2, SamplingParams(max_tokens=6), seed=number, **model)
            probe = Client(1000 + number, ClientPlan(self.timers.now, (plan,)))
            self.clients.append(probe)
            self._open(probe, router)
            self.timers.run_until(self.timers.now + SETTLE_S, stop=lambda: all(c.outcome for c in self.clients))
            if probe.outcome != "done":
                raise Violation(f"{probe.name}, sent when all was well, ended with {probe.outcome}", probe.name)

    def _all_known(self) -> bool:
        return not self._missing()

    def _missing(self) -> list[str]:
        return [f"{h.name} at {r.name}" for r in self.serving for h in self.nodes if not is_known(h, r)]

    def _check_rest(self) -> None:
        self.timers.run_until(self.timers.now + SETTLE_S, stop=lambda: not self._wrong_indices())
        if wrong := self._wrong_indices():
            raise Violation(f"not what is cached: {', '.join(wrong)}")
        for host in self.nodes:
            check_node(host)
        for router in self.routers:
            check_router(router)

    def _wrong_indices(self) -> list[str]:
        """Routers that route by prefix, and nodes whose cache is another than they believe."""
        followers = [router for router in self.serving if router.plan.policy == "prefix_aware"]
        return [f"{h.name} at {r.name}" for r in followers for h in self.nodes if not knows_cache(h, r)]

    # ---- results

    @property
    def num_steps(self) -> int:
        living = sum(host.node.ctx.core.loop.num_steps for host in self.nodes if host.node is not None)
        return living + sum(host.num_steps for host in self.nodes)


def host_of(peer: str) -> str:
    """Of a peer's name, or of a router's endpoint."""
    return peer.partition("//")[2].partition(":")[0] if "//" in peer else peer.partition("@")[0]


def is_known(host: NodeHost, router: RouterHost) -> bool:
    if host.node is None or router.gateway is None:
        return False
    facts = host.node.ctx.facts
    node = router.registry.find(facts.node_id, facts.epoch)
    return node is not None and node.is_there and node.report.load is not None


def knows_cache(host: NodeHost, router: RouterHost) -> bool:
    assert host.node is not None
    facts = host.node.ctx.facts
    node = router.registry.find(facts.node_id, facts.epoch)
    return node is not None and node.pages._names == set(host.node.ctx.core.kv.cache.cached_names())


def open_pulls(host: NodeHost) -> list[str]:
    """What a prefill node has of pulls, its own and others'."""
    side = host.node.side if host.node is not None else None
    if not isinstance(side, PrefillSide):
        return []
    return [
        *map(str, side.pulls.open),
        *(str(pull.lease) for pull, _ in side.pulls.copies.held),
        *map(str, side.loans.open),
    ]


def leftovers(host: NodeHost) -> str:
    if host.node is None:
        return f"{host.name} is dead"
    if host.node.idle and not open_pulls(host):
        return ""
    requests = [f"{req.key} {req.state.value}" for req in host.node.ctx.core.queues.requests.values()]
    outside = [f"{req.key} outside" for req in host.node.side.outside()]
    pulls = [f"pull {name}" for name in open_pulls(host)]
    return f"{host.name}: {', '.join(requests + outside + pulls) or 'steps in flight'}"


def check_node(host: NodeHost) -> None:
    """Nothing leaked, in any book."""
    assert host.node is not None
    core, side = host.node.ctx.core, host.node.side
    try:
        core.kv.check_integrity(idle=True)
        core.kv.flush_cache()
        core.kv.check_integrity(idle=True)
    except BatonError as error:
        raise Violation(f"{host.name}: {error.message}", host.name) from error
    if core.kv.allocator.num_free != core.kv.allocator.num_total:
        raise Violation(f"{host.name}: {core.kv.allocator.num_total - core.kv.allocator.num_free} pages are not free")
    books: dict[str, object] = {
        "scheduler.queues.ungranted": core.queues.ungranted,
        "engine.leases": core.engine.leases,
    }
    if isinstance(side, PrefillSide):
        books |= {
            "offered": side.bootstrap.offered,
            "followers": [h for handoffs in side.bootstrap._followers.values() for h in handoffs],
            "leaders": side.bootstrap._followers,
            "granted": side.inflight.granted,
            "pulls and loans": open_pulls(host),
        }
    else:
        transfers = side.transfers  # type: ignore[attr-defined]
        books |= {"open": transfers.open, "held": transfers.copies.held}
    left = [name for name, book in books.items() if book]
    if left:
        raise Violation(f"{host.name}: something is left in {', '.join(left)}")


def check_router(router: RouterHost) -> None:
    if len(router.journal) or router.gateway is None or router.gateway.num_open:
        raise Violation(f"{router.name}: requests are left in its journal")
    for node in router.registry:
        if node.ours.open_sequences or node.ours.open_prompt_tokens:
            work = f"{node.ours.open_sequences} sequences, {node.ours.open_prompt_tokens} prompt tokens"
            raise Violation(f"{router.name} thinks that {node.node_id} has {work} to do")


def run_seed(
    seed: int,
    *,
    keeps_timeline: bool = False,
    word: str = "",
    change: Callable[[ClusterPlan], ClusterPlan] = lambda plan: plan,
    record_dir: Path | None = None,
) -> SeedReport:
    """Never raises: what goes wrong, in an oracle or in the code under test, is in the report. `record_dir`: where
    files of all steps go."""
    report, started = SeedReport(seed), time.process_time()
    cluster = Cluster(change(draw_plan(seed)))
    files = None if record_dir is None else cluster.record_steps(record_dir)
    try:
        with watching_requests(cluster.watch.steps, cluster.rare.moved):
            cluster.run()
    except (Violation, WrongStream) as error:
        report.failure = f"{type(error).__name__}: {error}"
        word = word or (error.word if isinstance(error, Violation) else error.rid.partition("#")[0] + "#")
    except Exception as error:
        report.failure = f"{type(error).__name__}: {error}\n{where(error)}"
    finally:
        if files is not None:
            files.write_all()
        cluster.close()
    fill(report, cluster, time.process_time() - started)
    if report.failure or keeps_timeline:
        report.timeline = cluster.trace.lines(word)
    return report


def fill(report: SeedReport, cluster: Cluster, cpu_s: float) -> None:
    plan = cluster.plan
    report.mood, report.num_nodes = plan.mood, len(plan.nodes)
    report.num_requests = sum(len(client.requests) for client in plan.clients)
    report.num_tokens = sum(client.num_tokens for client in cluster.clients)
    report.num_steps, report.num_messages = cluster.num_steps, cluster.net.num_delivered
    report.cpu_s, report.engine_s = cpu_s, sum(host.engine_s for host in cluster.nodes)
    report.sim_s = cluster.timers.now
    report.hits, report.transitions = cluster.faults.hits, cluster.watch.steps
    report.outcomes = Counter(client.outcome or "open" for client in cluster.clients)
    report.digest = cluster.trace.digest()
    report.num_routers = len(plan.routers)
    report.causes, report.rare = cluster.ledger.counts, cluster.rare.counts + cluster.net.events
    for host in cluster.nodes:
        report.rare += host.pulls + host.pulls_of_this_life()
    report.rare["revoke while pulling"] = cluster.watch.steps["sink", "pulling", "held"]
    report.longest_wait_s, report.longest_pause = cluster.rare.longest_wait_s, cluster.pauses.longest


def where(error: BaseException) -> str:
    """The innermost frames, one line each."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(f"  {trace.tb_frame.f_code.co_filename.rpartition('/main/')[2]}:{trace.tb_lineno}")
        trace = trace.tb_next
    return "\n".join(frames[-8:])
