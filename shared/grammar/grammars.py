"""Compiles the grammars of a node's requests while the loop runs.

Requests share no compiled grammar. In llguidance, copies of a grammar share one lexer of bounded size. If one long
answer filled this lexer, other answers would stop.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

from shared.grammar.big_stack import one_thread
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.constraint import GrammarConstraint


class Grammars:
    """The node's loop thread uses this class. The compiling thread calls `wake` after a compilation.

    `executor` compiles the grammars; by default it is a new thread. `close` shuts it down.
    """

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
        """Return a mask's length in words. A word has the bits of 32 ids."""
        return self._compiler.num_words

    @property
    def version(self) -> str:
        return self._compiler.version

    def constraint(self, grammar: str) -> GrammarConstraint:
        compiled = self._thread.submit(self._compiler.compile, grammar)
        compiled.add_done_callback(lambda _: self._wake())
        return GrammarConstraint(compiled, self._eos_ids)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
