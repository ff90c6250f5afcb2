"""Which fields of two fingerprints keep their nodes from being a pair."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from shared.wire import fitting
from shared.wire.codec import decode, encode
from shared.wire.fitting import NO_DRAFT_STATE, REPORTED_ONLY, misfit
from shared.wire.messages import Fingerprint, Hello
from tests.support.wire.wire_samples import MESSAGES

FIELDS = Fingerprint.__struct_fields__
OURS = Fingerprint(
    protocol=700,
    numerics=300,
    model="some model",
    weights="its weights",
    dtype="bfloat16",
    page_size=1024,
    page_layout="kv;draft",
    spec="eagle",
    build="some build",
    grammar="some grammar",
)
HEADLESS = msgspec.structs.replace(OURS, page_layout="kv", spec=NO_DRAFT_STATE)


def test_equal_fields_fit_whoever_made_them() -> None:
    """A peer's fingerprint has come over the wire."""
    hello = next(message for message in MESSAGES if isinstance(message, Hello))
    told = decode(encode(msgspec.structs.replace(hello, fingerprint=OURS)))
    assert isinstance(told, Hello)
    theirs = told.fingerprint
    assert not any(getattr(theirs, name) is getattr(OURS, name) for name in FIELDS), "equal, and not the same"
    assert misfit(OURS, theirs) is None and misfit(theirs, OURS) is None


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_differs_is_named_wherever_it_stands(name: str) -> None:
    """A field that is only reported keeps nobody apart."""
    other = 1 if isinstance(getattr(OURS, name), int) else "other"
    theirs = msgspec.structs.replace(OURS, **{name: other})
    assert misfit(OURS, theirs) == misfit(theirs, OURS) == (None if name in REPORTED_ONLY else name)


def test_a_headless_prefill_node_fits_a_head_but_not_vice_versa() -> None:
    assert misfit(HEADLESS, OURS) is None
    assert misfit(OURS, HEADLESS) == "page_layout"


@pytest.mark.parametrize("order", [FIELDS, FIELDS[::-1]], ids=["as it is", "the other way round"])
def test_a_head_that_is_lacking_excuses_no_other_field(order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stands: fields are added in time."""
    monkeypatch.setattr(fitting, "Fingerprint", SimpleNamespace(__struct_fields__=order))
    assert misfit(HEADLESS, OURS) is None
    for name in ("weights", "page_size"):
        other = 1 if isinstance(getattr(OURS, name), int) else "other"
        assert misfit(msgspec.structs.replace(HEADLESS, **{name: other}), OURS) == name
