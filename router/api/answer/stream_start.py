"""Begin a stream with event ids, or resume it. See marks.py and stream_token.py."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec

from router.api.answer.generation_plan import GenerationPlan
from router.api.answer.marks import MAX_CHOICES, Marks, Position, ResumedMarks, packed, read_id
from router.api.answer.stream_token import Signer, StreamFacts, name_of
from router.http.errors import ResumeMismatch
from shared.core.keys import sequence_seed

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class StreamStart:
    """`name`: base of the answer's ids. `seen`: the reader's position; None at the beginning."""

    token: str
    name: str
    created: int
    seen: Position | None = None

    def marks(self, num_choices: int) -> Marks:
        return Marks(num_choices, self.token) if self.seen is None else ResumedMarks(self.seen, self.token)


def begin_stream(
    path: str, body: Any, plan: GenerationPlan, signer: Signer, last_event_id: str | None
) -> tuple[GenerationPlan, StreamStart | None]:
    """Return the plan to run and the stream's start, which is None for too many choices.

    Raise UnknownStream for an id without our signature, and ResumeMismatch for another request.
    """
    num_choices = len(plan.jobs) * plan.num_sequences
    if last_event_id is None:
        if num_choices > MAX_CHOICES:
            return plan, None
        plan = drawn_from(plan, body, plan.jobs[0].seed)
        digest = digest_of(path, body, plan)
        sampling, nonce = plan.sampling, secrets.token_bytes(8)
        facts = StreamFacts(int(time.time()), plan.jobs[0].seed, sampling.max_tokens, digest, nonce, sampling.values)
        start = start_of(signer.sign(facts), facts, None)
    else:
        token, seen = read_id(last_event_id)
        facts = signer.read(token)
        plan = drawn_from(plan, body, facts.seed)
        made = asdict(facts.sampling) | {"max_tokens": facts.max_tokens}
        plan = replace(plan, sampling=replace(plan.sampling, **made))
        if digest_of(path, body, plan) != facts.digest or len(seen.choices) != num_choices:
            raise ResumeMismatch("this request differs from the one that began the stream")
        start = start_of(token, facts, seen)
    return named(plan, body, start.name), start


def start_of(token: str, facts: StreamFacts, seen: Position | None) -> StreamStart:
    return StreamStart(token, name_of(token), facts.created, seen)


def drawn_from(plan: GenerationPlan, body: Any, seed: int) -> GenerationPlan:
    """Derive each prompt's seed from `seed`. If the client sent a seed, every prompt keeps it."""
    if body.seed is not None:
        return plan
    jobs = tuple(replace(job, seed=sequence_seed(seed, index << 32)) for index, job in enumerate(plan.jobs))
    return replace(plan, jobs=jobs)


def named(plan: GenerationPlan, body: Any, name: str) -> GenerationPlan:
    """Any router that resumes the stream makes the same ids of tool calls."""
    if body.request_id or plan.show.form.is_plain:
        return plan
    return replace(plan, show=replace(plan.show, form=replace(plan.show.form, request_id=name)))


def digest_of_body(path: str, body: Any) -> bytes:
    """Bodies that are equal after parsing have equal digests."""
    encoded = msgspec.json.encode([path, body], order="deterministic")
    return blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def digest_of(path: str, body: Any, plan: GenerationPlan) -> bytes:
    """Return a digest of everything that decides the tokens, except the seed."""
    made: Mapping[str, object] = {
        "sampling": plan.sampling,
        "adapter": plan.adapter,
        "salt": plan.cache_salt,
        "lengths": [len(job.ids) for job in plan.jobs],
    }
    digest = blake2b(digest_of_body(path, body), digest_size=DIGEST_BYTES)
    digest.update(msgspec.json.encode(made, order="deterministic"))
    for job in plan.jobs:
        digest.update(packed(job.ids))
    return digest.digest()
