"""Names, digests and slots of a node's adapters."""

from __future__ import annotations

import pytest

from shared.core.adapter_table import MAX_ADAPTERS, AdapterTable
from shared.core.errors import ConfigError
from shared.core.page_identity import LONG


def test_slots_are_those_of_the_start_and_spare_ones() -> None:
    table = AdapterTable([("a", "x"), ("b", "y")], num_spare=1)
    assert [table.slot(digest) for digest in ("", "x", "y")] == [0, 1, 2]
    assert table.add("c", "z") == table.slot("z") == 3
    assert table.named == {"a": "x", "b": "y", "c": "z"}
    with pytest.raises(ConfigError, match="all 3 slots"):
        table.add("d", "w")
    assert not table.serves("w") and "d" not in table.named
    with pytest.raises(ValueError, match="w"):
        table.slot("w")


def test_a_removed_adapter_keeps_its_slot_until_it_is_free() -> None:
    table = AdapterTable([("a", "x")], num_spare=1)
    assert table.remove_name("a") == "x" and table.remove_name("a") == ""
    assert table.holds("x") and not table.serves("x") and table.leaving == ["x"]
    assert table.add("a", "y") == 2, "the old weights' slot is not free yet"
    assert table.free("x") == [1] and not table.holds("x") and table.leaving == []
    assert table.add("b", "z") == 1


def test_a_name_has_one_digest_and_a_digest_may_have_two_names() -> None:
    table = AdapterTable(num_spare=2)
    assert [table.add("a", "x"), table.add("a", "x"), table.add("b", "x")] == [1, 0, 0]
    with pytest.raises(ConfigError, match="a has other weights"):
        table.add("a", "y")
    table.remove_name("a")
    assert table.serves("x") and table.leaving == []
    table.remove_name("b")
    assert table.leaving == ["x"]
    assert table.add("c", "x") == 0 and table.leaving == [], "it is back before its slot was free"


def test_there_are_no_more_adapters_than_a_hello_lists() -> None:
    with pytest.raises(ConfigError, match="at most 256"):
        AdapterTable([("a", "x")], num_spare=MAX_ADAPTERS)
    table = AdapterTable((str(n), "x") for n in range(MAX_ADAPTERS))
    with pytest.raises(ConfigError, match="remove one first"):
        table.add("one more", "x")


def test_longer_texts_have_a_slot_and_no_name() -> None:
    table = AdapterTable(short_context=64)
    assert (table.slot(""), table.slot(LONG)) == (0, 1) and table.holds(LONG)
    assert not table.serves(LONG), "a client can't ask for it"
    assert not table.named and not table.leaving
    assert not AdapterTable().holds(LONG)
