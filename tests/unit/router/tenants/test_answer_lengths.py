"""How long a tenant's next answer is expected to be."""

from __future__ import annotations

import pytest

from router.requests.answer_lengths import FIRST_GUESS, AnswerLengths
from router.requests.journal import OpenRequest
from router.requests.new_request import NewRequest
from router.tenants.tenant import EVERYBODY, Tenant
from shared.core.sampling_params import SamplingParams
from tests.support.worlds.router_rig import RouterRig

A, B = Tenant("a"), Tenant("b")


def ended(tenant: Tenant, *lengths: int) -> OpenRequest:
    asked = NewRequest([1], len(lengths), SamplingParams(max_tokens=1000), 0, tenant=tenant)
    request = OpenRequest("r", asked, 60.0)
    for sequence, length in zip(request.sequences, lengths, strict=True):
        sequence.ids = [1] * length
    return request


def test_a_tenant_s_own_answers_count_or_else_those_of_all() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(A) == FIRST_GUESS
    lengths.ended(ended(A, 50, 150))
    assert lengths.expected(A) == lengths.expected(B) == 100.0
    lengths.ended(ended(B, 1000))
    assert (lengths.expected(A), lengths.expected(B)) == (100.0, 1000.0)
    assert lengths.expected(Tenant("new")) == pytest.approx(190.0)


def test_nodes_can_tell_tenants_apart() -> None:
    rig = RouterRig()
    rig.join("decode", "d")
    numbers = [rig.open(tenant=tenant)[0].tenant for tenant in (A, B, A, EVERYBODY)]
    assert numbers[0] == numbers[2] and len(set(numbers)) == 3 and numbers[3] == 0


def test_recent_answers_count_most() -> None:
    lengths = AnswerLengths()
    for length in [10] * 50 + [500] * 50:
        lengths.ended(ended(A, length))
    assert lengths.expected(A) == pytest.approx(500.0, abs=5.0)


def test_a_request_costs_what_its_tenant_s_answers_took() -> None:
    rig = RouterRig()
    node = rig.join("decode", "d")
    (first,) = rig.open(max_tokens=2000)
    assert rig.journal.all()[0].cost == 3 + FIRST_GUESS
    rig.run(node, first.key, 0, [1] * 20)
    rig.end(node, first.key, 20)
    for max_tokens, expected in ((2000, 20), (5, 5)):
        rig.open(n=2, max_tokens=max_tokens)
        assert rig.journal.all()[-1].cost == 3 + 2 * expected


def test_an_answer_that_was_broken_off_says_nothing_of_lengths() -> None:
    rig = RouterRig()
    node = rig.join("decode", "d")
    (first,) = rig.open(max_tokens=2000)
    rig.run(node, first.key, 0, [1])
    rig.dispatcher.cancel([first.key.rid], rig.now)
    rig.open(max_tokens=2000)
    assert rig.journal.all()[-1].cost == 3 + FIRST_GUESS
