"""A node says how likely a prompt was, in messages of a bounded size, ahead of the request's first token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.core.keys import RequestKey
from shared.core.sampling_params import MAX_TOP_LOGPROBS
from shared.node.records.convert import MESSAGE_BYTES, request_of, scores_of
from shared.sched.steps.events import Scored
from shared.wire.codec import encode
from shared.wire.messages import Offer, TokenLogprob
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.wire.wire_samples import MESSAGES
from tests.support.worlds.faulty_pair import LONG, job
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node, sibling

LENGTH = 70


def scored(num_top: int = 2) -> Job:
    return job(1, LENGTH, replace(LONG, prompt_logprobs=num_top))


@pytest.mark.parametrize(("role", "num_sequences"), [("prefill", 3), ("decode", 1)])
def test_one_node_scores_a_prompt_once_for_all_its_sequences(role: str, num_sequences: int) -> None:
    """The net asserts their order, and that no token of the same sequence comes first."""
    node = make_node(role, "n0", CoreKnobs(chunk_size=32))
    net = Net([node])
    key = net.generate(node, scored(), num_sequences=num_sequences)
    net.run()
    assert {of: len(entries) for of, entries in net.router.scores.items()} == {key: LENGTH - 1}
    assert all(len(own.top_ids) == 2 for own in net.router.scores[key])
    for index in range(num_sequences):
        assert net.router.streams[sibling(key, index)] == expected(scored(), index)
    assert_clean(node)


def test_a_decode_node_does_not_rescore_a_recomputed_prompt() -> None:
    offer = next(message for message in MESSAGES if isinstance(message, Offer))
    assert offer.sampling.prompt_logprobs >= 0 and request_of(offer, 0, 0.0).first_unscored is None


@pytest.mark.parametrize("num_top", [0, MAX_TOP_LOGPROBS])
def test_no_message_is_large(num_top: int) -> None:
    worst = TokenLogprob(-1.25e-9, (2**31 - 1,) * num_top, (-3.3e38,) * num_top)
    event = Scored(RequestKey("r" * 200, 2**64 - 1, "x" * 200, 0, 0), 1, (worst,) * 8192)
    messages = scores_of(event, "n" * 200, 2**64 - 1)
    assert max(len(encode(message)) for message in messages) <= MESSAGE_BYTES + 2048
    assert sum(len(message.logprobs) for message in messages) == 8192
    edges = [message.first_pos for message in messages] + [8193]
    assert [edge + len(one.logprobs) for edge, one in zip(edges, messages, strict=False)] == edges[1:]
