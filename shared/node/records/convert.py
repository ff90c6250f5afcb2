"""Convert between wire messages and the core's objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from shared.core.errors import HandoffFailed
from shared.core.keys import sequence_seed
from shared.core.request import NodeAsk, Request
from shared.engine.future_map import FutureMap
from shared.sched.steps.events import Emitted, Ended, PrefillDone, Scored
from shared.wire.codec import key_of, sampling_of, to_wire
from shared.wire.messages import Generate, Key, Offer, Prebuilt, Scores, SequenceEnd, TokenLogprob, TokenRun, Tokens
from shared.wire.ranges import MAX_TEXT

# limit on a message with tokens or scores, so that it delays other messages only a little
MESSAGE_BYTES = 128 * 1024


def requests_of(generate: Generate, next_arrival: Callable[[], int], now: float) -> list[Request]:
    """Return one request per unfinished sequence, with consecutive arrival numbers.

    Only sequence 0 reports the prompt's log-probabilities.
    """
    leader, ask = key_of(generate.key), ask_of(generate)
    unscored = replace(ask.sampling, prompt_logprobs=-1)
    return [
        Request(
            leader.sibling(index),
            replace(ask, sampling=unscored if index else ask.sampling, seed=sequence_seed(ask.seed, index)),
            next_arrival(),
            output_ids=list(generate.output_ids[index]),
            handoff_to=generate.decode_endpoint if generate.decode_node else None,
            deadline=now + generate.remaining_ms / 1000,
            scored=generate.scored,
        )
        for index in range(generate.num_sequences)
        if index not in generate.ended
    ]


def request_of(offer: Offer, arrival: int, now: float) -> Request:
    return Request(
        key_of(offer.key),
        ask_of(offer),
        arrival,
        output_ids=list(offer.output_ids),
        deadline=now + offer.remaining_ms / 1000,
        scored=len(offer.prompt_ids),  # the prefill node scores the prompt
    )


def ask_of(asked: Generate | Offer) -> NodeAsk:
    return NodeAsk(
        np.asarray(asked.prompt_ids, dtype=np.int64),
        sampling_of(asked.sampling),
        asked.seed,
        adapter=asked.adapter,
        cache_salt=asked.cache_salt,
        tenant=asked.tenant,
        trace=asked.trace,
    )


def run_of(event: Emitted) -> TokenRun:
    return TokenRun(to_wire(event.key), event.first_pos, list(event.ids), list(event.logprobs))


def scores_of(event: Scored, node_id: str, epoch: int) -> list[Scores]:
    key, entries = to_wire(event.key), list(event.logprobs)
    most = max(1, MESSAGE_BYTES // max(map(entry_bytes, entries)))
    return [
        Scores(node_id, epoch, key, event.first_pos + begin, entries[begin : begin + most])
        for begin in range(0, len(entries), most)
    ]


def tokens_of(node_id: str, epoch: int, runs: Sequence[TokenRun], ends: Sequence[SequenceEnd]) -> list[Tokens]:
    """Return messages of limited size: first all runs of tokens, then all ends of sequences."""
    items: list[tuple[TokenRun | SequenceEnd, int]] = [(run, run_bytes(run)) for run in runs]
    items += [(end, end_bytes(end)) for end in ends]
    messages, size = [Tokens(node_id, epoch, [], [])], 0
    for item, own in items:
        if size and size + own > MESSAGE_BYTES:
            messages.append(Tokens(node_id, epoch, [], []))
            size = 0
        size += own
        if isinstance(item, TokenRun):
            messages[-1].runs.append(item)
        else:
            messages[-1].ends.append(item)
    return messages


# Upper bounds of sizes in msgpack: a number takes at most nine bytes, an id at most five.


def run_bytes(run: TokenRun) -> int:
    return key_bytes(run.key) + 32 + 5 * len(run.ids) + sum(map(entry_bytes, run.logprobs))


def end_bytes(end: SequenceEnd) -> int:
    return key_bytes(end.key) + 64 + 4 * (len(end.reason) + len(end.error_code) + len(end.error_message))


def key_bytes(key: Key) -> int:
    return 48 + 4 * (len(key.router_id) + len(key.rid))


def entry_bytes(entry: TokenLogprob) -> int:
    return 16 + 14 * len(entry.top_ids)


def end_of(event: Ended) -> SequenceEnd:
    error = event.error
    return SequenceEnd(
        key=to_wire(event.key),
        reason=event.reason.value,
        num_output_tokens=event.num_output_tokens,
        cached_tokens=event.cached_tokens,
        error_code="" if error is None else error.code,
        error_message="" if error is None else error.message[:MAX_TEXT],  # the message may quote a peer
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
    """Join the bytes of host tensors of any dtype, in the order of the names. Return b"" without a drafter."""
    return b"".join(state[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(state))


def draft_state_of_bytes(data: bytes, future_map: FutureMap, *, peer_drafts: bool) -> dict[str, torch.Tensor]:
    """Return the draft state for this node's relay buffers; zeros if the peer has no draft head.

    Raise HandoffFailed if `data` has the wrong size.
    """
    extras = sorted(future_map.extras.items())
    sizes = [math.prod(buffer.shape[1:]) * buffer.dtype.itemsize for _, buffer in extras]
    wanted = sum(sizes) if peer_drafts else 0
    if len(data) != wanted:
        raise HandoffFailed(f"draft state of {len(data)} bytes, but {wanted} are needed")
    data = data or bytes(sum(sizes))
    state, begin = {}, 0
    for (name, buffer), size in zip(extras, sizes, strict=True):
        part = torch.frombuffer(bytearray(data[begin : begin + size]), dtype=buffer.dtype)
        state[name] = part.view(tuple(buffer.shape[1:]))
        begin += size
    return state


def drafts_within(state: Mapping[str, torch.Tensor], vocab_size: int) -> bool:
    """Return whether all drafts are valid ids, because an invalid input id would fail the step."""
    ids = state.get("topk_index")
    return ids is None or bool(((ids >= 0) & (ids < vocab_size)).all())
