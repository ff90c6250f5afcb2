"""Log-probabilities of prompt tokens: read off a chunk's logits and gone before the step samples.

    outputs     s s s s s | S | W W W      s: scored, S: the sampled token of a prompt's end, W: a verify window
    to sample             | S | W W W      what the rest of the step sees, as if nothing had been scored

So a prompt's scores need no more memory than its chunk's logits, and no other part of a step knows of them.
"""

from __future__ import annotations

import numpy as np
import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.plan import PromptScores, StepPlan
from shared.engine.verify import Verified
from shared.model.interface import ModelOutput
from shared.sample.interface import SampleOutput
from shared.sample.sampler import score


def take_scores(fb: ForwardBatch, output: ModelOutput) -> tuple[list[SampleOutput], ModelOutput]:
    """Score the plan's shares. Return the scores, on the logits' device, and the outputs that are left to sample;
    `fb` is of these from then on. Runs on the forward stream and waits for nothing."""
    scores: list[SampleOutput] = []
    is_sampled = np.ones(len(fb.output_rows), dtype=np.bool_)
    for share in fb.plan.scores:
        first = int(np.searchsorted(fb.output_rows, share.row))  # a chunk's scored tokens are its first outputs
        outputs = slice(first, first + len(share.targets))
        targets = torch.from_numpy(share.targets).to(output.logits.device, non_blocking=True)
        scores.append(score(output.logits[outputs], targets, share.num_top))
        is_sampled[outputs] = False
    left = torch.from_numpy(np.flatnonzero(is_sampled)).to(output.logits.device)
    fb.output_rows = fb.output_rows[is_sampled]
    fb.inputs.logits_idx = fb.inputs.logits_idx[left]
    return scores, ModelOutput(output.logits[left], output.hidden[left], output.aux)


def scores_to_host(plan: StepPlan, verified: Verified) -> tuple[PromptScores, ...]:
    """Copy what `take_scores` left. Runs on the copy stream."""
    return tuple(
        PromptScores(
            share.row,
            share.first,
            one.logprobs.cpu().numpy(),
            one.top_ids.cpu().numpy(),
            one.top_logprobs.cpu().numpy(),
        )
        for share, one in zip(plan.scores, verified.scores, strict=True)
    )
