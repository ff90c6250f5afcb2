"""Collect what a certificate says of each choice, and have it signed when the choice ends. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Collection

from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import GenerationPlan
from router.certify.record import ChoiceFacts
from router.certify.signing import AnswerSigner
from shared.wire.messages import Fingerprint


class Certifying:
    """Owned by one Generation. A resumed stream's tokens come again, so the record has all of them."""

    def __init__(self, plan: GenerationPlan, answer_id: str, signer: AnswerSigner) -> None:
        self._plan = plan
        self._answer_id = answer_id
        self._signer = signer
        self._ids: list[list[int]] = [[] for _ in range(len(plan.jobs) * plan.num_sequences)]

    def take_delta(self, index: int, delta: Delta, nodes: Collection[Fingerprint]) -> None:
        """Take a choice's next tokens. Put the certificate into its last delta. `nodes`: all that had its request."""
        self._ids[index] += delta.ids
        if delta.finish_reason is not None:
            delta.certificate = self._signer.certify(self._facts(index, delta.finish_reason.value, nodes))

    def _facts(self, index: int, finish_reason: str, nodes: Collection[Fingerprint]) -> ChoiceFacts:
        plan = self._plan
        job = plan.jobs[index // plan.num_sequences]
        return ChoiceFacts(
            answer=self._answer_id,
            choice=index,
            time=int(time.time()),
            model=plan.model,
            adapter=plan.adapter,
            nodes=list(dict.fromkeys(nodes)),
            templates=self._signer.templates,
            prompt_ids=job.ids,
            sampling=plan.sampling,
            stops=plan.show.stops,
            seed=job.seed,
            sequence=index % plan.num_sequences,
            token_ids=self._ids[index],
            finish_reason=finish_reason,
        )
