"""The grammars of a node's requests: each request has one of its own, compiled beside the loop.

Nothing is shared between requests. llguidance's copies share their lexer, whose states are counted and bounded, so
that one long answer would decide whether another one can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

from shared.grammar.big_stack import one_thread
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.constraint import GrammarConstraint


class Grammars:
    """Owned by the node's loop thread. `wake`: called by another thread when a grammar has been compiled. `executor`:
    a thread of its own, when not given."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        eos_ids: tuple[int, ...],
        wake: Callable[[], None],
        executor: Executor | None = None,
    ) -> None:
        self._compiler = compiler
        self._eos_ids = frozenset(eos_ids)
        self._wake = wake
        self._thread = executor or one_thread("grammar")
        self._thread.submit(compiler.warm_up)

    @property
    def num_words(self) -> int:
        """Return the length of a mask, in words of 32 ids."""
        return self._compiler.num_words

    @property
    def version(self) -> str:
        return self._compiler.version

    def constraint(self, grammar: str) -> GrammarConstraint:
        """Return a constraint at the grammar's beginning, which is still to be compiled."""
        compiled = self._thread.submit(self._compiler.compile, grammar)
        compiled.add_done_callback(lambda _: self._wake())
        return GrammarConstraint(compiled, self._eos_ids)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
