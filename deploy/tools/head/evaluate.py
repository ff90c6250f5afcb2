"""Measure a head's tokens per verify step, with its chains of drafts over known answers.

While all drafts of a chain are right, the head's input is the same as in serving. So unrolling over a greedy answer
yields the acceptance lengths of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deploy.tools.head.network import HeadNet, Weights, rows_of
from deploy.tools.head.store import FeatureTrace

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """Acceptance over greedy answers. `tokens_per_verify[k]`: tokens per verify step with chains of k + 1 drafts.

    `by_step[k]`: the share of right drafts at step k, if all earlier drafts are right.
    """

    answers: int
    tokens: int
    tokens_per_verify: tuple[float, ...]
    by_step: tuple[float, ...]


@torch.inference_mode()
def acceptance(
    net: HeadNet, weights: Weights, draft_ids: Tensor, traces: Sequence[FeatureTrace], steps: int, at_once: int = 8
) -> HeadAcceptance:
    """`draft_ids`: (draft vocab,) int64. Drafts past the answer's end do not count."""
    right: list[list[Tensor]] = []
    for start in range(0, len(traces), at_once):
        right += chains(net, weights, draft_ids, traces[start : start + at_once], steps)
    tried, kept = [0] * steps, [0] * steps
    for one in right:
        alive = torch.ones(len(one[0]), dtype=torch.bool)
        for step, hits in enumerate(one):
            alive = alive[: len(hits)]
            tried[step] += int(alive.sum())
            alive = alive & hits
            kept[step] += int(alive.sum())
    walks = [[walk(one[: length + 1]) for one in right] for length in range(steps)]
    return HeadAcceptance(
        answers=len(traces),
        tokens=sum(len(one[0]) for one in right),
        tokens_per_verify=tuple(sum(t for t, _ in w) / max(1, sum(v for _, v in w)) for w in walks),
        by_step=tuple(k / max(1, t) for k, t in zip(kept, tried, strict=True)),
    )


def chains(
    net: HeadNet, weights: Weights, draft_ids: Tensor, traces: Sequence[FeatureTrace], steps: int
) -> list[list[Tensor]]:
    """Return, by answer, step and a chain's first token, whether the chain's draft at this step is right."""
    rows = rows_of(traces)
    right: list[list[Tensor]] = [[] for _ in traces]
    head = weights["lm_head.weight"]
    for step, hidden in enumerate(net.unroll(weights, traces, steps)):
        drafts = draft_ids[(hidden @ head.to(hidden.dtype).T).argmax(dim=-1).cpu()]
        parts = drafts.split(list(rows.counts(step)))
        for one, part, out in zip(traces, parts, right, strict=True):
            out.append(part == one.ids[one.prompt + 1 + step :][: len(part)])
    return right


def walk(right: Sequence[Tensor]) -> tuple[int, int]:
    """Decode an answer. `right`: `chains`' result for it. Return (tokens, verify steps)."""
    hits = [one.tolist() for one in right]
    at, verifies, end = 0, 0, len(hits[0])
    while at < end:
        verifies += 1
        accepted = 0
        while accepted < len(hits) and at < len(hits[accepted]) and hits[accepted][at]:
            accepted += 1
        at += accepted + 1
    return min(at, end), verifies
