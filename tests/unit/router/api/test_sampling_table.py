"""The table of sampling parameters agrees with itself; what derives from it is tested where it is."""

from __future__ import annotations

from dataclasses import fields

from router.api.fields.fields import GenerationFields
from shared.core.sampling_params import NEUTRAL, NUMBERS, PARAMETERS, SamplingParams


def test_neutral_values_are_allowed_and_the_other_ones_too() -> None:
    for one in PARAMETERS:
        assert one.neutral is None or one.kind not in (int, float) or one.nodes.hold(one.neutral), one.name
        for bounds in (one.nodes, one.clients):
            assert bounds is None or one.other is None or bounds.hold(one.other), one.name
    assert all(type(one.neutral) is type(one.other) is one.kind and one.neutral != one.other for one in NUMBERS)


def test_a_request_without_parameters_is_neutral() -> None:
    assert SamplingParams(1).values == NEUTRAL
    assert [getattr(SamplingParams(1), one.name) for one in PARAMETERS[1:]] == [one.neutral for one in PARAMETERS[1:]]


def test_what_clients_may_set_is_described() -> None:
    """Models' own values are parameters that clients may set."""
    asked = {one.name for one in PARAMETERS if one.clients}
    assert all(one.about for one in PARAMETERS if one.name in asked)
    assert {one.name for one in fields(NEUTRAL)} < asked < set(GenerationFields.__struct_fields__)
