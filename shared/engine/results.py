"""Name the tensors of a step's results on the device, and read them on the host.

forward   ... stash, pack(named_results)
copy                        download
host                                  read_result, when the lease is closed
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from shared.engine.plan import StepPlan, StepResult
from shared.engine.scores import named_scores, read_scores
from shared.engine.verify import Verified

DRAFT_STATE = "draft."  # prefix of names of the drafter's relayed state


def named_results(plan: StepPlan, verified: Verified) -> dict[str, torch.Tensor]:
    """Return the tensors that the host needs. Runs on the forward stream."""
    sampled, output_of = verified.sampled, verified.output_of
    found = {
        "tokens": verified.tokens,
        "accept_lens": verified.accept_lens,
        "seq_lens": verified.seq_lens,
        "tag_ok": verified.tag_ok,
    }
    if (plan.sampling.num_logprobs >= 0).any() and sampled.ids.numel():
        found["logprobs"] = sampled.logprobs[output_of]
        found["top_ids"] = sampled.top_ids[output_of]
        found["top_logprobs"] = sampled.top_logprobs[output_of]
    if plan.num_prefill:
        found |= {DRAFT_STATE + name: value[: plan.num_prefill] for name, value in verified.draft_state.items()}
    return found | named_scores(verified.scores)


def read_result(plan: StepPlan, results: Mapping[str, torch.Tensor], seconds: tuple[float, float]) -> StepResult:
    """`seconds`: a result of StepTimes.seconds."""
    shape = (plan.batch_size, plan.width)
    scored = "logprobs" in results
    return StepResult(
        step=plan.step,
        row_ids=plan.row_ids,
        num_prefill=plan.num_prefill,
        tokens=results["tokens"].numpy(),
        accept_lens=results["accept_lens"].numpy().astype(np.int32),
        seq_lens=results["seq_lens"].numpy(),
        tag_ok=results["tag_ok"].numpy(),
        draft_state={
            name.removeprefix(DRAFT_STATE): value.clone()  # copied: a view would keep the whole step's results
            for name, value in results.items()
            if name.startswith(DRAFT_STATE)
        },
        draft_seconds=seconds[0],
        verify_seconds=seconds[1],
        logprobs=results["logprobs"].numpy() if scored else np.zeros(shape, np.float32),
        top_ids=results["top_ids"].numpy() if scored else np.zeros((*shape, 0), np.int64),
        top_logprobs=results["top_logprobs"].numpy() if scored else np.zeros((*shape, 0), np.float32),
        scores=read_scores(plan, results),
        prompt_tokens=plan.prompt_tokens,
    )
