"""Log-probabilities of prompt tokens: read off a chunk's logits and gone before the step samples.

    outputs     s s s s s | S | W W W      s: scored, S: the sampled token of a prompt's end, W: a verify window
    to sample             | S | W W W      what the rest of the step sees, as if nothing had been scored

So a prompt's scores need no more memory than its chunk's logits, and no other part of a step knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.plan import PromptScores, StepPlan
from shared.engine.step_arrays import scored_outputs
from shared.model.interface import ModelOutput
from shared.sample.interface import SampleOutput
from shared.sample.sampler import score


def take_scores(fb: ForwardBatch, output: ModelOutput) -> tuple[list[SampleOutput], ModelOutput]:
    """Score the plan's shares. Return the scores, on the logits' device, and the outputs that are left to sample;
    `fb` is of these from then on. Runs on the forward stream and waits for nothing."""
    scores: list[SampleOutput] = []
    begin = 0
    for share, outputs in zip(fb.plan.scores, scored_outputs(fb.plan, fb.host.output_rows), strict=True):
        targets = fb.arrays.scored[begin : begin + len(share.targets)]
        begin += len(share.targets)
        scores.append(score(output.logits[outputs], targets, share.num_top))
    left = fb.arrays.sampled
    assert left is not None
    fb.inputs.logits_idx = fb.inputs.logits_idx[left]
    return scores, ModelOutput(output.logits[left], output.hidden[left], output.aux)


def named_scores(scores: list[SampleOutput]) -> dict[str, torch.Tensor]:
    """As a step's results carry them."""
    found: dict[str, torch.Tensor] = {}
    for index, one in enumerate(scores):
        found |= {
            f"score{index}.own": one.logprobs,
            f"score{index}.ids": one.top_ids,
            f"score{index}.top": one.top_logprobs,
        }
    return found


def read_scores(plan: StepPlan, results: Mapping[str, torch.Tensor]) -> tuple[PromptScores, ...]:
    """Of `named_scores`, on the host."""
    return tuple(
        PromptScores(
            share.row,
            share.first,
            results[f"score{index}.own"].numpy(),
            results[f"score{index}.ids"].numpy(),
            results[f"score{index}.top"].numpy(),
        )
        for index, share in enumerate(plan.scores)
    )
