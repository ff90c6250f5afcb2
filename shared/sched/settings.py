"""What the scheduler must know of its node. Values only, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.overshoot import overshoot
from shared.core.request import Request
from shared.sched.prompts import InChunks, PromptRules


@dataclass(frozen=True, slots=True)
class SchedSettings:
    page_size: int
    max_context: int  # tokens of one sequence, prompt and output
    chunk_size: int = 512  # prompt tokens computed per step, over all prompts
    mixed_chunk_size: int = 512  # the same in a step that decode rows share: it bounds their delay
    width: int = 1  # most tokens a decode row commits per step; above 1 there is a drafter
    mix: bool = True  # chunks and decode rows in one step; otherwise steps alternate
    key_lookahead: int = 0  # 1: a page's KV depends on the token after it; the drafter says so (Drafter)
    reads_history: bool = False  # the drafter reads tokens of all rows: each row's history is kept (Drafter)
    relays_drafts: bool = False  # the drafter leaves state in the relay, without which a row can't go on by stash
    needs_cpu_seq_lens: bool = False  # planning waits for publish: the model's attention says so, and some tests
    max_ungranted_pages: int = 1 << 30  # pages a prefill node pins for requests whose decode node has not answered
    layer_ends: tuple[int, ...] = ()  # hand-offs travel in parts: the first so many layers, then more, then the rest
    prompts: PromptRules = InChunks()
    depth: int = 1  # of the loop: steps that may be open when it launches another one
    device: str = "cpu"
    adapters: tuple[str, ...] = ()  # digests of the model's LoRA adapters, in its order

    def keeps_history(self, req: Request) -> bool:
        """Whether the FutureMap holds the request's tokens: its penalties read them, or the drafter does."""
        return self.reads_history or req.sampling.needs_history

    def adapter_slot(self, req: Request) -> int:
        """As in a plan: 0 none, n the n-th adapter. ValueError for one that the model does not have."""
        return self.adapters.index(req.adapter) + 1 if req.adapter else 0

    def has_adapter(self, req: Request) -> bool:
        return not req.adapter or req.adapter in self.adapters

    @property
    def speculative(self) -> bool:
        """Steps of any width then publish their lengths, which are known on the device only."""
        return self.width > 1

    @property
    def relays_lengths(self) -> bool:
        """Whether the host plans decode rows with bounds: the exact lengths are in the relay."""
        return self.speculative and not self.needs_cpu_seq_lens

    @property
    def overshoot(self) -> int:
        """Tokens past its end that a sequence has memory for."""
        return overshoot(self.width, self.depth)

    @property
    def history_len(self) -> int:
        """Positions that a row may reach."""
        return self.max_context + self.overshoot
