"""Define the scheduler's settings, which are checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.core.adapter_table import AdapterTable
from shared.core.overshoot import overshoot
from shared.core.request import Request
from shared.kv.manager import page_count
from shared.sched.steps.prompts import InChunks, PromptRules


@dataclass(frozen=True, slots=True)
class DraftRules:
    """What a drafter asks of the scheduler: the first two as in Drafter."""

    key_lookahead: int = 0
    reads_history: bool = False
    relays_drafts: bool = False  # whether drafts need state that the row's last step relayed


@dataclass(frozen=True, slots=True)
class SchedSettings:
    page_size: int
    num_page_groups: int = field(default=1, kw_only=True)  # see shared/kv/layout.py
    max_context: int  # limit on tokens of a sequence, prompt and output together
    chunk_size: int = 512  # limit on prompt tokens per step, over all prompts
    mixed_chunk_size: int = 512  # the same limit in a step with decode rows, to bound their delay
    width: int = 1  # limit on tokens that a decode row commits per step
    # whether chunks and decode rows share steps; otherwise their steps alternate
    mix: bool = True
    drafts: DraftRules = DraftRules()
    needs_cpu_seq_lens: bool = False  # whether planning waits for exact lengths
    max_ungranted_pages: int = 1 << 30  # limit on pages that a prefill node pins without a grant
    # the parts of a hand-off's KV end before these layers; the last part has the remaining layers
    layer_ends: tuple[int, ...] = ()
    growth_reserve: float = 0.0  # share of the foreseen growth of answers that admission keeps free
    prompts: PromptRules = InChunks()
    depth: int = 1  # steps that may be open when another step is launched
    device: str = "cpu"
    adapters: AdapterTable = field(default_factory=AdapterTable)

    def num_pages(self, num_tokens: int) -> int:
        """Return the length of the page list of a row of `num_tokens` tokens, in all page groups."""
        return self.num_page_groups * page_count(num_tokens, self.page_size)

    def keeps_history(self, req: Request) -> bool:
        return self.drafts.reads_history or req.ask.sampling.needs_history

    @property
    def speculative(self) -> bool:
        """Return whether only the device knows the rows' lengths. Steps then publish the lengths."""
        return self.width > 1

    @property
    def relays_lengths(self) -> bool:
        """Return whether the host plans with bounds of the rows' lengths."""
        return self.speculative and not self.needs_cpu_seq_lens

    @property
    def overshoot(self) -> int:
        """Return the number of tokens that steps may write past a sequence's end."""
        return overshoot(self.width, self.depth)

    @property
    def history_len(self) -> int:
        return self.max_context + self.overshoot
