"""Take requests in: refuse a request that can never run here, start to compile its grammar, and queue it."""

from __future__ import annotations

from shared.core.errors import InvalidRequest, TooLarge
from shared.core.request import Request
from shared.grammar.grammars import Grammars, NoGrammars
from shared.sched.requests.queues import Queues


class Intake:
    def __init__(self, queues: Queues, grammars: Grammars | NoGrammars) -> None:
        self._queues = queues
        self._grammars = grammars

    def submit(self, req: Request) -> None:
        """Queue a request, or end it immediately if it can never fit."""
        self._queues.requests[req.key] = req
        try:
            self.constrain(req)
        except InvalidRequest as error:
            self._queues.fail(req.key, error)
            return
        if not self._queues.budget.can_ever_hold(req):
            self._queues.fail(req.key, TooLarge(f"{req.num_tokens} tokens and an answer can never fit this node"))
            return
        if req.handoff_to is not None:
            self._queues.ungranted[req.key] = req
        self._queues.await_memory(req)

    @property
    def grammar_version(self) -> str:
        return self._grammars.version

    def constrain(self, req: Request) -> None:
        """Start to compile the request's grammar, if any. Raise InvalidRequest if this node follows no grammars."""
        if req.ask.sampling.grammar and req.constraint is None:
            req.constraint = self._grammars.constraint(req.ask.sampling.grammar, req.output_ids)

    def close(self) -> None:
        self._grammars.close()
