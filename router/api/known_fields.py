"""The generating endpoints, and the names of all fields of bodies."""

from __future__ import annotations

from typing import Any

from router.api.chat import Chat
from router.api.completions import Completions
from router.api.fields import known_fields
from router.api.generation_api import GenerationApi
from router.api.messages import COUNT_TOKENS, Messages
from router.api.ollama import OllamaChat, OllamaGenerate
from router.api.ollama_models import SHOW
from router.api.responses import Responses
from router.api.tokenization import DETOKENIZE, TOKENIZE

APIS: tuple[GenerationApi[Any], ...] = (Chat(), Completions(), Messages(), Responses(), OllamaChat(), OllamaGenerate())
KNOWN_FIELDS = known_fields([*(api.table for api in APIS), COUNT_TOKENS, TOKENIZE, DETOKENIZE, SHOW])
