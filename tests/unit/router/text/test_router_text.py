"""Detokenizer and stop strings: whatever the pieces are, the text is the one of the whole."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text.chat.interface import VocabFacts, decode_ids
from router.text.detokenizer import Detokenizer
from router.text.stops import StopMatcher


class PieceTokenizer:
    """Token i stands for the i-th string of bytes; the last token is special."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [*pieces, b"<end>"]
        self.facts = VocabFacts(len(self.pieces), (len(pieces),), frozenset({len(pieces)}), 100)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        raise AssertionError("only decoded here")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(st.text(), st.lists(st.integers(0, 1000), max_size=20))
def test_text_split_anywhere_comes_out_whole_and_never_half(text: str, cuts: list[int]) -> None:
    pieces = cut(text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode(), cuts)
    tokenizer = PieceTokenizer(pieces)
    detokenizer = Detokenizer(tokenizer)
    whole = b"".join(pieces).decode()
    shown = ""
    for token in range(len(pieces)):
        shown += detokenizer.feed(token)
        assert whole.startswith(shown)  # so no U+FFFD that is not in the text itself
    assert shown == whole


# The beginning of a surrogate half is two characters for one who decodes it alone, and is held back as one.
@example(b"\xed\xa0", [])
@given(st.binary(max_size=60), st.lists(st.integers(0, 1000), max_size=20))
def test_any_bytes_decode_as_if_at_once(data: bytes, cuts: list[int]) -> None:
    pieces = cut(data, cuts)
    tokenizer = PieceTokenizer(pieces)
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.feed(token) for token in range(len(pieces)))
    assert text == decode_ids(tokenizer, range(len(pieces)))
    whole = data.decode("utf-8", "replace")
    assert whole.startswith(text)
    held = whole.removeprefix(text)
    assert any(held == data[len(data) - n :].decode("utf-8", "replace") for n in range(4)), "no more than a character"
    assert set(held) <= {"\ufffd"}


def test_special_tokens_show_nothing() -> None:
    tokenizer = PieceTokenizer([b"a"])
    assert Detokenizer(tokenizer).feed(1) == ""
    assert decode_ids(tokenizer, [0, 1, 0]) == "aa"


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string to be complete wins, the longest of those."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


SMALL = st.text(alphabet="ab🦜", max_size=12)


@settings(max_examples=400)
@given(st.lists(SMALL, max_size=6), st.lists(SMALL.filter(bool), max_size=4))
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
    shown += matcher.flush()
    assert (shown, matcher.matched) == reference("".join(pieces), stops)


@settings(max_examples=400)
@given(st.lists(SMALL, max_size=6), st.lists(SMALL.filter(bool), min_size=1, max_size=4))
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = fed = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        fed += piece
        if matcher.matched is None:
            held = fed[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)
            assert not any(len(stop) > len(tail) > len(held) and stop.startswith(tail)
                           for stop in stops for tail in [fed[-n:] for n in range(1, len(fed) + 1)])  # fmt: skip
