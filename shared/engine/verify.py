"""Accept the drafts of a window that equal the target's draws.

        window of a decode row:   bonus token | draft | draft | draft        (a prefill row has one output at most)
        target draws               t0           t1      t2      t3
        accepted                   t0, and t1 if draft 1 == t0, ...          accept_lens = accepted drafts + 1

In a tree, a draft is right if it equals the target's draw after its parent. The longest path of right drafts from the
bonus token is accepted. Every emitted token is the target's draw with the request's noise, so speculation changes no
output.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.sample.interface import SampleOutput

MOST_WIDTHS = 64


@dataclass(slots=True)
class Drafts:
    """The drafts of D decode rows: nodes 1 to width - 1 of each window. Node 0 is the bonus token.

    - ids: (D, width - 1) int64
    - parents: (D, width - 1) int64, each node's parent, which has a lower number; None for a chain
    - lineage: (D, width, width) bool; lineage[d, i, j]: whether node j is node i or its ancestor
    """

    ids: torch.Tensor
    parents: torch.Tensor | None = None
    lineage: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_rows, num_drafts = self.ids.shape
        if self.parents is None:
            self.lineage = _chain(num_drafts + 1, self.ids.device).expand(num_rows, -1, -1)
        else:
            self.lineage = _lineage(self.parents)


@dataclass(slots=True)
class Verified:
    """Results of B rows, T tokens and E outputs, on the device; k = width.

    Row b emits tokens[b, :accept_lens[b]].
    """

    tokens: torch.Tensor  # (B, k) the target's draws
    accept_lens: torch.Tensor  # (B,) 0 for rows that don't emit
    seq_lens: torch.Tensor  # (B,) committed tokens after the step
    next_token: torch.Tensor  # (B,) the bonus token: the next step's input
    sampled: SampleOutput
    output_of: torch.Tensor  # (B, k) as in StepArrays
    tag_ok: torch.Tensor
    order: torch.Tensor | None  # (D, k) a tree's nodes, accepted path first; the per-token fields above have this order
    # (B, ...) state that `extend` leaves for the relay
    draft_state: dict[str, torch.Tensor] = field(default_factory=dict)
    scores: list[SampleOutput] = field(default_factory=list)  # one entry per ScoreShare of the plan


def verify(fb: ForwardBatch, sampled: SampleOutput, drafts: Drafts | None) -> Verified:
    """Accept each row's drafts before the first wrong draft. accept_lens counts the next bonus token, too.

    A tree's accepted path becomes a chain: this function moves the outputs, and `compact` moves the KV.
    """
    num_prefill = fb.plan.num_prefill
    output_of, accept_lens = fb.arrays.output_of, fb.arrays.emits
    order: torch.Tensor | None = None
    if drafts is not None:
        draws = sampled.ids[output_of[num_prefill:]]
        if drafts.parents is None:
            accepted = _accept_chain(draws, drafts.ids)
        else:
            accepted, path = _accept_tree(draws, drafts.ids, drafts.parents, drafts.lineage)
            order = path.logical_not().to(torch.int8).argsort(dim=1, stable=True)
            sampled = _reordered(sampled, in_order(order, len(sampled.ids)))
        if fb.arrays.narrow is not None:
            accepted = torch.where(fb.arrays.narrow, 1, accepted)
        accept_lens = _chunks_first(accept_lens, accept_lens[num_prefill:] * accepted, num_prefill)
    if num_prefill == 0:
        tokens, advance = sampled.ids.view(output_of.shape), accept_lens
    else:
        tokens = sampled.ids[output_of] if sampled.ids.numel() else torch.zeros_like(output_of)
        advance = _chunks_first(fb.arrays.q_lens, accept_lens[num_prefill:], num_prefill)
    return Verified(
        tokens=tokens,
        accept_lens=accept_lens,
        seq_lens=fb.committed + advance,
        next_token=tokens[:, 0] if fb.plan.width == 1 else _last_of(tokens, accept_lens),
        sampled=sampled,
        output_of=output_of,
        tag_ok=fb.tag_ok,
        order=order,
    )


def next_ids(fb: ForwardBatch, verified: Verified) -> torch.Tensor:
    """Return the token after each input token, (T,) int64.

    After a chunk's last token comes the next prompt token (hazard H11). After a prompt's last token or a window token
    comes the sampled token.
    """
    if fb.plan.has_one_token_each:
        return verified.sampled.ids
    ids = fb.inputs.input_ids
    following = torch.roll(ids, -1)
    ends = fb.inputs.layout.cu_q_lens[1 : fb.plan.num_prefill + 1].to(torch.int64) - 1
    following[ends] = fb.arrays.next_prompt_ids
    following[fb.inputs.logits_idx] = verified.sampled.ids
    return following


def last_token_idx(fb: ForwardBatch, verified: Verified) -> torch.Tensor:
    """Return the index into T of each row's last committed token, (B,) int64."""
    advance = verified.seq_lens - fb.committed
    return fb.inputs.layout.cu_q_lens[:-1].to(torch.int64) + advance - 1


def in_order(order: torch.Tensor, num: int) -> torch.Tensor:
    """Return row indices, (num,) int64, that put each window into `order` (D, width). Windows come last."""
    num_rows, width = order.shape
    rows = torch.arange(num, device=order.device)
    starts = rows[num - num_rows * width :: width].unsqueeze(1)
    rows[num - num_rows * width :] = (starts + order).view(-1)
    return rows


@functools.lru_cache(MOST_WIDTHS)
def _chain(width: int, device: torch.device) -> torch.Tensor:
    """Return a chain's lineage (width, width) bool."""
    return torch.ones((width, width), dtype=torch.bool, device=device).tril()


def _lineage(parents: torch.Tensor) -> torch.Tensor:
    """Return the lineage (D, n, n) bool.

    The matrix `steps` leads from a node to itself and to its parent. Each squaring makes it reach twice as far up.
    """
    num_rows, num_drafts = parents.shape
    steps = torch.eye(num_drafts + 1, device=parents.device).repeat(num_rows, 1, 1)
    steps[:, 1:].scatter_(2, parents.unsqueeze(2), 1.0)
    for _ in range(num_drafts.bit_length()):
        steps = (steps @ steps).clamp(max=1.0)
    return steps > 0


def _accept_chain(draws: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return accept_lens (D,). `draws` (D, n): the target's draw after each node."""
    return (ids == draws[:, :-1]).cumprod(dim=1).sum(dim=1) + 1


def _accept_tree(
    draws: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, lineage: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return accept_lens (D,) and accepted nodes (D, n) bool. `draws` as above, the others as in Drafts.

    Of several longest paths, take the first.
    """
    right = torch.ones_like(draws, dtype=torch.bool)
    right[:, 1:] = ids == draws.gather(1, parents)
    reached = (right.unsqueeze(1) | ~lineage).all(dim=2)
    num_accepted, deepest = (lineage.sum(dim=2) * reached).max(dim=1)
    path = lineage.gather(1, deepest[:, None, None].expand(-1, 1, draws.shape[1]))
    return num_accepted, path.squeeze(1)


def _reordered(sampled: SampleOutput, rows: torch.Tensor) -> SampleOutput:
    return SampleOutput(sampled.ids[rows], sampled.logprobs[rows], sampled.top_ids[rows], sampled.top_logprobs[rows])


def _chunks_first(chunk_rows: torch.Tensor, decode_rows: torch.Tensor, num_prefill: int) -> torch.Tensor:
    return torch.cat((chunk_rows[:num_prefill], decode_rows)) if num_prefill else decode_rows


def _last_of(tokens: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    """Return each row's last accepted token (B,); its first token if it accepts none."""
    last = (accept_lens - 1).clamp(min=0).unsqueeze(1)
    return tokens.gather(1, last).squeeze(1)
