"""Turn a saved request, or a text, into the prompt ids that a router would send to nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from router.api.chat import Chat
from router.api.completions import Completions
from router.api.generation_api import GenerationApi
from router.api.generation_plan import Contexts
from router.api.parse import BodyParser
from router.api.resolve import Resolver
from router.text.load import load_text_model
from router.tools.as_text import with_tools
from shared.config.settings import LimitsConfig
from shared.core.errors import ConfigError, InvalidRequest


def prompts_in(path: Path, model: str) -> list[list[int]]:
    """Return the ids of the file's prompts. The file holds a request's JSON body, or else one text.

    Raise ConfigError for a file that can't be read, and for a request that no router takes."""
    try:
        raw = path.read_bytes()
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt {path}: {error}") from None
    resolver = Resolver("", with_tools(load_text_model(model), ""), LimitsConfig())
    if not text.lstrip().startswith("{"):
        return [resolver.prompt_ids(text, add_special=True)]
    context = resolver.text.tokenizer.facts.context_length
    api: GenerationApi[Any] = Chat() if '"messages"' in text else Completions()
    try:
        body = BodyParser(api.table).parse(raw).body
        plan = api.plan(msgspec.structs.replace(body, model=None), resolver, Contexts(context, context))
    except InvalidRequest as error:
        raise ConfigError(f"--prompt {path}: {error.message}") from None
    return [job.ids for job in plan.jobs]
