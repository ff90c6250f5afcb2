"""A tiktoken.model without a tokenizer.json, as Kimi's repositories have it, against tiktoken itself."""

from __future__ import annotations

import base64
import functools
import json
from pathlib import Path

import pytest

from router.text.folder_tokenizer import load_folder
from shared.config.models.tokenizer_file import read_tokenizer
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import ConfigError
from tests.support.bodies.odd_strings import odd_strings

STRINGS = odd_strings(2000, seed=5)
# as the repositories' tokenization_kimi.py says it, quoted by several programs that read them
HAN = r"[\p{Han}]+"
SMALL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
CAPITAL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERN = "|".join((HAN, SMALL + ENDING, CAPITAL + ENDING, REST))
NAMED = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<|tool_calls_section_begin|>": False}


NUM_RANKS = 600


@functools.cache
def ranks() -> dict[bytes, int]:
    """All bytes, then the most frequent neighbours of some strings, merged one after another."""
    words = [[bytes([byte]) for byte in text.encode()] for text in STRINGS[200:700] if "<|" not in text]
    found = {bytes([byte]): byte for byte in range(256)}
    while len(found) < NUM_RANKS:
        pairs: dict[bytes, int] = {}
        for word in words:
            for left, right in zip(word, word[1:], strict=False):
                pairs[left + right] = pairs.get(left + right, 0) + 1
        best = max((pair for pair in pairs if pair not in found), key=lambda pair: (pairs[pair], pair))
        found[best] = len(found)
        words = [merged(word, best) for word in words]
    return found


def merged(word: list[bytes], token: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and out[-1] + part == token:
            out[-1] = token
        else:
            out.append(part)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, found = tmp_path_factory.mktemp("kimi"), ranks()
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in found.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    config = {"model_type": "kimi_k2", "vocab_size": len(found) + 260, "max_position_embeddings": 64, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    named = {
        str(len(found) + 2 * number): {"content": content, "special": special}
        for number, (content, special) in enumerate(NAMED.items())
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    return folder


def test_ids_are_those_of_tiktoken(folder: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    found, first = ranks(), NUM_RANKS
    special = {f"<|reserved_token_{index}|>": index for index in range(first, first + 256)}
    for number, content in enumerate(NAMED):
        del special[f"<|reserved_token_{first + 2 * number}|>"]
        special[content] = first + 2 * number
    oracle = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=found, special_tokens=special)
    built = read_tokenizer(folder).inner
    for text in (*STRINGS, *(f"{text}<|im_end|>[EOS]{text}<|reserved_token_601|>" for text in STRINGS[:200])):
        assert built.encode(text).ids == oracle.encode(text, allowed_special="all"), text
        assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text


def test_a_router_reads_it(folder: Path) -> None:
    model = load_folder(folder, TextConfig())
    assert model.tokenizer.facts.vocab_size == 860 and 604 in model.tokenizer.facts.special_ids
    assert 606 not in model.tokenizer.facts.special_ids, "a reader of calls needs this token's text"


def test_words_of_unknown_types_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(ConfigError, match=r"how unheard cuts words .*: put a tokenizer.json into the folder"):
        read_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}')
    assert read_tokenizer(tmp_path).inner.get_vocab_size() == read_tokenizer(folder).inner.get_vocab_size()


@pytest.mark.parametrize(
    ("text", "reason"),
    [("YQ== 0\nYg== 2\n", "ranks are not 0, 1, 2"), ("YQ==\n", "can't be used"), ("é 0\n", "can't be used")],
)
def test_a_broken_file_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text(text)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    with pytest.raises(ConfigError, match=reason):
        read_tokenizer(tmp_path)


def test_a_reserved_token_that_is_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n")
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    named = {"added_tokens_decoder": {"1": {"content": "a", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(ConfigError, match='the token "a" is there twice'):
        read_tokenizer(tmp_path)
