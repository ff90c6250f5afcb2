"""Compiled grammars by their text. Each is compiled once, beside the loop, and kept as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from llguidance import LLMatcher

from shared.grammar.compiler import GrammarCompiler
from shared.grammar.constraint import GrammarConstraint

MOST_KEPT = 256  # grammars that nobody has asked for since; a lexer may take megabytes


class GrammarShelf:
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
        self._thread = executor or ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._thread.submit(compiler.warm_up)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # the last one asked for at the end

    @property
    def num_words(self) -> int:
        """Return the length of a mask, in words of 32 ids."""
        return self._compiler.num_words

    @property
    def version(self) -> str:
        return self._compiler.version

    def constraint(self, grammar: str) -> GrammarConstraint:
        """Return a constraint at the grammar's beginning, which may still have to be compiled."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._thread.submit(self._compiler.compile, grammar)
            compiled.add_done_callback(lambda _: self._wake())
            while len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarConstraint(compiled, self._eos_ids)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
