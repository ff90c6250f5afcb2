from __future__ import annotations

from shared.core.latest import Latest


def test_what_was_made_of_an_object_is_made_once() -> None:
    made: list[list[int]] = []

    def make(source: list[int]) -> list[int]:
        made.append(source)
        return [2 * number for number in source]

    latest, first, equal = Latest(make), [1, 2], [1, 2]
    assert latest(first) is latest(first)
    assert made == [first]
    assert latest(equal) == [2, 4]
    assert len(made) == 2, "another object, though it is equal"
    latest(first)
    assert len(made) == 3, "only the newest is kept"
