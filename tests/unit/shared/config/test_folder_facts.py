"""Routers and nodes know the same of a folder's model: one reader, which agrees with the library transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models
from transformers import AutoConfig

from router.text.folder_tokenizer import load_folder
from shared.config.models.family_defaults import FAMILY_DEFAULTS
from shared.config.models.folder_facts import ANY_LENGTH, FolderFacts, facts_of
from shared.config.models.model_folder import read_folder
from shared.config.models.vocabulary import folder_vocabulary
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import ConfigError
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from tests.support.models import library_wrappers
from tests.support.models.library_families import FAMILIES, NESTED, SIZES, VOCAB, save, write_tokenizer
from tests.support.models.tiny_llama import FAMILIES as TINY_FAMILIES
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.models.tiny_t5 import VOCAB as T5_VOCAB
from tests.support.models.tiny_t5 import write_tiny_t5

FLAT = ("chameleon", "mistral4")  # have their fields in no part
# As published, without the numbers that are the library's defaults.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
LLAMA = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read_facts(folder: Path) -> FolderFacts:
    return facts_of(read_folder(folder))


def assert_the_library_agrees(folder: Path) -> None:
    facts, text = read_facts(folder), AutoConfig.from_pretrained(folder).get_text_config()
    assert (facts.vocab_size, facts.context_length) == (text.vocab_size, text.max_position_embeddings)


def assert_routers_agree(folder: Path, **loading: Any) -> None:
    """What a router reads is what a node reads for grammars, and what the loaded model has."""
    said, facts, vocabulary = load_folder(folder, TextConfig()).tokenizer, read_facts(folder), folder_vocabulary(folder)
    spec = load_model(str(folder), LoadOptions("float32", **loading)).spec
    assert said.facts.vocab_size == len(vocabulary.tokens) == spec.vocab_size == facts.vocab_size
    assert said.facts.eos_ids == vocabulary.eos_ids == spec.eos_ids == facts.eos_ids != ()
    assert said.facts.special_ids == vocabulary.special_ids != frozenset()
    assert said.facts.context_length == facts.context_length >= spec.max_context
    assert [said.token_bytes(i) for i in range(spec.vocab_size)] == list(vocabulary.tokens)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_s_facts_are_the_library_s(family: str, tmp_path: Path) -> None:
    fields = SIZES | FAMILIES[family]
    if family in NESTED:
        fields = NESTED[family] | {"text_config": fields}
    transformers.CONFIG_MAPPING[family](**fields).save_pretrained(tmp_path)
    assert_the_library_agrees(tmp_path)
    facts = read_facts(tmp_path)
    assert (facts.vocab_size, facts.eos_ids, facts.start_ids) == (VOCAB, (2,), ())


@pytest.mark.parametrize("wrapper", [name for name in library_wrappers.WRAPPERS if name not in FLAT])
def test_a_wrapper_s_facts_are_those_of_its_text_part(wrapper: str, tmp_path: Path) -> None:
    """The whole says another size, as LLaVA does; and the text part's own end."""
    written = library_wrappers.wrapper_config(wrapper).to_dict() | {
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    written["text_config"] |= {"max_position_embeddings": 888, "eos_token_id": 9}
    folder = write(tmp_path, written)
    assert_the_library_agrees(folder)
    facts = read_facts(folder)
    assert (facts.vocab_size, facts.context_length, facts.eos_ids) == (VOCAB, 888, (9,))


def test_values_that_a_folder_leaves_out_are_the_library_s(tmp_path: Path) -> None:
    """Of every family that is served, as the text part of a wrapper and alone, and of what Google published."""
    for name in FAMILY_DEFAULTS:
        text = transformers.CONFIG_MAPPING[name]().get_text_config()
        assert FAMILY_DEFAULTS[name] == (text.vocab_size, text.max_position_embeddings), name
    parts = {transformers.CONFIG_MAPPING[name]().get_text_config().model_type for name in library_wrappers.WRAPPERS}
    assert {*FAMILIES, *library_wrappers.WRAPPERS, *parts, "step3p5"} == FAMILY_DEFAULTS.keys()
    published = write(tmp_path / "gemma", GEMMA_3_4B)
    assert_the_library_agrees(published)
    facts = read_facts(published)
    assert (facts.vocab_size, facts.context_length, facts.eos_ids) == (262208, 131072, (1, 106))
    for name, config in {
        "whole": {"model_type": "gemma3", "text_config": {}},
        "alone": {"model_type": "qwen2"},
    }.items():
        assert_the_library_agrees(write(tmp_path / name, config))


def test_a_whole_says_what_its_text_part_leaves_out(tmp_path: Path) -> None:
    config = {"model_type": "new", "text_config": {"model_type": "new_text"}, "vocab_size": 50, "n_positions": 60}
    facts = read_facts(write(tmp_path, config))
    assert (facts.vocab_size, facts.context_length) == (50, 60)


def test_a_text_ends_where_dual_chunks_would_begin(tmp_path: Path) -> None:
    """Qwen2.5-1M's own code has it; the library doesn't."""
    chunks = {"dual_chunk_attention_config": {"chunk_size": 30, "original_max_position_embeddings": 40}}
    facts = read_facts(write(tmp_path, {"model_type": "qwen2", "max_position_embeddings": 90} | chunks))
    assert facts.context_length == 40


@pytest.mark.parametrize("kind", ["gemma3", "step3p7", "qwen2"])
def test_routers_and_nodes_read_the_same_facts(kind: str, tmp_path: Path) -> None:
    """The vocabularies are padded: the embedding has more rows than the tokenizer has tokens."""
    (library_wrappers.save_wrapper if kind == "gemma3" else save)(kind, tmp_path, vocab_size=VOCAB + 20)
    write_tokenizer(tmp_path)
    assert_routers_agree(tmp_path, library="transformers")
    assert read_facts(tmp_path).vocab_size == VOCAB + 20


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_routers_and_our_program_read_the_same_facts(family: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, family=family, vocab=VOCAB + 20)
    write_tokenizer(tmp_path)
    assert_routers_agree(tmp_path)


def test_routers_and_nodes_read_the_same_facts_of_t5(tmp_path: Path) -> None:
    write_tiny_t5(tmp_path)
    facts, vocabulary = load_folder(tmp_path, TextConfig()).tokenizer.facts, folder_vocabulary(tmp_path)
    spec = load_model(str(tmp_path), LoadOptions("float32")).spec
    assert facts.vocab_size == len(vocabulary.tokens) == spec.vocab_size == T5_VOCAB
    assert facts.eos_ids == vocabulary.eos_ids == spec.eos_ids == (1,)
    assert (facts.start_ids, facts.context_length) == ((0,), ANY_LENGTH)


@pytest.mark.parametrize(
    ("generation", "whole", "part", "ends"),
    [
        ({"eos_token_id": [7, 8]}, 5, 6, (7, 8)),
        ({"eos_token_id": 7}, 5, 6, (7,)),
        ({"eos_token_id": None}, [5, 4], 6, (5, 4)),
        ({}, None, 6, (6,)),
        (None, [], [6, 3], (6, 3)),
        (None, None, None, (2,)),
        ({"eos_token_id": [7, 5000]}, 5, 6, (7,)),
    ],
)
def test_ends_are_those_of_the_first_file_that_says_some(
    generation: dict[str, Any] | None, whole: object, part: object, ends: tuple[int, ...], tmp_path: Path
) -> None:
    """An id beyond the vocabulary can't come, so it ends nothing."""
    text = {"model_type": "gemma3_text", "vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": part}
    folder = write(tmp_path, {"model_type": "gemma3", "text_config": text, "eos_token_id": whole}, generation)
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    inner.add_special_tokens(["<end>"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert read_facts(folder).eos_ids == ends == folder_vocabulary(folder).eos_ids
    assert load_folder(folder, TextConfig()).tokenizer.facts.eos_ids == ends


def test_a_folder_may_name_no_end(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA)
    assert read_facts(folder).eos_ids == ()
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert read_facts(folder).eos_ids == ()  # a node may have no tokenizer.json


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_scaling": YARN}, 131072),
        ({"rope_parameters": YARN}, 131072),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, 81920),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 50000}}, 40960),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 40960),
        ({"rope_scaling": None}, 40960),
    ],
)
def test_routers_know_what_yarn_makes_longer(rope: dict[str, Any], length: int, tmp_path: Path) -> None:
    """The router once ended it where it was before stretching, though nodes allowed more."""
    folder = write(tmp_path, LLAMA | {"max_position_embeddings": 40960} | rope)
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    assert load_folder(folder, TextConfig()).tokenizer.facts.context_length == length


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": "300"}, "vocab_size is '300', not a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0, not a whole number"),
        ({"vocab_size": True}, "vocab_size is True, not a whole number"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776, not a whole number"),
        ({"vocab_size": [300]}, r"vocab_size is \[300\], not a whole number"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1, not a whole number"),
        ({"max_position_embeddings": 1.5}, r"max_position_embeddings is 1\.5, not a whole number"),
        ({"max_position_embeddings": None, "model_type": "new"}, "does not say max_position_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', not a whole number"),
        ({"eos_token_id": [2, None]}, "eos_token_id is None, not a whole number"),
        ({"eos_token_id": -1}, "eos_token_id is -1, not a whole number"),
        ({"rope_scaling": {"type": "yarn", "factor": "four"}}, "rotary positions' lengths can't be read"),
        ({"rope_scaling": {"type": "yarn", "factor": math.inf}}, "rotary positions' lengths can't be read"),
    ],
)
def test_a_wrong_value_is_told_in_a_sentence(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """By routers and by nodes alike, with the file's name."""
    folder = write(tmp_path, LLAMA | changes)
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    for read in (read_facts, folder_vocabulary, lambda path: load_folder(path, TextConfig())):
        with pytest.raises(ConfigError, match=named) as caught:
            read(folder)
        assert "config.json" in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "BPE"}, "added_tokens": 3}', ""])
def test_a_wrong_tokenizer_is_told_in_a_sentence(text: str, tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA)
    (folder / "tokenizer.json").write_text(text)
    for read in (folder_vocabulary, lambda path: load_folder(path, TextConfig())):
        with pytest.raises(ConfigError, match=r"tokenizer\.json can't be used: .") as caught:
            read(folder)
        assert "\n" not in caught.value.message


def test_tokens_beyond_the_model_s_rows_are_none(tmp_path: Path) -> None:
    """A tokenizer may know more, such as a mark for images."""
    folder = write(tmp_path, LLAMA | {"vocab_size": 2, "eos_token_id": 1})
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    inner.add_special_tokens(["<image>"])
    inner.save(str(folder / "tokenizer.json"))
    vocabulary = folder_vocabulary(folder)
    assert (vocabulary.tokens, vocabulary.special_ids) == ((b"a", b"b"), frozenset())
    assert load_folder(folder, TextConfig()).tokenizer.facts.special_ids == frozenset()
