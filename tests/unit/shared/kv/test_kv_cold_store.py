"""ColdStore: what is stored comes back or is refused; memory, then a file, both bounded; nobody else opens the file."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import numpy as np
import pytest

from shared.core.errors import ConfigError, IntegrityError
from shared.core.page_identity import ROOT, child_identity, identities
from shared.kv.cold_store import ColdStore
from tests.support.cores.books import check_books

PAGE = 96


def page_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE, dtype=np.uint8)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(store: ColdStore, *numbers: int) -> None:
    for number in numbers:
        store.store(store.add_page(name(number)), page_of(number))


def get(store: ColdStore, number: int) -> np.ndarray | None:
    cold = store.find(name(number))
    if cold is None:
        return None
    page = np.zeros(PAGE, np.uint8)
    store.load(cold, cold.place, page)
    return page


def known(store: ColdStore, numbers: range) -> list[int]:
    return [number for number in numbers if name(number) in store]


def test_what_was_asked_for_last_stays_longest() -> None:
    store = ColdStore(PAGE, 3)
    put(store, 0, 1, 2)
    store.find(name(0))
    put(store, 3)
    assert known(store, range(4)) == [0, 2, 3], "1 was the oldest"


def test_random_use_never_gives_another_page() -> None:
    rng, store = random.Random(3), ColdStore(PAGE, 4, 6)
    found = 0
    for _ in range(600):
        number = rng.randrange(16)
        page = get(store, number)
        found += page is not None
        assert page is None or np.array_equal(page, page_of(number))
        if page is None:
            put(store, number)
    check_books(store)
    assert found > 200 and len(store) == 10
    store.close()


def test_places_are_read_in_the_order_of_the_books() -> None:
    """A load that was asked for before its place was given away is run before the copy into it."""
    store = ColdStore(PAGE, 1, 1)
    put(store, 0)
    cold = store.find(name(0))
    assert cold is not None
    place, page = cold.place, np.zeros(PAGE, np.uint8)
    filing = store.add_page(name(1))
    assert filing.demoted == (place, cold.place) and cold.place != place
    store.load(cold, place, page)
    store.store(filing, page_of(1))
    assert np.array_equal(page, page_of(0)) and np.array_equal(get(store, 0), page_of(0))
    store.close()


@pytest.mark.parametrize("place", ["memory", "file"])
def test_other_bytes_than_were_stored_are_refused(place: str) -> None:
    store = ColdStore(PAGE, 1, 2)
    put(store, 0, 1)
    if place == "memory":
        store._memory[0, 7] ^= 1
    else:
        os.pwrite(store._file, b"x" * PAGE, 0)  # type: ignore[arg-type]
        os.pwrite(store._file, b"x" * PAGE, PAGE)  # type: ignore[arg-type]
    number = 1 if place == "memory" else 0
    with pytest.raises(IntegrityError, match="not what was stored"):
        get(store, number)
    cold = store.find(name(number))
    assert cold is not None
    store.drop(name(number), cold)
    assert known(store, range(2)) == [1 - number]
    put(store, number)
    store.drop(name(number), cold)
    assert name(number) in store, "another page has that identity now"
    check_books(store)
    store.close()


def test_a_full_disk_loses_the_demoted_page_only() -> None:
    store = ColdStore(PAGE, 1, 2)
    put(store, 0)
    descriptor, store._file = store._file, os.open("/dev/full", os.O_WRONLY)
    put(store, 1)
    os.close(store._file)
    store._file = descriptor
    assert np.array_equal(get(store, 1), page_of(1))
    with pytest.raises(IntegrityError):
        get(store, 0)
    store.close()


def test_the_file_has_no_name_and_is_for_its_owner_only(tmp_path: Path) -> None:
    store = ColdStore(PAGE, 1, 5, str(tmp_path))
    info = os.fstat(store._file)  # type: ignore[arg-type]
    assert stat.S_IMODE(info.st_mode) == 0o600 and info.st_nlink == 0 and info.st_size == 5 * PAGE
    assert not list(tmp_path.iterdir())
    store.close()


def test_impossible_sizes_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no room for a page"):
        ColdStore(PAGE, 0, 5)
    with pytest.raises(ConfigError, match="no memory for"):
        ColdStore(PAGE, 1 << 50)
    with pytest.raises(ConfigError, match="offload-dir"):
        ColdStore(PAGE, 1, 5, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no room for"):
        ColdStore(PAGE, 1, 1 << 50, str(tmp_path))


def test_a_page_twice_is_a_mistake() -> None:
    store = ColdStore(PAGE, 2)
    put(store, 0)
    with pytest.raises(IntegrityError, match="already"):
        store.add_page(name(0))


def test_an_identity_is_that_of_all_keys_before() -> None:
    keys = np.arange(11, dtype=np.int64)
    first, second, tail = identities(keys.tobytes(), 4)
    assert (first, second) == tuple(identities(keys[:8].tobytes(), 4))
    assert tail != next(iter(identities(keys[8:].tobytes(), 4))), "the same keys elsewhere"
    assert list(identities(keys[:10].tobytes(), 4))[:2] == [first, second]
    assert len({*identities(keys[:10].tobytes(), 4), tail}) == 4, "a page that is not full is another page"
    assert child_identity(ROOT, keys[:4].tobytes()) == first
