"""Between the wire's messages and the core's objects: requests, tokens, ends, draft state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from shared.core.errors import HandoffFailed
from shared.core.keys import sequence_seed
from shared.core.request import Request
from shared.engine.future_map import FutureMap
from shared.sched.events import Emitted, Ended, PrefillDone
from shared.wire.codec import key_of, sampling_of, to_wire
from shared.wire.messages import MAX_TEXT, Generate, Offer, Prebuilt, SequenceEnd, TokenRun


def requests_of(generate: Generate, next_arrival: Callable[[], int], now: float) -> list[Request]:
    """One request per sequence that has not ended, with neighbouring seniority."""
    leader, sampling = key_of(generate.key), sampling_of(generate.sampling)
    prompt = np.asarray(generate.prompt_ids, dtype=np.int64)
    return [
        Request(
            leader.sibling(index),
            prompt,
            sampling,
            sequence_seed(generate.seed, index),
            next_arrival(),
            output_ids=list(generate.output_ids[index]),
            handoff_to=generate.decode_endpoint if generate.decode_node else None,
            deadline=now + generate.remaining_ms / 1000,
            adapter=generate.adapter,
        )
        for index in range(generate.num_sequences)
        if index not in generate.ended
    ]


def request_of(offer: Offer, arrival: int, now: float) -> Request:
    return Request(
        key_of(offer.key),
        np.asarray(offer.prompt_ids, dtype=np.int64),
        sampling_of(offer.sampling),
        offer.seed,
        arrival,
        output_ids=list(offer.output_ids),
        deadline=now + offer.remaining_ms / 1000,
        adapter=offer.adapter,
    )


def run_of(event: Emitted) -> TokenRun:
    return TokenRun(to_wire(event.key), event.first_pos, list(event.ids), list(event.logprobs))


def end_of(event: Ended) -> SequenceEnd:
    error = event.error
    return SequenceEnd(
        key=to_wire(event.key),
        reason=event.reason.value,
        num_output_tokens=event.num_output_tokens,
        cached_tokens=event.cached_tokens,
        error_code="" if error is None else error.code,
        error_message="" if error is None else error.message[:MAX_TEXT],  # a peer's words may be in it
    )


def prebuilt_of(done: PrefillDone, lease: int) -> Prebuilt:
    return Prebuilt(
        key=to_wire(done.request.key),
        lease=lease,
        token=done.token,
        logprobs=list(done.logprobs),
        committed=done.committed,
        cached_tokens=done.request.cached_tokens,
        draft_state=draft_state_to_bytes(done.draft_state),
    )


def draft_state_to_bytes(state: Mapping[str, torch.Tensor]) -> bytes:
    """Host tensors of any number format, in the order of their names; empty without a drafter."""
    return b"".join(state[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(state))


def draft_state_of_bytes(data: bytes, future_map: FutureMap, *, peer_drafts: bool) -> dict[str, torch.Tensor]:
    """What this node's relay buffers declare: zeros from a peer without a draft head, who sends nothing. HandoffFailed
    when the size is another."""
    extras = sorted(future_map.extras.items())
    sizes = [math.prod(buffer.shape[1:]) * buffer.dtype.itemsize for _, buffer in extras]
    wanted = sum(sizes) if peer_drafts else 0
    if len(data) != wanted:
        raise HandoffFailed(f"draft state of {len(data)} bytes where {wanted} are needed")
    data = data or bytes(sum(sizes))
    state, begin = {}, 0
    for (name, buffer), size in zip(extras, sizes, strict=True):
        part = torch.frombuffer(bytearray(data[begin : begin + size]), dtype=buffer.dtype)
        state[name] = part.view(tuple(buffer.shape[1:]))
        begin += size
    return state


def drafts_within(state: Mapping[str, torch.Tensor], vocab_size: int) -> bool:
    """Drafts become input ids of a step that other requests share: one beyond the vocabulary would fail them all."""
    ids = state.get("topk_index")
    return ids is None or bool(((ids >= 0) & (ids < vocab_size)).all())
