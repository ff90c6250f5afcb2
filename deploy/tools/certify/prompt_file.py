"""Turn a saved request, or a text, into the prompt ids that nodes would get, and compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from router.api.answer.generation_plan import Contexts
from router.api.ask.generation_api import GenerationApi
from router.api.ask.resolve import Resolver
from router.api.fields.parse import BodyParser
from router.api.openai.chat import Chat
from router.api.openai.completions import Completions
from router.certify.record import AnswerRecord, BadCertificate, certified_ids, template_digest
from router.text.load import load_text_model
from router.tools.detect import speech_of
from shared.config.settings.settings import LimitsConfig
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True)
class GivenPrompts:
    """`templates`: the model's chat templates here, which made the ids; None for ids of a text."""

    ids: Sequence[Sequence[int]]
    templates: Mapping[str, str] | None

    def certified(self, record: AnswerRecord, salt: bytes) -> list[int]:
        """Return the ids that the record has the digest of. Raise BadCertificate for other prompts or templates."""
        if self.templates is not None and template_digest(salt, self.templates) != record.template:
            raise BadCertificate("the chat template of the model here is not the certified one")
        for ids in self.ids:
            if certified_ids(salt, "prompt", ids) == record.prompt:
                return list(ids)
        lengths = " or ".join(str(len(ids)) for ids in self.ids)
        raise BadCertificate(
            f"--prompt is not the certified prompt of {record.prompt.count} tokens: it has {lengths} tokens here"
        )


def prompts_in(path: Path, model: str, options: TextConfig) -> GivenPrompts:
    """Return the file's prompts. The file holds a request's JSON body, or else one text.

    Raise ConfigError for a file that can't be read, and for a request that no router takes."""
    try:
        raw = path.read_bytes()
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt {path}: {error}") from None
    speech = speech_of(load_text_model(model, options), options.tool_format)
    resolver = Resolver("", speech.text, LimitsConfig(), calls=speech.calls)
    if not text.lstrip().startswith("{"):
        return GivenPrompts([resolver.prompt_ids(text, add_special=True)], None)
    context = resolver.text.tokenizer.facts.context_length
    is_chat = '"messages"' in text
    api: GenerationApi[Any] = Chat() if is_chat else Completions()
    try:
        body = BodyParser(api.table).parse(raw).body
        plan = api.plan(msgspec.structs.replace(body, model=None), resolver, Contexts(context, context))
    except InvalidRequest as error:
        raise ConfigError(f"--prompt {path}: {error.message}") from None
    return GivenPrompts([job.ids for job in plan.jobs], resolver.text.template.sources if is_chat else None)
