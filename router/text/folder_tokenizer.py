"""Build tokenizer and chat template from a Hugging Face model folder. Reads only JSON and templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from router.text.chat.chat_template import JinjaTemplate, NoTemplate
from router.text.chat.control_tokens import guarded
from router.text.chat.conversation import Scalar
from router.text.chat.folder_templates import template_sources, template_tokens
from router.text.chat.interface import ChatTemplate, TextModel, VocabFacts
from router.text.fast_tokenizer import FastTokenizer
from router.text.hashlm import PlainTemplate
from shared.config.models.folder_facts import facts_of
from shared.config.models.model_folder import ModelFolder, read_folder
from shared.config.models.tokenizer_file import read_tokenizer
from shared.config.models.vocabulary import vocabulary_of
from shared.config.settings.text_settings import TextConfig


def load_folder(path: Path, options: TextConfig) -> TextModel:
    file, folder = read_tokenizer(path), read_folder(path)
    facts = facts_of(folder)
    file.inner.no_truncation()  # drops a training's settings
    file.inner.no_padding()
    vocabulary = vocabulary_of(file, facts)
    tokenizer = FastTokenizer(
        file.inner,
        tokens=vocabulary.tokens,
        facts=VocabFacts(
            vocab_size=len(vocabulary.tokens),
            eos_ids=vocabulary.eos_ids,
            special_ids=vocabulary.special_ids,
            context_length=facts.context_length,
            start_ids=facts.start_ids,
            drops_first_space=bool(facts.start_ids) and not file.is_byte_level,
        ),
        bos_id=None,  # the post-processor in the file adds the begin token
    )
    return TextModel(
        tokenizer=tokenizer,
        template=template_of(folder, options.template_kwargs, continues=not facts.start_ids),
        control_tokens=guarded(options, file.special.values()),
        about=folder.tokenizer,
    )


def template_of(folder: ModelFolder, defaults: Mapping[str, Scalar], *, continues: bool) -> ChatTemplate:
    """Raise ConfigError for a template that can't be read.

    `continues`: the model is decoder-only, so a plain template works."""
    sources = template_sources(folder.path, folder.tokenizer)
    if not sources:
        return PlainTemplate() if continues else NoTemplate()
    return JinjaTemplate(sources, template_tokens(folder.path, folder.tokenizer), defaults)
