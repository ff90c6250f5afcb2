"""Decide when to send each request. Pure: the same seed and answers make the same load."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from deploy.tools.traffic.workloads.workload import Session

Message = tuple[str, str]  # role, text; the text of a CALL is its arguments
Messages = tuple[Message, ...]
CALL = "call"
PAUSE_S = 0.1  # a user's pause after a failure, so that refusals cause no tight loop


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`hang_up_after`: the client leaves after this number of chunks with tokens; None if it stays.

    `tool_choice`: "" if no tool is declared.
    """

    number: int
    session: int
    turn: int
    due: float
    messages: Messages
    max_tokens: int
    probe: int | None
    hang_up_after: int | None
    tool_choice: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    duration_s: float = math.inf
    num_requests: int | None = None


@dataclass(frozen=True, slots=True)
class HangUps:
    """The share of clients that leave early, after a random number of chunks."""

    share: float
    seed: int

    def draw(self, number: int, max_tokens: int) -> int | None:
        rng = random.Random(f"{self.seed} hang-up {number}")
        return rng.randrange(max_tokens) if rng.random() < self.share else None


@dataclass(slots=True)
class Talk:
    """A session under way.

    `answers`: those of this turn so far, by the number of the request. `findings`: answers that an agent with tools got
    beside its own, and brings with its next text.
    """

    number: int
    session: Session
    messages: Messages
    turn: int = 0
    answers: dict[int, Message] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    num_open: int = 0
    has_failed: bool = False

    def message(self, index: int) -> Message:
        """Return what request `index` of this turn adds to the history."""
        text = self.session.turns[self.turn].texts[index]
        role = "tool" if self.messages and self.messages[-1][0] == CALL else "user"
        return role, text if index else " ".join((*self.findings, text))

    def tool_choice(self, index: int) -> str:
        """An agent goes on after a call of its own, and an answer without one is its last."""
        if not self.session.has_tools:
            return ""
        return "auto" if index or self.turn + 1 == len(self.session.turns) else "required"


@dataclass(order=True, slots=True)
class WaitingTurn:
    due: float
    order: int
    talk: Talk = field(compare=False)


class Driver:
    """`arrivals` is None for a closed loop, which has `users` users."""

    def __init__(
        self,
        sessions: Iterator[Session],
        arrivals: Iterator[float] | None,
        users: int,
        limits: Limits,
        hang_ups: HangUps | None = None,
    ) -> None:
        self._sessions = sessions
        self._arrivals = arrivals
        self._limits = limits
        self._hang_ups = hang_ups
        self._waiting: list[WaitingTurn] = []
        self._open: dict[int, Talk] = {}  # number of an open request -> its session
        self._num_sessions = 0
        self._num_requests = 0
        for _ in range(1 if arrivals is not None else users):
            self._begin_next(0.0)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_done(self) -> bool:
        return not self._open and not self._waiting

    def next_at(self) -> float | None:
        """Return when `take` must be called next; None if no request becomes due before an open request ends."""
        return self._waiting[0].due if self._waiting else None

    def take_requests(self, now: float) -> list[LoadRequest]:
        due: list[LoadRequest] = []
        while self._waiting and self._waiting[0].due <= now:
            waiting = heapq.heappop(self._waiting)
            if self._arrivals is not None and waiting.talk.turn == 0:
                self._begin_next(now)
            due += self._start(waiting)
            if self._num_requests == self._limits.num_requests:
                self._waiting.clear()
        return due

    def ended(self, number: int, answer: str, now: float, *, may_go_on: bool, is_call: bool = False) -> None:
        """Record a request's end. Its turn ends with the last of its requests. The session ends too if `may_go_on` is
        false for one of them: the request failed, or its client left.

        `is_call`: `answer` is the arguments of the tool's call."""
        talk = self._open.pop(number)
        talk.answers[number] = (CALL if is_call else "assistant", answer)
        talk.has_failed |= not may_go_on
        talk.num_open -= 1
        if not talk.num_open:
            self._turn_ended(talk, now)

    def _turn_ended(self, talk: Talk, now: float) -> None:
        """Add the turn to the history: as two messages, because many chat templates want the roles to alternate."""
        own, *others = (answer for _, answer in sorted(talk.answers.items()))
        if talk.session.has_tools:
            talk.messages += (talk.message(0), own)
            talk.findings = tuple(text for _, text in others)
        else:
            asked = talk.session.turns[talk.turn].texts
            answers = (text for _, text in (own, *others))
            talk.messages += (("user", " ".join(asked)), ("assistant", " ".join(answers)))
        talk.answers, talk.turn = {}, talk.turn + 1
        if not talk.has_failed and talk.turn < len(talk.session.turns):
            self._wait(now + talk.session.turns[talk.turn].think_s, talk)
        elif self._arrivals is None:
            self._begin_next(now + PAUSE_S if talk.has_failed else now)

    def stop(self) -> None:
        self._waiting.clear()
        self._limits = Limits(duration_s=-math.inf)

    def _begin_next(self, now: float) -> None:
        due = now if self._arrivals is None else next(self._arrivals, None)
        session = next(self._sessions, None)
        if due is not None and session is not None:
            self._wait(due, Talk(self._num_sessions, session, session.opening))
            self._num_sessions += 1

    def _wait(self, due: float, talk: Talk) -> None:
        if due < self._limits.duration_s and self._num_requests != self._limits.num_requests:
            heapq.heappush(self._waiting, WaitingTurn(due, talk.number, talk))

    def _start(self, waiting: WaitingTurn) -> list[LoadRequest]:
        most = self._limits.num_requests
        room = None if most is None else most - self._num_requests
        texts = waiting.talk.session.turns[waiting.talk.turn].texts[:room]
        return [self._request(waiting.talk, waiting.due, index) for index in range(len(texts))]

    def _request(self, talk: Talk, due: float, index: int) -> LoadRequest:
        number, probe = self._num_requests, talk.session.probe
        self._num_requests += 1
        self._open[number] = talk
        talk.num_open += 1
        max_tokens = talk.session.turns[talk.turn].max_tokens
        leaves = self._hang_ups.draw(number, max_tokens) if self._hang_ups and probe is None else None
        messages = (*talk.messages, talk.message(index))
        choice = talk.tool_choice(index)
        return LoadRequest(number, talk.number, talk.turn, due, messages, max_tokens, probe, leaves, choice)
