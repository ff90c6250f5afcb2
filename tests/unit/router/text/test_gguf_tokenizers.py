"""Tokenizers of GGUF files against the programs that define them: SentencePiece and tiktoken, on 2,000 odd strings."""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from router.text import gguf_tokenizer, word_splits
from router.text.chat.interface import TextModel, decode_ids
from router.text.gguf_tokenizer import build_tokenizer, load_gguf
from router.text.sentencepiece_bpe import merges_of
from shared.config.models.vocab_bytes import byte_level_alphabet
from shared.config.models.vocabulary import gguf_eos_ids, gguf_special, gguf_vocabulary
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import ConfigError
from tests.support.bodies.odd_strings import odd_strings

ROOT = Path(__file__).resolve().parents[4]
STRINGS = odd_strings(2000, seed=1)
USER_DEFINED = ["▁▁", "▁▁▁", "\n", "\n\n", "\n\n\n", "<tag>"]  # Gemma has such entries for runs of spaces and newlines
CONTROL = ["<|im_end|>", "[INST]"]
NUM_RANKS = 20_000


def data_of_mistral(name: str) -> bytes:
    """A file of the package mistral-common, which is not imported."""
    found = importlib.util.find_spec("mistral_common")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mistral-common is not installed")
    return (Path(next(iter(found.submodule_search_locations))) / "data" / name).read_bytes()


def trained(has_prefix: bool) -> bytes:
    """A vocabulary of Llama's kind (a space before each text) or of Gemma's (none, and user-defined entries)."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pages = ("docs/engine.md", "docs/structure.md", "CONTRIBUTING.md")
    lines = [line for page in pages for line in (ROOT / page).read_text().splitlines() if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, "naïve café", "中文字符 日本語", "Привет"]),
        model_writer=model,
        vocab_size=1500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=has_prefix,
        user_defined_symbols=[] if has_prefix else USER_DEFINED,
        control_symbols=CONTROL,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


@functools.cache
def pieces_of(name: str) -> tuple[Any, dict[str, Any]]:
    """SentencePiece itself, and what a converter to GGUF writes of its model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    data = data_of_mistral("tokenizer.model.v1") if name == "mistral" else trained(name == "prefix")
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(data)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in proto.pieces],  # the numbers are the same
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": name != "gemma",
        "llama.context_length": 128,
    }
    return sentencepiece.SentencePieceProcessor(model_proto=data), metadata


def loaded(metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> TextModel:
    monkeypatch.setattr(gguf_tokenizer, "read_metadata", lambda path: metadata)
    return load_gguf(Path("made-up.gguf"), TextConfig())


@pytest.mark.parametrize("name", ["prefix", "gemma", "mistral"])
def test_pieces_are_those_of_sentencepiece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client's text, in which control tokens are spelled out, as they are to SentencePiece."""
    oracle, metadata = pieces_of(name)
    tokenizer = loaded(metadata, monkeypatch).tokenizer
    for text in STRINGS:
        ids = tokenizer.encode_pieces(["", text])
        assert ids == oracle.encode(text), text
        prefix = " " if name != "gemma" and text else ""
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == prefix + text.replace("▁", " ")


@pytest.mark.parametrize(
    ("scores", "last_type", "pieces"),
    [
        ([-2, -1, -3], 1, ["abc", "b"]),
        ([-1, -2, -3], 1, ["abc", "b"]),
        ([-2, -1, -3], 5, ["a", "bc", "b"]),  # an unused entry is never built out of a text's pieces
        ([-1, -2, -3], 5, ["ab", "c", "b"]),
    ],
)
def test_entries_are_joined_by_score(scores: list[int], last_type: int, pieces: list[str]) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b", "c", "ab", "bc", "abc"],
        "tokenizer.ggml.scores": [0, -9, -9, -9, *scores],
        "tokenizer.ggml.token_type": [2, *[1] * 5, last_type],
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert build_tokenizer(metadata).encode("abcb").tokens == pieces


def test_control_tokens_act_in_the_template_s_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each text between two of them begins with a space, as in llama.cpp and in Llama's own programs."""
    oracle, metadata = pieces_of("prefix")
    model = loaded(metadata, monkeypatch)
    assert model.tokenizer.facts.special_ids == frozenset(range(5))
    instruct, end = (metadata["tokenizer.ggml.tokens"].index(name) for name in ("[INST]", "<|im_end|>"))
    wanted = [1, *oracle.encode("a [INST]"), instruct, *oracle.encode("it is"), end]
    assert model.tokenizer.encode_pieces(["<s>", "a [INST]", "[INST]it is<|im_end|>"]) == wanted
    assert decode_ids(model.tokenizer, wanted) == " a [INST] it is"


@pytest.mark.parametrize(
    ("change", "begins", "ends"),
    [({}, True, False), ({"add_bos_token": False}, False, False), ({"add_eos_token": True}, True, True)],
)
def test_tokens_around_a_text(
    change: dict[str, bool], begins: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, metadata = pieces_of("prefix")
    metadata = metadata | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    tokenizer = loaded(metadata, monkeypatch).tokenizer
    text = oracle.encode("a text")
    assert tokenizer.encode("a text", add_special=True) == [1] * begins + text + [2] * ends
    assert tokenizer.encode("a text", add_special=False) == text


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_older_byte_level_files_do_not_say_how_a_text_begins(
    pre: str, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = ranked({bytes((byte,)): byte for byte in range(256)}, pre)
    ids = loaded(metadata, monkeypatch).tokenizer.encode("a", add_special=True)
    assert ids == [256] * begins + [ord("a")]


def test_phi3_s_control_tokens_take_the_spaces_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, metadata = pieces_of("prefix")
    text = "[INST]\n \nit is<s> a"
    end = oracle.encode("it is"), [1], oracle.encode(" a")
    instruct = metadata["tokenizer.ggml.tokens"].index("[INST]")
    for arch, middle in (("phi3", []), ("llama", oracle.encode("\n \n"))):
        tokenizer = loaded(metadata | {"general.architecture": arch}, monkeypatch).tokenizer
        whole = [instruct, *oracle.encode("\n \nit is" if middle else "it is"), *end[1], *end[2]]
        assert tokenizer.encode(text, add_special=False) == whole


def test_the_end_of_a_turn_ends_an_answer() -> None:
    """Phi 3's files name only the end of a document."""
    tokens = ["<s>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "text"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 1}
    assert gguf_eos_ids(metadata | {"tokenizer.ggml.token_type": [3, 3, 3, 1, 1]}) == (1, 2)
    assert gguf_eos_ids(metadata) == (1,)


def test_marks_of_turns_are_never_text() -> None:
    """Old files call them user-defined, so a message could end its own turn."""
    tokens = ["<s>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 4, 4, 4]}
    assert gguf_special(metadata) == tokens[:3] and gguf_eos_ids(metadata) == (2,)


@pytest.mark.parametrize("name", ["prefix", "gemma"])
def test_grammars_and_routers_read_the_same_bytes(name: str, tmp_path: Path) -> None:
    _, metadata = pieces_of(name)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_context_length(128)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_scores(metadata["tokenizer.ggml.scores"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    vocabulary = gguf_vocabulary(tmp_path / "x.gguf")
    tokenizer = load_gguf(tmp_path / "x.gguf", TextConfig()).tokenizer
    assert vocabulary.tokens == tuple(map(tokenizer.token_bytes, range(1500)))
    assert vocabulary.special_ids == tokenizer.facts.special_ids and vocabulary.eos_ids == tokenizer.facts.eos_ids
    assert {b" ", b"\n", b"\xc3"} <= set(vocabulary.tokens) and (b"  " in vocabulary.tokens) == (name == "gemma")


@functools.cache
def tekken() -> tuple[str, dict[bytes, int]]:
    """Mistral's pattern, and the first ranks of its vocabulary, which is a vocabulary too."""
    described = json.loads(data_of_mistral("tekken_240718.json"))
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in described["vocab"][:NUM_RANKS]}
    return described["config"]["pattern"], ranks


def ranked(ranks: dict[bytes, int], pre: str) -> dict[str, Any]:
    """What a converter to GGUF writes of a vocabulary of tiktoken's kind."""
    spelled = {byte: char for char, byte in byte_level_alphabet().items()}
    tokens = ["".join(spelled[byte] for byte in token) for token in ranks]
    merges = merges_of({token: -rank for token, rank in zip(tokens, ranks.values(), strict=True)})
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|begin_of_text|>"],
        "tokenizer.ggml.token_type": [*[1] * len(tokens), 3],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "llama.context_length": 128,
    }


@functools.cache
def patterns() -> dict[str, str]:
    """The patterns of transformers, and Mistral's own."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return {**GGUF_PRE_TOKENIZER_SPLITS, "tekken": tekken()[0]}


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_words_are_those_of_tiktoken(pre: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    _, ranks = tekken()
    oracle = tiktoken.Encoding(pre, pat_str=patterns()[pre], mergeable_ranks=ranks, special_tokens={})
    built = build_tokenizer(ranked(ranks, pre))
    built.normalizer = tokenizers.normalizers.Sequence([])  # Qwen's NFC is none of tiktoken's
    for text in STRINGS:
        assert built.encode(text, add_special_tokens=False).ids == oracle.encode_ordinary(text), text


def test_each_name_stands_for_the_pattern_that_it_has_elsewhere() -> None:
    ours = {name: by_name for name in word_splits.SPLITS if (by_name := str(word_splits.pre_tokenizer(name)))}
    theirs = patterns()
    for name, other in ((one, two) for one in ours for two in ours):
        assert (ours[name] == ours[other]) == (theirs[name] == theirs[other]), (name, other)


def test_a_vocabulary_without_its_lists_is_refused() -> None:
    whole = ranked({b"a": 0}, "gpt-2")
    for missing in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        with pytest.raises(ConfigError, match=f"lacks {missing}"):
            build_tokenizer({name: value for name, value in whole.items() if name != missing})
