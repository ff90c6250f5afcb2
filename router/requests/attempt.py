"""One attempt of a request: its nodes, what they have begun, and its share of their counts. Sans-IO.

parked, or not yet placed --occupy--> on its nodes --release--> over: the next attempt is a new object
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fleet.prefix_index import ComingPages, PromptPages
from router.fleet.registry import RegisteredNode
from router.requests.new_request import NewRequest


@dataclass(slots=True, eq=False)
class Attempt:
    asked: NewRequest
    pages: PromptPages | None
    number: int = 0
    ran_on: str = ""  # the peer that had begun the last attempt, if any
    parked_until: float | None = None  # end of the wait for a usable node
    prefill: RegisteredNode | None = None
    decode: RegisteredNode | None = None
    is_alone: bool = False  # whether this suspect runs on a node without other requests of ours
    sent_at: float = 0.0
    waits_for_prefill: bool = False  # whether the prompt counts as work of `prefiller`
    prompt_work: int = 0  # prompt tokens that `prefiller` had not cached
    coming: list[tuple[ComingPages, list[bytes]]] = field(default_factory=list)  # what this prompt brings to nodes
    has_begun: bool = False  # whether `prefiller` has begun the prompt
    begun_by_decode: set[int] = field(default_factory=set)  # indices of sequences
    waits_since: float | None = None  # when the attempt began to wait for the decode node's memory

    @property
    def nodes(self) -> tuple[RegisteredNode, ...]:
        return tuple(node for node in (self.prefill, self.decode) if node is not None)

    @property
    def prefiller(self) -> RegisteredNode | None:
        return self.prefill or self.decode

    @property
    def runner(self) -> RegisteredNode | None:
        return self.decode or self.prefill

    def occupy(self, prefill: RegisteredNode | None, decode: RegisteredNode | None) -> None:
        """Take these nodes, at least one, until `release`."""
        self.prefill, self.decode = prefill, decode
        prefiller, runner = self.prefiller, self.runner
        assert prefiller is not None and runner is not None
        cached = 0 if self.pages is None else self.pages.cached_tokens(prefiller.pages, prefiller.hello)
        self.prompt_work = len(self.asked.prompt_ids) - cached
        self._expect(prefiller.pages.computing, prefiller)
        if runner is not prefiller:
            self._expect(runner.pages.arriving, runner)
        prefiller.ours.open_prompt_tokens += len(self.asked.prompt_ids)
        prefiller.ours.open_prompt_work += self.prompt_work
        prefiller.ours.sent_prompt_work += self.prompt_work
        runner.ours.open_sequences += self.asked.num_sequences
        runner.ours.sent_sequences += self.asked.num_sequences
        self.waits_for_prefill = True
        for node in self.nodes:
            node.ours.dispatched += 1
            node.breaker.sent()

    def _expect(self, coming: ComingPages, node: RegisteredNode) -> None:
        """Until the prompt is done. Then the node tells what it has cached."""
        if self.pages is not None:
            names = self.pages.names(node.hello)
            coming.update(names)
            self.coming.append((coming, names))

    def prompt_done(self) -> None:
        for coming, names in self.coming:
            coming.remove(names)
        self.coming.clear()
        if self.waits_for_prefill and self.prefiller is not None:
            self.prefiller.ours.open_prompt_tokens -= len(self.asked.prompt_ids)
            self.prefiller.ours.open_prompt_work -= self.prompt_work
        self.waits_for_prefill = False

    def release(self) -> None:
        """Called once."""
        self.prompt_done()
        if self.runner is not None:
            self.runner.ours.open_sequences -= self.asked.num_sequences
