"""Compiles the grammars of a node's requests, and makes slow masks, while the loop runs.

Requests share no compiled grammar. In llguidance, copies of a grammar share one lexer of bounded size. If one long
answer filled this lexer, other answers would stop.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from shared.core.errors import InvalidRequest
from shared.grammar.big_stack import one_thread
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.constraint import GrammarConstraint
from shared.wire.fitting import no_grammar_because


class Grammars:
    """The node's loop thread uses this class. The threads call `wake` after each of their jobs.

    `executor` compiles grammars and makes masks; by default each has a new thread, so that a stream's next mask does
    not wait for the grammars of new requests. `close` shuts both down. By `clock` a mask's time is the processor's, so
    that a busy machine makes no grammar slow.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        eos_ids: tuple[int, ...],
        wake: Callable[[], None],
        executor: Executor | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._compiler = compiler
        self._eos_ids = frozenset(eos_ids)
        self._wake = wake
        self._clock = clock
        self._compile_thread = executor or one_thread("grammar")
        self._mask_thread = executor or one_thread("mask")
        self._compile_thread.submit(compiler.warm_up)

    @property
    def num_words(self) -> int:
        """Return a mask's length in words. A word has the bits of 32 ids."""
        return self._compiler.num_words

    @property
    def version(self) -> str:
        return self._compiler.version

    def constraint(self, grammar: str, emitted: Sequence[int] = ()) -> GrammarConstraint:
        """Start to compile a grammar, and to make the mask behind the tokens emitted so far."""
        compile = functools.partial(self._compiler.compile, grammar)
        constraint = GrammarConstraint(compile, self.num_words, self._eos_ids, self._start, self._clock)
        constraint.prepare(emitted)
        return constraint

    def _start(self, job: Callable[[], None], compiles: bool) -> Future[None]:
        thread = self._compile_thread if compiles else self._mask_thread
        started = thread.submit(job)
        started.add_done_callback(lambda _: self._wake())
        return started

    def close(self) -> None:
        for thread in (self._compile_thread, self._mask_thread):
            thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class NoGrammars:
    """What a node that follows no grammars has instead of Grammars. `why`: a clause for the clients of such nodes."""

    why: str = "this node was started without them"
    num_words: int = 0

    @property
    def version(self) -> str:
        return no_grammar_because(self.why)

    def constraint(self, grammar: str, emitted: Sequence[int] = ()) -> GrammarConstraint:
        raise InvalidRequest(f"this node follows no grammars: {self.why}")

    def close(self) -> None:
        """Do nothing: there are no threads."""


NO_GRAMMARS = NoGrammars()
