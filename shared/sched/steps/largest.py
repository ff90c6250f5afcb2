"""Make the largest steps that the settings allow.

A node runs these steps to measure device memory before it makes the KV pool.

    mixed  | a mixed chunk | all decode rows that may run, with all their drafts             |
    chunks | the end of a prompt as long as the context | more prompts, up to the chunk size |

All pages are page 0, the sink. Memory for prompt log-probabilities is not counted: a step that lacks this memory fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import MAX_TOP_LOGPROBS, NUMBERS, SamplingParams
from shared.engine.plan import Admission, StepPlan
from shared.kv.manager import page_count
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.chunking import ChunkedPrompt
from shared.sched.steps.freeze import ChunkShare, PlanFreezer
from shared.sched.steps.prebuilt import Arrival, build_admission
from shared.sched.steps.settings import SchedSettings

EVERY_FEATURE = SamplingParams(
    max_tokens=3,
    logit_bias=((1, 0.5),),
    bad_words=((1,), (2, 1)),
    stop_token_ids=(2,),
    num_logprobs=MAX_TOP_LOGPROBS,
    **{one.name: one.other for one in NUMBERS},
)


class LargestSteps:
    """`num_rows`: the largest number of running requests. `num_tokens`: the KV pool's largest size, in tokens."""

    def __init__(
        self,
        freezer: PlanFreezer,
        settings: SchedSettings,
        new_step: Callable[[], int],
        num_rows: int,
        num_tokens: int,
    ) -> None:
        self._freezer = freezer
        self._settings = settings
        self._new_step = new_step
        self._num_rows = num_rows
        self._num_tokens = num_tokens

    def work(self) -> Iterator[Admission | StepPlan]:
        settings, num_rows = self._settings, self._num_rows
        length = max(settings.width + 1, min(settings.max_context, self._num_tokens // num_rows))
        num_decoding = max(1, num_rows - 1)
        reqs = [self._request(num_rows - 1 - n, length) for n in range(num_decoding)]
        committed = length - settings.width
        arrivals = [Arrival(req, 1, committed, (), {}) for req in reqs]
        admission = build_admission(self._new_step(), arrivals, settings)
        yield admission
        batch = ScheduleBatch.of(reqs, [committed] * num_decoding, admission.step, in_flight=0)
        yield self._plan(self._shares(settings.mixed_chunk_size, length, num_rows - num_decoding), batch, length)
        yield self._plan(
            self._shares(settings.chunk_size, settings.max_context, num_rows), ScheduleBatch(), settings.max_context
        )

    def _shares(self, num_tokens: int, length: int, num_rows: int) -> list[ChunkShare]:
        """Return up to `num_rows` prompts' last chunks, `num_tokens` tokens in all. Each prompt has `length` tokens."""
        shares: list[ChunkShare] = []
        while num_tokens and len(shares) < num_rows:
            q_len = min(num_tokens, length)
            req = self._request(len(shares), length)
            shares.append(ChunkShare(ChunkedPrompt(req, req.ask.prompt_ids, length - q_len), q_len))
            num_tokens -= q_len
        return shares

    def _plan(self, shares: Sequence[ChunkShare], batch: ScheduleBatch, length: int) -> StepPlan:
        settings = self._settings
        plan = self._freezer.freeze(self._new_step(), shares, batch, np.arange(len(batch)), settings.width)
        pages = page_count(length + settings.overshoot, settings.page_size)
        sink = np.zeros((plan.batch_size, pages), dtype=np.int32)
        return replace(plan, layout=replace(plan.layout, page_tables=(sink,) * len(plan.layout.page_tables)))

    def _request(self, index: int, length: int) -> Request:
        key = RequestKey("largest", 0, str(index), 0, 0)
        adapter = next(iter(self._settings.adapters.digests), "")
        ask = NodeAsk(np.ones(length, dtype=np.int64), EVERY_FEATURE, index, adapter)
        return Request(key, ask, arrival=index, row=1 + index)
