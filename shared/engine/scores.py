"""Take log-probabilities of prompt tokens from a chunk's logits, before the step samples.

outputs     s s s s s | S | W W W      s: scored, S: sampled at a prompt's end, W: a verify window
to sample             | S | W W W      all that the rest of the step sees
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shared.engine.forward_batch import ForwardBatch
from shared.engine.plan import PromptScores, StepPlan
from shared.engine.step_arrays import scored_outputs
from shared.model.math.interface import ModelOutput
from shared.sample.interface import SampleOutput
from shared.sample.sampler import score


def take_scores(fb: ForwardBatch, output: ModelOutput) -> tuple[list[SampleOutput], ModelOutput]:
    """Return the plan's scores, on the logits' device, and the part of `output` that is left for sampling.

    Reduces fb.inputs.logits_idx to this part. Runs on the forward stream and waits for nothing.
    """
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
    found: dict[str, torch.Tensor] = {}
    for index, one in enumerate(scores):
        name = f"score{index}"
        found |= {f"{name}.own": one.logprobs, f"{name}.ids": one.top_ids, f"{name}.top": one.top_logprobs}
    return found


def read_scores(plan: StepPlan, results: Mapping[str, torch.Tensor]) -> tuple[PromptScores, ...]:
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
