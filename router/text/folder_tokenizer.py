"""Build tokenizer and chat template from a Hugging Face model folder. Reads only JSON and templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from router.text.chat_template import JinjaTemplate, NoTemplate
from router.text.control_tokens import guarded
from router.text.conversation import Scalar
from router.text.fast_tokenizer import FastTokenizer
from router.text.folder_templates import template_sources, template_tokens
from router.text.hashlm import PlainTemplate
from router.text.interface import ChatTemplate, TextModel, VocabFacts
from shared.config.encoder_decoder import decoder_start_id, has_encoder
from shared.config.json_file import read_json_if_there
from shared.config.text_settings import TextConfig
from shared.config.vocab_bytes import byte_level_decoder, metaspace_bytes
from shared.config.vocabulary import folder_eos_ids, is_byte_level, literal_entries
from shared.core.errors import ConfigError

ANY_LENGTH = 1 << 20  # a model with relative positions has no length limit


def load_folder(folder: Path, options: TextConfig) -> TextModel:
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, which the router needs")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.no_truncation()  # drops a training's settings
    inner.no_padding()
    described = read_json_if_there(folder / "tokenizer.json")
    config = read_json_if_there(folder / "config.json")
    nested = config.get("text_config")  # of models that also see images
    config |= nested if isinstance(nested, dict) else {}
    own = read_json_if_there(folder / "tokenizer_config.json")
    added = {int(token["id"]): token for token in described.get("added_tokens", [])}
    special = {index: token for index, token in added.items() if token.get("special")}
    start_ids = (decoder_start_id(folder, config),) if has_encoder(config) else ()
    tokenizer = FastTokenizer(
        inner,
        entry_bytes=byte_level_decoder() if is_byte_level(described) else metaspace_bytes,
        literal=literal_entries(described),
        facts=VocabFacts(
            vocab_size=int(config.get("vocab_size") or inner.get_vocab_size(with_added_tokens=True)),
            eos_ids=folder_eos_ids(folder, inner),
            special_ids=frozenset(special),
            context_length=ANY_LENGTH if start_ids else _context_length(folder, config),
            start_ids=start_ids,
            drops_first_space=bool(start_ids) and not is_byte_level(described),
        ),
        bos_id=None,  # the post-processor in the file adds the begin token
    )
    return TextModel(
        tokenizer=tokenizer,
        template=_template(folder, own, options.template_kwargs, continues=not start_ids),
        control_tokens=guarded(options, [token["content"] for token in special.values()]),
        about=own,
    )


def _context_length(folder: Path, config: Mapping[str, Any]) -> int:
    length = config.get("max_position_embeddings", config.get("n_positions"))  # GPT-2 has the second name
    if not isinstance(length, int):
        raise ConfigError(f"{folder / 'config.json'} does not say max_position_embeddings")
    return length


def _template(folder: Path, own: Mapping[str, Any], defaults: Mapping[str, Scalar], *, continues: bool) -> ChatTemplate:
    """`continues`: the model is decoder-only, so a plain template works."""
    sources = template_sources(folder, own)
    if not sources:
        return PlainTemplate() if continues else NoTemplate()
    return JinjaTemplate(sources, template_tokens(folder, own), defaults)
