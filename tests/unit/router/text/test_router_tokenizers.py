"""Tokenizers built from GGUF metadata and from Hugging Face folders, against the libraries' own."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from router.text import gguf_tokenizer, word_splits
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel, decode_ids
from router.text.folder_tokenizer import load_folder
from router.text.gguf_tokenizer import load_gguf
from router.text.load import load_text_model
from shared.config.models.gguf_metadata import read_pairs
from shared.config.models.model_path import bundled_gguf
from shared.config.models.shipped_model import SYSTEM, TEMPLATES_SYSTEM, with_system
from shared.config.models.vocabulary import folder_vocabulary
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import ConfigError
from tests.support.bodies.rendered import chat_text

CORPUS = ["the quick brown fox jumps over the dog 1234", "déjà vu, naïve café 🦜", "it's we're I'll\n\n x = y"] * 20


@pytest.fixture(scope="module")
def smollm2() -> TextModel:
    return load_text_model("smollm2")


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return gguf_tokenizer.read_metadata(bundled_gguf())


@pytest.fixture(scope="module")
def converted(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """What transformers makes of the same metadata. It does not cut numbers out of the text before the words, which
    the original of this model does: the same ids, but for spaces before a number."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    fields = {names.get(key, key): metadata[f"tokenizer.ggml.{key}"] for key in ("model", "pre", "tokens", "merges")}
    types = {"token_type": metadata["tokenizer.ggml.token_type"]}
    return convert_gguf_tokenizer("llama", fields | types)[0]


@settings(max_examples=200, deadline=None)
@given(st.text().filter(lambda text: not any(char.isnumeric() for char in text)))
def test_ids_are_those_of_transformers_for_any_text(
    smollm2: TextModel, converted: tokenizers.Tokenizer, text: str
) -> None:
    assert smollm2.tokenizer.encode(text, add_special=True) == converted.encode(text).ids


def test_a_long_text_is_tokenized_beside_other_threads(smollm2: TextModel) -> None:
    """Nobody is made to let go of Python's lock here, so another thread runs only where the library does."""
    order: list[str] = []
    begun, interval = threading.Lock(), sys.getswitchinterval()
    begun.acquire()

    def work() -> None:
        begun.release()
        order.append("begins")
        smollm2.tokenizer.encode("hello world " * 40_000, add_special=True)
        order.append("ends")

    sys.setswitchinterval(1000)
    try:
        worker = threading.Thread(target=work)
        worker.start()
        begun.acquire()
        order.append("another")
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert order == ["begins", "another", "ends"]


def test_numbers_are_cut_into_digits(smollm2: TextModel) -> None:
    ids = smollm2.tokenizer.encode("in 1984", add_special=True)
    assert [smollm2.tokenizer.token_bytes(i) for i in ids] == [b"in", b" ", b"1", b"9", b"8", b"4"]


def test_facts_of_the_default_model(smollm2: TextModel) -> None:
    facts = smollm2.tokenizer.facts
    assert (facts.vocab_size, facts.eos_ids, facts.context_length) == (49152, (2,), 8192)
    assert facts.special_ids == frozenset(range(17))
    assert decode_ids(smollm2.tokenizer, [2]) == ""


def test_the_default_model_has_our_system_prompt_alone(smollm2: TextModel) -> None:
    user = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    asked = Conversation([{"role": "user", "content": "U"}])
    assert chat_text(smollm2, asked) == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{user}"
    told = Conversation([{"role": "system", "content": "S"}, *asked.messages])
    assert chat_text(smollm2, told) == f"<|im_start|>system\nS<|im_end|>\n{user}"
    file = load_gguf(bundled_gguf(), TextConfig())  # any other name of the file keeps the file's own
    assert chat_text(file, asked) == f"<|im_start|>system\n{TEMPLATES_SYSTEM}<|im_end|>\n{user}"


def test_a_default_model_with_another_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="not the expected one"):
        with_system("{{ messages }}")


def byte_level(split: pre_tokenizers.PreTokenizer | None, normalizer: normalizers.Normalizer | None = None) -> Any:
    """A small byte-level BPE, trained here."""
    inner = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        inner.normalizer = normalizer
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, words]) if split is not None else words
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>", "<|im_end|>"], show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def as_metadata(inner: Any, pre: str, **more: Any) -> dict[str, Any]:
    described = json.loads(inner.to_str())["model"]
    vocab = sorted(described["vocab"], key=described["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if i < 3 else 1 for i in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(m) if isinstance(m, list) else m for m in described["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "llama.context_length": 128,
        **more,
    }


def isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


CUTS = {
    "gpt-2": (None, None),
    "qwen2": (word_splits.QWEN2_SPLIT, normalizers.NFC()),
    "llama-bpe": (word_splits.LLAMA3_SPLIT, None),
}


@pytest.mark.parametrize("pre", CUTS)
def test_each_way_to_cut_words(pre: str) -> None:
    pattern, normalizer = CUTS[pre]
    if pattern is None:
        original = byte_level(None)
    else:
        split = isolated(pattern)
        original = tokenizers.Tokenizer.from_str(byte_level(None, normalizer).to_str())
        loose = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        original.pre_tokenizer = pre_tokenizers.Sequence([split, loose])
    built = gguf_tokenizer.build_tokenizer(as_metadata(original, pre))
    for text in [*CORPUS[:3], "cafe\u0301 12345 67", "a  b\r\n c"]:
        assert built.encode(text, add_special_tokens=False).ids == original.encode(text, add_special_tokens=False).ids


def test_begin_token_where_the_model_wants_one(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = as_metadata(byte_level(None), "gpt-2", **{"tokenizer.ggml.add_bos_token": True})
    monkeypatch.setattr(gguf_tokenizer, "read_metadata", lambda path: metadata)
    model = gguf_tokenizer.load_gguf(Path("made-up.gguf"), TextConfig())
    assert model.tokenizer.encode("the", add_special=True)[0] == 0
    assert model.tokenizer.encode("<s>the", add_special=True).count(0) == 1
    assert model.tokenizer.encode("the", add_special=False)[0] != 0
    assert chat_text(model, Conversation([{"role": "user", "content": "x"}])) == "user: x assistant: "


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "of kind 'rwkv'; only byte-level BPE"),
        ({"tokenizer.ggml.model": "llama"}, "0 scores for its 324 entries"),
        ({"tokenizer.ggml.pre": "martian"}, "splits words .'martian'. is not known"),
        ({"tokenizer.ggml.pre": None}, "doesn't say how it splits words"),
    ],
)
def test_unknown_tokenizers_are_named(change: dict[str, str | None], named: str) -> None:
    metadata = as_metadata(byte_level(None), "gpt-2") | change
    with pytest.raises(ConfigError, match=named):
        gguf_tokenizer.build_tokenizer({key: value for key, value in metadata.items() if value is not None})


def test_metadata_are_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int64("a.i64", -(1 << 40))
    writer.add_float64("a.f64", 1.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "déjà 🦜")
    writer.add_array("a.strings", ["x", "", "ß"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(path).fields
    found = read_pairs(path, lambda name: name.startswith("a."))
    assert len(found) == 7 and found == {name: fields[name].contents() for name in found}


def test_a_gguf_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """Never a crash, and never a vocabulary that ends in the middle."""
    whole = bundled_gguf().read_bytes()[:400]
    path = tmp_path / "x.gguf"
    for size in [*range(1, 64), *range(64, 400, 37)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"x\.gguf"):
            gguf_tokenizer.read_metadata(path)
    for head in (b"GGUF" + b"\xff" * 64, b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\1" + b"\0" * 7 + b"\xff" * 40, b""):
        path.write_bytes(head)
        with pytest.raises(ConfigError, match=r"x\.gguf"):
            gguf_tokenizer.read_metadata(path)


def write_folder(folder: Path, inner: Any, *, own: dict[str, Any], config: dict[str, Any]) -> Path:
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **config}))
    return folder


def test_a_folder_with_byte_level_bpe(tmp_path: Path) -> None:
    inner = byte_level(None)
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}{{ raise_exception('no') if no }}"
    own = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    model = load_folder(write_folder(tmp_path, inner, own=own, config={"vocab_size": 512}), TextConfig())
    facts = model.tokenizer.facts
    assert (facts.vocab_size, facts.eos_ids, facts.special_ids) == (512, (1,), frozenset({0, 1, 2}))
    assert facts.context_length == 64
    text = "déjà vu 🦜 the fox"
    ids = model.tokenizer.encode(text, add_special=True)
    assert ids == inner.encode(text).ids and decode_ids(model.tokenizer, ids) == text
    assert model.tokenizer.token_bytes(511) == b""
    assert chat_text(model, Conversation([{"role": "user", "content": "x"}])) == "<s>x"


def test_a_folder_with_metaspace_and_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for entry in ("▁", "h", "i", "▁h", "hi", "▁hi"):
        vocab[entry] = len(vocab)
    merges = [("▁", "h"), ("h", "i"), ("▁", "hi")]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    config = {"eos_token_id": 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    model = load_folder(write_folder(tmp_path, inner, own={}, config=config), TextConfig())
    ids = model.tokenizer.encode("hi 🦜", add_special=True)
    assert ids[0] == 1 and model.tokenizer.facts.eos_ids == (2, 0)
    assert decode_ids(model.tokenizer, ids) == " hi 🦜"
    assert model.tokenizer.encode("hi", add_special=False) == [vocab["▁h"], vocab["i"]]


def test_added_tokens_are_decoded_as_the_library_decodes(tmp_path: Path) -> None:
    """Gemma 3 has its indents among the added tokens."""
    vocab = {entry: i for i, entry in enumerate(["<unk>", "</s>", "<mask>", "▁", "▁▁", "▁▁▁", "a", "\n"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁"), ("▁▁", "▁")], unk_token="<unk>"))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken("</s>", normalized=False)])
    inner.add_tokens([AddedToken(entry, normalized=False) for entry in ("<mask>", "▁▁", "▁▁▁")])
    folder = write_folder(tmp_path, inner, own={}, config={})
    tokenizer = load_folder(folder, TextConfig()).tokenizer
    ids = tokenizer.encode("a\n  a\n   a<mask>", add_special=False)
    assert vocab["▁▁"] in ids and vocab["▁▁▁"] in ids
    assert decode_ids(tokenizer, ids) == inner.decode(ids) == "a\n  a\n   a<mask>"
    assert folder_vocabulary(folder).tokens == tuple(map(tokenizer.token_bytes, range(len(vocab))))


def test_added_tokens_of_byte_level_are_plain_text(tmp_path: Path) -> None:
    inner = byte_level(None)
    inner.add_tokens(["Ġé", "▁"])
    folder = write_folder(tmp_path, inner, own={}, config={})
    tokenizer = load_folder(folder, TextConfig()).tokenizer
    assert decode_ids(tokenizer, tokenizer.encode("Ġé ▁", add_special=False)) == "Ġé ▁"
    assert "Ġé".encode() in folder_vocabulary(folder).tokens


def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    """tokenizer.json keeps these settings of a training."""
    inner = byte_level(None)
    ids = inner.encode("the quick brown fox").ids
    inner.enable_truncation(max_length=3)
    inner.enable_padding(length=40)
    tokenizer = load_folder(write_folder(tmp_path, inner, own={}, config={}), TextConfig()).tokenizer
    assert tokenizer.encode("the quick brown fox", add_special=True) == ids
    assert tokenizer.encode_pieces(["the quick", " brown", " fox"]) == ids


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_folder_that_lacks_something_is_told(tmp_path: Path, missing: str) -> None:
    write_folder(tmp_path, byte_level(None), own={}, config={})
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json|max_position_embeddings"):
        load_folder(tmp_path, TextConfig())


def test_broken_json_is_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(None), own={}, config={})
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_folder(folder, TextConfig())
