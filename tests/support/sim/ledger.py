"""A ledger of causes: nothing resumes, expires or fails where nothing broke.

    what broke      Cause     a fault that hit: its kind, the hosts (one, or a pair), from when to when
    what happened   Attempt   of a request at its nodes: told by Generate, ended by the next Generate, or by an error

An attempt that ends without an answer needs a cause: a fault on one of its hosts, or on a path between two of them,
during its life or shortly before. Other pairs' faults explain nothing, and where nothing may break drains alone count.
Reads what is sent; knows nothing of the states of nodes but for a move, which needs a full node and one with room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.core.states import FinishReason
from shared.wire.messages import Abort, Generate, Hello, Key, Message, SequenceEnd, Tokens
from tests.support.sim.oracles import Violation
from tests.support.sim.plan import GENERATE_FAULTS
from tests.support.sim.waiting import is_due

DRAINS = ("stop signal", "admin drain", "role change", "drain at one router", "restart")
LASTING = ("one way", "no answer")  # of a mood in which no request may fail for them
NO_BREAKS = ("forced retraction",)  # a node's own business
GOOD_ENDS = (FinishReason.STOP.value, FinishReason.LENGTH.value)
FULL = ("overloaded", "partner_overloaded")  # codes: a node with a limit said that it is reached
WRONG_PAGES = ("digest", "generation")  # words of a pull that met other bytes than were announced
DAMAGE = ("corrupt", "crash", "power loss", "failed step", "reorder", "drop")  # what may bring that about
MOST_PROBES = 8  # of a pair that can't connect, within the half minute of such a seed: until known, then half open
CONNECT_AGAIN_S = 3.0  # back-off of a dial, a lost SYN, a Hello said again


Name = tuple[str, int, str]  # of a request: its router's id and epoch, and its rid


@dataclass
class Cause:
    """`ends`: infinite until the host has restarted, for what only that ends. `life`: of the host that it befell."""

    kind: str
    hosts: frozenset[str]
    begins: float
    ends: float
    life: int = 0


@dataclass
class Attempt:
    """One Generate and what became of it. `told`: the first error that a node of it sent."""

    router: str
    rid: str
    number: int
    hosts: frozenset[str]
    begins: float
    decode: str = ""
    ends: float | None = None
    told: SequenceEnd | None = None

    @property
    def word(self) -> str:
        return f"{self.router}/{self.rid}#"

    def __str__(self) -> str:
        said = "nobody said why"
        if self.told is not None:
            said = f"{self.told.error_code}: {self.told.error_message}"
        at = "-".join(sorted(self.hosts))
        return f"attempt {self.number} of {self.word} at {at} since {self.begins:.2f} s ({said})"


@dataclass
class Ledger:
    """`limited`: hosts that say Overloaded at a small queue. `is_quiet`: nothing breaks, by plan."""

    silence_s: float
    lease_s: float
    limited: frozenset[str]
    is_quiet: bool
    causes: list[Cause] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _live: dict[Name, Attempt] = field(default_factory=dict)  # a request's newest
    _hellos: dict[tuple[str, str, int], float] = field(default_factory=dict)  # (node's name, router, connection)
    _had_room: dict[str, float] = field(default_factory=dict)  # decode host -> when it was last seen with room
    _was_full: dict[str, float] = field(default_factory=dict)
    _lives: dict[str, int] = field(default_factory=dict)
    _fruitless: dict[frozenset[str], list[Attempt]] = field(default_factory=dict)  # by a pair that can't connect

    # ---- what broke

    def note(self, kind: str, hosts: frozenset[str], begins: float, ends: float, life: int = 0) -> None:
        self.causes.append(Cause(kind, hosts, begins, ends, life))

    def restarted(self, host: str, life: int, now: float) -> None:
        """What lasts until a restart is over, and a restart itself ends whatever was there."""
        for cause in self.causes:
            if cause.hosts == {host} and cause.ends == float("inf") and cause.life < life:
                cause.ends = now
        if life > 1:
            self.note("restart", frozenset((host,)), now, now)

    def saw(self, host: str, life: int, *, has_room: bool, now: float) -> None:
        """A node's books after one of its rounds."""
        if self._lives.get(host) != life:
            self._lives[host] = life
            self.restarted(host, life, now)
        (self._had_room if has_room else self._was_full)[host] = now

    # ---- what happened

    def sent(self, host: str, to: str, message: Message, now: float, *, was_taken: bool) -> None:
        """Every message of every process. `to`: the host it is for."""
        if not was_taken:
            self.note("full queue", frozenset((host, to)), now, now)
        if isinstance(message, Generate):
            self._begun(host, to, message, now)
        elif isinstance(message, Abort) and message.all_sequences:
            self._withdrawn(message, now)
        elif isinstance(message, Tokens):
            self._told(host, message)
        elif isinstance(message, Hello):
            self._greeted(host, to, message, now)

    def _begun(self, router: str, to: str, message: Generate, now: float) -> None:
        key = message.key
        hosts = frozenset(filter(None, (router, to, message.decode_node)))
        attempt = Attempt(router, key.rid, key.attempt, hosts, now, message.decode_node)
        before = self._live.get(name_of(key))
        self._live[name_of(key)] = attempt
        if before is not None and before.number < key.attempt:
            before.ends = before.ends or now
            self.counts["resumes"] += 1
            self.counts[f"resumed: {self._cause_of(before, attempt)}"] += 1

    def _withdrawn(self, message: Abort, now: float) -> None:
        attempt = self._open(message.key)
        if attempt is not None:
            attempt.ends = now

    def _told(self, host: str, message: Tokens) -> None:
        for end in message.ends:
            attempt = self._open(end.key)
            if end.reason not in GOOD_ENDS and attempt is not None and attempt.told is None and host in attempt.hosts:
                attempt.told = end
                self.counts[f"told: {end.error_code}"] += 1

    def _open(self, key: Key) -> Attempt | None:
        attempt = self._live.get(name_of(key))
        return attempt if attempt is not None and attempt.number == key.attempt and attempt.ends is None else None

    def _greeted(self, host: str, to: str, message: Hello, now: float) -> None:
        """A Hello that is said again on the same connection was not answered in time."""
        name = (f"{host}@{message.epoch:x}", to, message.connection)
        since = self._hellos.setdefault(name, now)
        if since != now:
            self.counts["hellos said again"] += 1
            hosts = frozenset((host, to))
            if not any(self._near(hosts, since, now)):  # what only delays may do it too
                raise Violation(f"{host} had to say Hello to {to} again, and nothing broke between them", host)

    # ---- the two together

    def ended(self, names: Sequence[Name], outcome: str, now: float) -> None:
        """A client got an error. Of its requests one has failed, the others were withdrawn with it."""
        if not names and not self.causes:
            raise Violation(f"a client got {outcome}, and nothing broke")
        found: list[Violation] = []
        for name in names:
            try:
                self._failed(name, outcome, now)
            except Violation as violation:
                found.append(violation)
        if names and len(found) == len(names):
            raise found[0]

    def _failed(self, name: Name, outcome: str, now: float) -> None:
        """One that was never placed needs a cause anywhere."""
        attempt = self._live.get(name)
        self.counts["failures"] += 1
        if attempt is not None:
            attempt.ends = attempt.ends or now
            self.counts[f"failed: {self._cause_of(attempt, None)}"] += 1
        elif not self.causes:
            word = f"{name[0]}/{name[2]}#"
            raise Violation(f"{word} ended with {outcome}, and nothing broke", word)

    def _cause_of(self, attempt: Attempt, successor: Attempt | None) -> str:
        assert attempt.ends is not None
        told = attempt.told
        if told is not None and told.error_code in FULL and attempt.hosts & self.limited:
            return "a full queue's limit"
        for cause in self._explaining(attempt.hosts, attempt.begins, attempt.ends):
            if self._fits(cause, told):
                if cause.kind in LASTING:
                    self._fruitless.setdefault(cause.hosts, []).append(attempt)
                return cause.kind
        if successor is not None and told is None and is_due("E3") and self._is_move(attempt, successor):
            return "moved"
        raise Violation(f"{attempt} came to nothing at {attempt.ends:.2f} s, and nothing of it broke", attempt.word)

    def check_pairs(self) -> None:
        """Where nothing else breaks, a pair that can't connect is tried by a few after it is known to be one."""
        for pair, attempts in self._fruitless.items():
            known_at = min(attempt.ends or 0.0 for attempt in attempts)
            later = [attempt for attempt in attempts if attempt.begins > known_at]
            if self.is_quiet and len(later) > MOST_PROBES:
                names = "-".join(sorted(pair))
                raise Violation(f"{len(later)} requests tried {names}, known not to connect", later[-1].word)

    def _is_move(self, attempt: Attempt, successor: Attempt) -> bool:
        """Off a decode node that was full, to one that had room: as the two were seen last."""
        old, new = attempt.decode, successor.decode
        if not old or old == new or new not in self._had_room:
            return False
        return self._was_full.get(old, -1.0) >= attempt.begins and self._had_room[new] >= attempt.begins

    def _explaining(self, hosts: frozenset[str], begins: float, ends: float) -> Iterator[Cause]:
        return (cause for cause in self._near(hosts, begins, ends) if self._may_break(cause.kind))

    def _near(self, hosts: frozenset[str], begins: float, ends: float) -> Iterator[Cause]:
        """Faults of these hosts and paths in this time, or so shortly before that their connections were not back."""
        since = begins - self.silence_s - CONNECT_AGAIN_S
        for cause in self.causes:
            if cause.hosts <= hosts and cause.begins <= ends and cause.ends >= since:
                yield cause

    def _may_break(self, kind: str) -> bool:
        return kind in (*DRAINS, *LASTING, *GENERATE_FAULTS) if self.is_quiet else kind not in NO_BREAKS

    def _fits(self, cause: Cause, told: SequenceEnd | None) -> bool:
        """Whether this kind of fault can bring about what was told."""
        if told is None:
            return True
        if any(word in told.error_message for word in WRONG_PAGES):
            return cause.kind in DAMAGE
        if told.error_code == "step_failed":
            return cause.kind == "failed step"
        if told.error_code == "wire_error":
            return cause.kind == "unreadable"
        if told.error_code == "node_draining":
            return cause.kind in DRAINS
        return True


def name_of(key: Key) -> Name:
    return key.router_id, key.router_epoch, key.rid
